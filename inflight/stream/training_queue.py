"""The queue of finished groups for training."""

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future

from inflight.stream.group_table import GroupRecord, GroupTable, Owner, State


class TrainingQueue:
    """Groups for training, in the order in which they become ready. Safe to use from several threads at once."""

    def __init__(self, table: GroupTable):
        self._table = table
        self.on_finished: Callable[[GroupRecord], bool] = lambda record: True
        """Called with each finished group. Returns True if it is ready; else `ready` is called later."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called after each group that becomes ready, without the lock."""

    @property
    def needs_frames(self) -> bool:
        """True if a caller waits for a group that has not finished."""
        table = self._table
        with table.lock:
            if not len(table.waiters):  # The common case needs no scan.
                return False
            in_hand = (State.FINISHED, State.READY)
            return table.waiters.for_named_groups or not any(
                record.owner is Owner.TRAINING and record.state in in_hand for record in table.records.values()
            )

    @property
    def outstanding(self) -> list[int]:
        """Ids of groups for training that `next` has not returned."""
        with self._table.lock:
            records = self._table.records.values()
            return [r.group_id for r in records if r.owner is Owner.TRAINING and r.state is not State.LENT]

    def next(self) -> "GroupRecord | Future[None] | None":
        """Return a ready group, in the state LENT until `Ledger.remove` or `put_back` is called. Returns None if all
        outstanding groups are reserved or in that state."""
        table = self._table
        with table.lock:
            table.waiters.raise_error()
            if table.ready:
                _, record = table.ready.popitem(last=False)
                record.state = State.LENT
                return record
            return None if table.nothing_is_left else table.waiters.wait(set(), 1)

    def put_back(self, group_ids: Collection[int]) -> None:
        """Queue groups again that `next` has returned. `next` returns them first."""
        table = self._table
        with table.lock:
            for record in reversed(table.known(group_ids)):
                if record.owner is Owner.TRAINING and record.is_finished:
                    table.move(record, State.READY)
                    table.ready.move_to_end(record.group_id, last=False)
            table.waiters.wake_for_any()

    def hold(self, record: GroupRecord) -> None:
        """Keep a group that `next` has returned out of the queue until `ready` is called."""
        with self._table.lock:
            if record.state is State.LENT:
                record.state = State.FINISHED

    def ready(self, record: GroupRecord) -> bool:
        """Let `next` return a finished group. Returns False if the group is not for training."""
        table = self._table
        with table.lock:
            if record.owner is not Owner.TRAINING or record.state is not State.FINISHED:
                return False
            table.move(record, State.READY)
            table.waiters.wake_for_any()
        self.on_ready()
        return True

    def offer(self, records: Iterable[GroupRecord]) -> None:
        """Let finished groups for training become ready. Called without the lock."""
        for record in records:
            if self.on_finished(record):
                self.ready(record)
