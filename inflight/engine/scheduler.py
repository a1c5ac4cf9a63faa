"""Which sequences take part in the next forward pass."""

from dataclasses import dataclass, field

from inflight.core.sampling import SamplingParams
from inflight.engine.kv_cache import KVCache


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: a prompt, and the tokens drawn so far."""

    request_id: int
    group_id: int
    seed: int
    """Of this sample; draws depend on (seed, position)."""
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    """params.max_tokens, or what the context leaves."""
    tokens: list[int] = field(default_factory=list)
    row: int = -1
    """Row of the KV cache, −1 while waiting."""

    @property
    def next_position(self) -> int:
        """Index in the sequence of the token to be drawn next."""
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Decoding sequences, in row order, and the prompts that join them in one forward pass."""

    decoding: list[Sequence]
    joining: list[Sequence]

    @property
    def sequences(self) -> list[Sequence]:
        return self.decoding + self.joining


class Scheduler:
    """First come, first served: a waiting prompt joins as soon as a row of the KV cache is free.

    A joining prompt is prefilled whole. `max_prefill_tokens` bounds the padded tokens of the prompts that join in one
    pass (at least one always may), and so how long running sequences wait for them.
    """

    def __init__(self, cache: KVCache, *, max_prefill_tokens: int):
        self._cache = cache
        self._max_prefill_tokens = max_prefill_tokens
        self.waiting: dict[int, Sequence] = {}
        """By request id, in the order of arrival."""
        self.running: dict[int, Sequence] = {}
        """By row."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.request_id] = sequence

    def schedule(self) -> Schedule:
        """Admit waiting prompts and return the next pass."""
        decoding = [self.running[row] for row in sorted(self.running)]
        joining: list[Sequence] = []
        longest = 0
        while self.waiting and self._cache.num_free:
            sequence = next(iter(self.waiting.values()))
            longest = max(longest, len(sequence.prompt))
            if joining and longest * (len(joining) + 1) > self._max_prefill_tokens:
                break
            del self.waiting[sequence.request_id]
            sequence.row = self._cache.take_row()
            self.running[sequence.row] = sequence
            joining.append(sequence)
        return Schedule(decoding, joining)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, running or waiting; its row is free again."""
        if sequence.row < 0:
            del self.waiting[sequence.request_id]
            return
        del self.running[sequence.row]
        self._cache.give_back(sequence.row)
        sequence.row = -1
