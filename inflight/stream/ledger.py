"""The ledger of groups: one record per group, from its submission until a caller takes it."""

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from inflight.stream.assignments import Assignments
from inflight.stream.frame_intake import FrameIntake
from inflight.stream.group_table import GroupRecord, GroupTable, Owner, State
from inflight.stream.held_groups import Group
from inflight.stream.open_groups import OpenGroups
from inflight.stream.training_queue import TrainingQueue
from inflight.stream.wire import Held


class Ledger:
    """Groups that were submitted and not taken. Safe to use from several threads at once.

    Only a caller that names a reserved group gets it. A caller that asks for groups that have not finished gets a
    future without a value: when it is done, the caller asks again. The future fails with EngineDiedError,
    EngineHungError, JournalError, or with FrameError or StreamGapError when frames were lost. In that case the samples
    of every unfinished group arrive with finish_reason "error".
    """

    def __init__(self) -> None:
        self.table = GroupTable()
        """The records, and their lock."""
        self.queue = TrainingQueue(self.table)
        """Finished groups for training."""
        self.frames = FrameIntake(self.table, self.queue)
        self.engines = Assignments(self.table, self.queue)
        self.episodes = OpenGroups(self.table, self.queue, self.engines)

    @property
    def nbytes(self) -> int:
        """Bytes of tokens that were not taken, without ragged columns of unfinished samples."""
        with self.table.lock:
            return self.table.assembler.nbytes + self.table.finished_bytes

    @property
    def num_unfinished(self) -> int:
        """Number of samples that engines have to draw to their end, for any caller."""
        with self.table.lock:
            records = self.table.records.values()
            waiting = sum(r.num_samples for r in records if r.state is State.SUBMITTED and r.is_wanted)
            return self.table.assembler.num_unfinished + waiting

    @property
    def outstanding(self) -> list[int]:
        """Ids of groups that were submitted and not taken."""
        with self.table.lock:
            return sorted(group_id for group_id, record in self.table.records.items() if record.is_wanted)

    def held_of(self, engine_id: str | None) -> Held:
        """Return the flow-control report for an engine. engine_id: counts the output of one of several engines; None
        counts the output of all."""
        table = self.table
        with table.lock:
            if engine_id is None:
                held, unfinished = list(table.held.values()), table.assembler.num_unfinished_tokens_at.total()
            else:
                held, unfinished = [table.held[engine_id]], table.assembler.num_unfinished_tokens_at[engine_id]
            return Held(
                sum(h.num_tokens for h in held) + unfinished, sum(h.num_rollouts for h in held),
                min((h.oldest for h in held if h.oldest is not None), default=None),
                waits=len(table.waiters) > 0, follows=bool(self.frames.listeners),
                awaits_ends=table.waiters.for_named_groups,
            )  # fmt: skip

    def expect(self, group_ids: Collection[int], *, reserved: bool = False) -> None:
        """Note that these groups were submitted; some might have finished by now. reserved: only callers that name them
        get them."""
        with self.table.lock:
            finished = self.claim(group_ids, reserved=reserved)
        self.queue.offer(finished)

    def claim(self, group_ids: Collection[int], *, reserved: bool) -> list[GroupRecord]:
        """Do the same with the lock held. Returns the groups for training that have finished, for `queue.offer`."""
        records = [self.table.record(group_id) for group_id in group_ids]
        # Groups that had an owner were offered when they finished.
        unoffered = [record for record in records if record.owner is Owner.NOBODY and not reserved]
        for record in records:
            record.owner = Owner.CALLER if reserved else Owner.TRAINING
        self.frames.forget_lost_groups()
        return [record for record in unoffered if record.is_finished]

    def reserve(self, group_ids: Collection[int]) -> None:
        """Keep these groups for callers that name them."""
        with self.table.lock:
            for record in self.table.known(group_ids):
                if record.owner is Owner.TRAINING:
                    record.owner = Owner.CALLER
                    if record.is_finished:
                        self.table.move(record, State.FINISHED)
            self.table.wake_if_nothing_is_left()

    def drop(self, group_ids: Collection[int]) -> None:
        """Discard these groups and their later tokens. Callers that wait for them are woken, and get the error that
        they are not outstanding."""
        with self.table.lock:
            for record in self.table.known(group_ids):
                if record.is_finished or record.is_wanted:
                    self.discard(record)
            self.table.wake_if_nothing_is_left()
            self.table.waiters.wake(lambda waiter: not waiter.wanted.isdisjoint(group_ids))

    def discard(self, record: GroupRecord) -> bool:
        """Discard a group with the lock held. Returns True if an engine might still draw it."""
        if record.state is State.OPEN and not record.is_played:  # Nobody continues the turns of a loaded run.
            for turn in self.episodes.turns_of(record.group_id):
                self.discard(turn)
        if record.is_finished or record.state in (State.UNASSIGNED, State.OPEN):
            self.table.forget([record])
        elif record.state is not State.GONE:
            record.owner = Owner.DROPPED
            return True
        return False

    def take(self, group_ids: Collection[int]) -> "dict[int, Group] | Future[None]":
        """Take these groups, once all have finished, and remove them from the ledger.

        Raises ValueError if one is not outstanding, and StreamGapError if one was lost, without taking any group.
        """
        with self.table.lock:
            if isinstance(finished := self.finished(group_ids, len(set(group_ids))), Future):
                return finished
            found = {record.group_id: record.rollouts for record in finished}
            self.table.remove(found)
            return found

    def finished(self, group_ids: Collection[int], least: int) -> "list[GroupRecord] | Future[None]":
        """Return the finished groups among these, once there are at least `least`. Raises the same errors as
        `take`."""
        wanted = set(group_ids)
        with self.table.lock:
            self.table.waiters.raise_error()
            records = [record for record in self.table.known(wanted) if record.is_wanted]
            if len(records) < len(wanted):
                unknown = wanted.difference(record.group_id for record in records)
                raise ValueError(
                    f"groups {sorted(unknown)} are not outstanding: not submitted here, or handed out already"
                )
            finished = [record for record in records if record.is_finished]
            if len(finished) < least:
                missing = {record.group_id for record in records if not record.is_finished}
                return self.table.waiters.wait(missing, least - len(finished))
            return finished

    def leave(self, future: "Future[Any]") -> None:
        """Forget the caller that has this future."""
        with self.table.lock:
            self.table.waiters.leave(future)
