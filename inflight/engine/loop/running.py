"""Running sequences: their batch rows, and their blocks of the cache."""

import itertools
from collections.abc import Iterable

import numpy as np

from inflight.core.messages import SlotReady
from inflight.core.options import EngineOptions
from inflight.engine.cache.blocks import NO_VERSION, Entry, Namespace
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.loop.order import Order
from inflight.engine.loop.rows import PREFILL, Rows
from inflight.engine.loop.sequence import UNPINNED, Chunk, Schedule, Sequence


class KVNamespaces:
    """Namespaces of the state that passes compute for sequences."""

    def __init__(self, options: EngineOptions):
        self._across, self._keeps = options.prefix_across_versions, options.kv_on_swap == "keep"
        self._of_adapters: dict[str, int] = {}
        """Maps adapters to the namespace of their present state, the weights under them included."""
        self._changed_at: dict[str, int] = {}
        """Maps adapters to the version that changed them, or the weights under them, last."""
        self._new = itertools.count(1 << 40)  # beyond all versions
        self._published_at = dict.fromkeys(options.adapters, 0)
        """Maps adapters to the last version that changed them alone."""
        self.renew(options.adapters, 0)

    def changed_by(self, ready: SlotReady) -> list[str]:
        """Return the adapters that a publish of adapters changes."""
        before = self._published_at
        self._published_at = {name: ready.changed_at.get(name, ready.version) for name in before}
        return [name for name, version in self._published_at.items() if version != before[name]]

    def renew(self, adapters: Iterable[str], version: int) -> None:
        """Separate the state that these adapters compute from this version on from all earlier state."""
        self._of_adapters |= {adapter: next(self._new) for adapter in adapters}
        self._changed_at |= dict.fromkeys(adapters, version)

    def of(self, sequence: Sequence, version: int, stamp: int) -> tuple[Namespace, int, int]:
        """Return the namespace and the version of the state that a pass computes for a sequence, and the oldest version
        whose state it can reuse. version: of the weights; stamp: with publishes of adapters counted."""
        computed_by = version if sequence.adapter is None else stamp
        oldest, across = 0, self._lag(sequence.params.prefix_across_versions)
        if across and sequence.pin is UNPINNED:  # the state can be of several versions
            namespace = sequence.adapter or ""
            oldest = self._oldest(namespace, computed_by, across)
        else:
            namespace = version if sequence.adapter is None else self._of_adapters[sequence.adapter]
        salt = sequence.params.cache_salt
        return ((namespace, salt) if salt else namespace), computed_by, oldest

    def reach(self, entry: Entry, lag: int | None, version: int, stamp: int) -> bool:
        """Return True if prompts that are not pinned, with this maximum version lag, can reuse an entry."""
        namespace = entry.key[0][0] if isinstance(entry.key[0], tuple) else entry.key[0]
        if isinstance(namespace, int):
            return namespace == version or namespace in self._of_adapters.values()
        return entry.oldest >= self._oldest(namespace, stamp if namespace else version, self._lag(lag))

    def _lag(self, asked: int | None) -> int:
        return self._across if asked is None or not self._keeps else asked

    def _oldest(self, adapter: str, computed_by: int, lag: int) -> int:
        """Return the oldest version whose state can be reused, for an adapter or, named "", the weights alone."""
        return min(computed_by - lag, self._changed_at.get(adapter, computed_by))


