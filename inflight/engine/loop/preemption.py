"""Takes batch rows and blocks back from sequences, which compute their tokens again later."""

from collections.abc import Collection

from inflight.engine.loop.backlog import Backlog
from inflight.engine.loop.rows import PREFILL, Rows
from inflight.engine.loop.running import RunningSequences
from inflight.engine.loop.sequence import UNPINNED, Sequence

_MOST_RESTARTS = 8
"""Swaps in a row that can interrupt a prefill; the next swap waits until the sequence has drawn a token."""


class Preemption:
    """Sends running sequences back to the backlog, and releases the blocks of waiting forks."""

    def __init__(self, rows: Rows, running: RunningSequences, backlog: Backlog):
        self._rows, self._running, self._backlog = rows, running, backlog
        self.waiting_forks: dict[int, Sequence] = {}
        """Maps request ids to waiting forks with blocks of their parents."""
        self.count = 0
        """Number of preempted sequences."""

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's batch row and blocks away. It waits before its equals."""
        self.count += 1
        self._send_back(sequence)

    def preempt_all(self) -> None:
        """Preempt all sequences, so that no sequence holds a block."""
        for sequence in reversed(list(self._running.by_id.values())):
            self.preempt(sequence)
        for sequence in list(self.waiting_forks.values()):
            self.release(sequence)

    def recompute_unpinned(self, adapters: Collection[str] | None = None) -> None:
        """Let running sequences that are not pinned compute their state again: in prefill from the first token. Waiting
        forks release the blocks that they share with their parents. adapters: only sequences that use one of them."""

        def is_meant(sequence: Sequence) -> bool:
            return sequence.pin is UNPINNED and (adapters is None or sequence.adapter in adapters)

        for sequence in reversed(list(self._running.by_id.values())):
            if is_meant(sequence):
                sequence.num_restarts += self._rows.regimes[sequence.batch_row] == PREFILL
                self._send_back(sequence)
        for fork in list(self.waiting_forks.values()):
            if is_meant(fork):
                self.release(fork)

    @property
    def must_finish_prefill(self) -> bool:
        """True if swaps have restarted the prefill of a running sequence the maximum number of times."""
        return any(
            sequence.num_restarts >= _MOST_RESTARTS and self._rows.regimes[sequence.batch_row] == PREFILL
            for sequence in self._running.by_id.values()
        )

    def make_room(self, sequence: Sequence, length: int) -> bool:
        """Take blocks for a running sequence, from others if necessary. False if it was preempted itself."""
        while not self._running.reserve(sequence, length):
            # A waiting fork loses only shared state that it can compute again. A running sequence would lose its row.
            if self.release_a_fork():
                continue
            victim = next(reversed(self._running.by_id.values()))
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def release_a_fork(self, but: Sequence | None = None) -> bool:
        """Release the shared blocks of the youngest waiting fork other than `but`. False if there is none."""
        for sequence in reversed(self.waiting_forks.values()):
            if sequence is not but:
                self.release(sequence)
                return True
        return False

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a waiting sequence."""
        self.waiting_forks.pop(sequence.request_id, None)
        self._running.release(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        self._running.leave(sequence)
        self._backlog.wait(sequence, in_front=True)
