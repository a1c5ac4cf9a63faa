"""Unfinished sequences by the version that they are pinned to, and the queues of those that wait."""

import itertools
from collections import Counter
from heapq import heapify, heappop, heappush

from inflight.engine.loop.order import Order
from inflight.engine.loop.sequence import Sequence

Queue = list[tuple[float, int, Sequence]]
"""A heap of (order, turn, sequence). Finished sequences stay until they are first, or until most are finished."""
_FEW = 64
"""Finished sequences stay in queues up to this length."""


class Backlog:
    """Counts unfinished sequences, and has those without a batch row in order."""

    def __init__(self, order: Order):
        self._order = order
        self.unfinished: Counter[int | None] = Counter()
        """Number of unfinished sequences of each pin."""
        self._queues: dict[tuple[int | None, bool], Queue] = {}
        """Maps pins, and if sequences have started (here, or on the engine that drew their tokens), to queues."""
        self._turns, self._turns_in_front = itertools.count(1), itertools.count(-1, -1)
        """Among sequences that are equal in order, earlier turns are first."""
        self._last_served = 0

    def next_version(self, live: int) -> int:
        """Return the version of the next pass. Versions that have sequences take turns. There must be work."""
        wanted = sorted({live if pin is None else pin for pin in self.unfinished})
        self._last_served = next((version for version in wanted if version > self._last_served), wanted[0])
        return self._last_served

    def end(self, sequence: Sequence) -> None:
        """Mark a sequence as finished."""
        sequence.finished = True
        self.unfinished[sequence.pin] -= 1
        queue = self._queue_of(sequence)
        if not self.unfinished[sequence.pin]:
            del self.unfinished[sequence.pin]
            for started in (False, True):
                self._queues.pop((sequence.pin, started), None)
        elif len(queue) > _FEW + 2 * self.unfinished[sequence.pin]:
            queue[:] = [each for each in queue if not each[2].finished]
            heapify(queue)

    def wait(self, sequence: Sequence, *, in_front: bool = False) -> None:
        """Queue a sequence, after its equals or in front of them."""
        turn = next(self._turns_in_front if in_front else self._turns)
        heappush(self._queue_of(sequence), (self._order(sequence), turn, sequence))

    def first(self, pins: tuple[int | None, ...], *, only_started: bool = False) -> Sequence | None:
        """Return the first waiting sequence in order. None also if its last draw is not known yet."""
        kinds = (True,) if only_started else (False, True)
        heads = [queue[0] for pin in pins for started in kinds if (queue := self._unfinished_of(pin, started))]
        first = min(heads)[2] if heads else None
        return None if first is None or first.num_pending else first

    def pop(self, sequence: Sequence) -> None:
        """Remove a sequence that `first` returned."""
        heappop(self._queue_of(sequence))

    @property
    def is_begun(self) -> bool:
        """A sequence that has started waits."""
        return any(self._unfinished_of(pin, True) for pin in self.unfinished)

    def _queue_of(self, sequence: Sequence) -> Queue:
        return self._queues.setdefault((sequence.pin, sequence.started or bool(sequence.tokens)), [])

    def _unfinished_of(self, pin: int | None, started: bool) -> Queue | None:
        """Return a queue without finished sequences at its beginning."""
        queue = self._queues.get((pin, started))
        while queue and queue[0][2].finished:
            heappop(queue)
        return queue
