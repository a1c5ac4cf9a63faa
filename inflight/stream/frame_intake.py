"""Takes frames in: their tokens, the groups that they start and end, and errors of the stream."""

import logging
from collections.abc import Callable, Collection, Mapping

from inflight.core.errors import InflightError
from inflight.core.frames import TokenFrame
from inflight.stream.group_table import GroupTable, State
from inflight.stream.held_groups import Group
from inflight.stream.training_queue import TrainingQueue

logger = logging.getLogger(__name__)


class FrameIntake:
    """The part of the ledger that frames reach first. Safe to use from several threads at once."""

    def __init__(self, table: GroupTable, queue: TrainingQueue):
        self._table, self._queue = table, queue
        self.on_frame: Callable[[TokenFrame], None] = lambda frame: None
        """Called with each frame, with the lock held."""
        self.listeners: tuple[Callable[[], None], ...] = ()
        self._lost_below: int | None = None
        """Unknown groups with smaller ids were lost with their frames."""
        self._damaged = False
        """Frames were lost, and the next frame will show which groups were announced in them."""

    @property
    def num_tokens(self) -> int:
        return self._table.assembler.num_tokens

    def take_in(self, frame: TokenFrame) -> None:
        """Add the tokens of a frame, and note the groups that start or end with it."""
        header = frame.header
        with self._table.lock:
            self.on_frame(frame)
            groups = self._table.assembler.add(frame)
            for start in header.groups:
                if not (record := self._table.record(start.group_id)).is_finished:
                    record.state, record.engine_id = State.DRAWING, header.engine_id
            faults = self._table.assembler.faults
            for group_id, fault in faults.items():
                logger.error("%s", fault)
                self._table.waiters.fail(fault, [group_id])
            faults.clear()
            offered = self._table.finish(groups, header.engine_id)
            if self._damaged:
                self._damaged = False
                self._lost_below = header.next_group_id
                self.forget_lost_groups()
        self._queue.offer(offered)
        for listener in self.listeners:
            listener()

    def lose(self, error: InflightError) -> None:
        """End all unfinished groups as "error", since frames were lost, and raise the error in callers that wait."""
        with self._table.lock:
            offered = self._table.finish(self._table.assembler.abandon())
            self._damaged = True
            self._table.waiters.fail(error)
        self._queue.offer(offered)

    def fail(self, group_ids: Collection[int]) -> None:
        """End groups that no engine continues, with finish_reason "error"."""
        with self._table.lock:
            known = [group_id for group_id in group_ids if group_id in self._table.assembler.groups]
            offered = self._table.finish([self._table.assembler.fail(group_id) for group_id in known])
            # These ids include groups that ended before; only groups without any frame are lost.
            finished = {record.group_id for record in self._table.known(group_ids) if record.is_finished}
            lost = set(group_ids) - finished
            self._table.count_as_lost(lost, f"no engine goes on with groups {sorted(lost)}, of which nothing has come")
        self._queue.offer(offered)

    def end(self, error: InflightError) -> None:
        """Note that the stream has ended. Raise this error in waiting callers, and from now on in callers that would
        wait."""
        with self._table.lock:
            self._table.waiters.end(error)

    def report(self, error: InflightError) -> None:
        """Raise an error in all callers that wait."""
        with self._table.lock:
            self._table.waiters.wake(lambda waiter: True, error)

    def partial(self, group_id: int) -> Group:
        """Return the unfinished samples of a group, with the tokens so far."""
        with self._table.lock:
            self._table.waiters.raise_error()
            return self._table.assembler.partial(group_id)

    def news(self, group_id: int, seen: Mapping[int, int]) -> Group:
        """Return the samples of an outstanding group without the tokens that the caller has. seen: maps request ids to
        the number of those tokens."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            if record is not None and record.is_finished:
                return [rollout.since(seen.get(rollout.request_id, 0)) for rollout in record.rollouts]
            group = self._table.assembler.groups.get(group_id)
            return group.since(seen) if group is not None else []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this listener after every frame, in the thread that reads; it must return at once."""
        with self._table.lock:
            self.listeners = (*self.listeners, listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Stop calling this listener."""
        with self._table.lock:
            self.listeners = tuple(other for other in self.listeners if other != listener)

    def forget_lost_groups(self) -> None:
        """Delete groups that were announced in lost frames, with the lock held: no other frame has named them."""
        if self._lost_below is None:
            return
        lost = {
            group_id
            for group_id, record in self._table.records.items()
            if group_id < self._lost_below and record.is_wanted and record.state is State.SUBMITTED
        }
        if lost:
            logger.error("groups %s were lost with their frames", sorted(lost))
            self._table.count_as_lost(lost, f"groups {sorted(lost)} were lost with their frames")
