"""When the engine admits nothing new because the trainer is behind; bounds that the user sets, and none by default."""

from inflight.core.options import EngineOptions
from inflight.stream.wire import Held
from inflight.stream.writer import StreamWriter


class Admission:
    """Says whether sequences that have not begun may begin, from what the trainer's acknowledgements tell.

    Tokens are never dropped: what runs goes on. A trainer that waits for rollouts is not behind by what it holds, so
    that no bound can keep a batch from filling up.
    """

    def __init__(self, options: EngineOptions, stream: StreamWriter):
        self._options, self._stream = options, stream

    def is_open(self, *, num_tokens: int, num_rollouts: int, version: int) -> bool:
        """num_tokens, num_rollouts: drawn and ended by this engine so far. version: the newest that is live."""
        options, kept, trainer = self._options, self._stream.kept, self._stream.trainer
        held = Held() if trainer.waits else trainer
        behind = (
            (options.max_unconsumed_tokens, num_tokens - trainer.num_tokens + held.held_tokens),
            (options.max_unconsumed_rollouts, num_rollouts - trainer.num_rollouts + held.held_rollouts),
            (options.max_unconsumed_lag, 0 if held.oldest is None else version - held.oldest),
            (options.max_unacknowledged_bytes, kept.bytes_in_memory + kept.bytes_in_files),
        )
        return all(not bound or value < bound for bound, value in behind)