class RunningSequences:
    """Sequences with a batch row, in order."""

    def __init__(self, cache: KVCache, rows: Rows, order: Order, namespaces: KVNamespaces):
        self._cache, self._rows, self._order, self._namespaces = cache, rows, order, namespaces
        self.by_id: dict[int, Sequence] = {}
        """Maps request ids to sequences, in order. Equal ones are in the order of their admission."""
        self._in_order = np.zeros(0, np.int64)
        """Batch rows in that order, valid at `_epoch`."""
        self._epoch = 0

    def in_order(self) -> np.ndarray:
        """Return the batch rows i64[N] of the sequences, in their order."""
        if self._epoch != self._rows.epoch:
            rows = (sequence.batch_row for sequence in self.by_id.values())
            self._in_order = np.fromiter(rows, np.int64, len(self.by_id))
            self._epoch = self._rows.epoch
        return self._in_order

    def num_growing(self) -> int:
        """Return the number of sequences that might need another block."""
        return int(np.count_nonzero(self._rows.num_blocks * self._cache.block_size < self._rows.limits))

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a batch row. One must be free."""
        self._rows.enter(sequence)
        if not self._cache.slides:
            self._rows.reserved[sequence.batch_row] = self._cache.room(sequence.holding)
        last = next(reversed(self.by_id.values()), sequence)
        self.by_id[sequence.request_id] = sequence
        if self._order(sequence) < self._order(last):
            ordered = sorted(self.by_id.items(), key=lambda item: self._order(item[1]))
            self.by_id.clear()
            self.by_id.update(ordered)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence's batch row and blocks away."""
        del self.by_id[sequence.request_id]
        self.remember(sequence)
        if sequence.finished and sequence.params.protect_s:
            last = sequence.holding.last_entry
            protect_s, lag = sequence.params.protect_s, sequence.params.prefix_across_versions
            self._cache.prefixes.protections.begin(sequence.group_id, last, protect_s, lag)
        self._rows.leave(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence."""
        self._cache.release(sequence.holding)
        sequence.taken_over, sequence.taken_over_version = 0, NO_VERSION

    def grow(self, rows: np.ndarray) -> bool:
        """Take another block for each of these decoding rows i64[N]. False, with nothing taken, if it is not enough."""
        if not len(rows):
            return True
        blocks = self._cache.grow([sequence.holding for sequence in self._rows.sequences[rows]])
        if blocks is not None:
            self._rows.add_blocks(rows, blocks, self._cache.block_size)
        return blocks is not None

    def reserve(self, sequence: Sequence, length: int) -> bool:
        """Take blocks for a sequence's first `length` tokens. False, with nothing taken, if there are too few."""
        if not self._cache.reserve(sequence.holding, length):
            return False
        self._rows.reserved[sequence.batch_row] = self._cache.room(sequence.holding)
        self._rows.update_blocks(sequence)
        return True

    def advance(self, sequence: Sequence, count: int, version: int, stamp: int) -> Chunk:
        """Return the next `count` tokens of a sequence, which the next pass computes."""
        holding, (namespace, computed_by, _) = sequence.holding, self._namespaces.of(sequence, version, stamp)
        start = holding.computed
        self._cache.advance(holding, count, namespace, computed_by)
        scored = min(count, len(sequence.prompt) - 1 - start) if sequence.scores_prompt else 0
        return Chunk(sequence, start, count, scored)

    def report(self, sequence: Sequence) -> None:
        """Report the tokens that a decoding sequence has computed to the cache."""
        # Every pass computes a token of every decoding sequence, and the cache needs the number only now and then.
        if sequence.batch_row >= 0 and self._rows.regimes[sequence.batch_row] != PREFILL:
            sequence.holding.computed = sequence.length - 1

    def remember_all(self, schedule: Schedule) -> None:
        """Enter full blocks into the prefix cache, now that the tokens of a pass are known. Blocks of prompts enter at
        once, blocks of decoding sequences some at a time, and their last ones when they leave."""
        cohort = schedule.draws.cohort
        for index in self._rows.are_full(cohort, schedule.num_single).nonzero()[0].tolist():
            self.remember(cohort.sequences[index])
        for chunk in schedule.prompts:
            if chunk.sequence.batch_row >= 0:
                self.remember(chunk.sequence)

    def remember(self, sequence: Sequence) -> None:
        """Enter the full blocks of a sequence into the prefix cache."""
        self.report(sequence)
        self._cache.prefixes.remember(sequence.holding, sequence.num_known, sequence.token_slice)
        self._rows.fills[sequence.batch_row] = self._cache.prefixes.next_full(sequence.holding)
