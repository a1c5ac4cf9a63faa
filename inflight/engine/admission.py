"""When the engine admits nothing new because the trainer is behind; bounds that the user sets, and none by default."""

from inflight.engine.backend import Backend
from inflight.stream.wire import Held
from inflight.stream.writer import StreamWriter


def may_begin(engine: Backend, stream: StreamWriter) -> bool:
    """Whether sequences that have not begun may begin, from what the trainer's acknowledgements tell.

    Tokens are never dropped: what runs goes on. A trainer that waits for rollouts is not behind by what it holds, so
    that no bound can keep a batch from filling up.
    """
    options, kept, trainer = engine.options, stream.kept, stream.trainer
    held = Held() if trainer.waits else trainer
    behind = (
        (options.max_unconsumed_tokens, engine.num_tokens - trainer.num_tokens + held.held_tokens),
        (options.max_unconsumed_rollouts, engine.requests.num_ended - trainer.num_rollouts + held.held_rollouts),
        (options.max_unconsumed_lag, 0 if held.oldest is None else engine.version - held.oldest),
        (options.max_unacknowledged_bytes, kept.bytes_in_memory + kept.bytes_in_files),
    )
    return all(not bound or value < bound for bound, value in behind)
