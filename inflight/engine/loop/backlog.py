"""Unfinished sequences by the version that they are pinned to, and the queues of those that wait."""

import itertools
from collections import Counter
from heapq import heappop, heappush

from inflight.engine.loop.order import Order
from inflight.engine.loop.sequence import Sequence


class Backlog:
    """Counts unfinished sequences, and has those without a batch row in order."""

    def __init__(self, order: Order):
        self._order = order
        self.unfinished: Counter[int | None] = Counter()
        """Number of unfinished sequences of each pin."""
        self._queues: dict[int | None, list[tuple[float, int, Sequence]]] = {}
        """Maps pins to heaps of (order, turn, sequence). Finished sequences stay in the heaps until they are first."""
        self._turns, self._turns_in_front = itertools.count(1), itertools.count(-1, -1)
        """Among sequences that are equal in order, earlier turns are first."""
        self._last_served = 0

    def next_version(self, live: int) -> int:
        """Return the version of the next pass. Versions that have sequences take turns; there is one, unless requests
        are pinned. There must be work."""
        wanted = sorted({live if pin is None else pin for pin in self.unfinished})
        self._last_served = next((version for version in wanted if version > self._last_served), wanted[0])
        return self._last_served

    def end(self, sequence: Sequence) -> None:
        """Mark a sequence as finished."""
        sequence.finished = True
        self.unfinished[sequence.pin] -= 1
        if not self.unfinished[sequence.pin]:
            del self.unfinished[sequence.pin]
            self._queues.pop(sequence.pin, None)

    def wait(self, sequence: Sequence, *, in_front: bool = False) -> None:
        """Queue a sequence, after its equals or in front of them."""
        turn = next(self._turns_in_front if in_front else self._turns)
        heappush(self._queues.setdefault(sequence.pin, []), (self._order(sequence), turn, sequence))

    def first(self, pins: tuple[int | None, ...]) -> Sequence | None:
        """Return the first waiting sequence in order; of equal ones in several queues, the smallest request id. None
        also if that sequence was preempted and its last draw is not known yet."""
        heads: list[tuple[float, int, Sequence]] = []
        for pin in pins:
            queue = self._queues.get(pin)
            while queue and queue[0][2].finished:
                heappop(queue)
            if queue:
                heads.append((queue[0][0], queue[0][2].request_id, queue[0][2]))
        first = min(heads)[2] if heads else None
        return None if first is None or first.num_pending else first

    def pop(self, sequence: Sequence) -> None:
        """Remove a sequence that `first` returned."""
        heappop(self._queues[sequence.pin])

    @property
    def is_begun(self) -> bool:
        """A sequence that has started is first in its queue."""
        return any(queue and queue[0][2].started for queue in self._queues.values())
