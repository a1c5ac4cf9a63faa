"""Admission control: within bounds of the user, no sequences start while the trainer is too far behind."""

from inflight.engine.backend import Backend
from inflight.stream.wire import Held
from inflight.stream.writer import StreamWriter


def may_begin(engine: Backend, stream: StreamWriter) -> bool:
    """Return True if sequences that have not started are allowed to start, according to the trainer's acknowledgements.

    Tokens are never dropped: running sequences continue. While a trainer waits for rollouts, the rollouts that it holds
    do not count, so that no bound can prevent a batch from filling up.
    """
    options, kept, trainer = engine.options, stream.kept, stream.trainer
    held = Held() if trainer.waits else trainer
    behind = (
        (options.max_unconsumed_tokens, engine.num_tokens - kept.num_forgotten_tokens + held.held_tokens),
        (options.max_unconsumed_rollouts, engine.requests.num_ended - kept.num_forgotten_ends + held.held_rollouts),
        (options.max_unconsumed_lag, 0 if held.oldest is None else engine.version - held.oldest),
        (options.max_unacknowledged_bytes, kept.bytes_in_memory + kept.bytes_in_files),
    )
    return all(not bound or value < bound for bound, value in behind)
