"""Assigns groups to engines, and takes them over from other trainers."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from inflight.core.errors import InflightError
from inflight.core.frames import GroupStart
from inflight.core.messages import LIVE_VERSION, Ids, Prompt
from inflight.core.rollout import Rollout, samples_of
from inflight.stream.group_table import GroupRecord, GroupTable, Owner, State
from inflight.stream.held_groups import SavedGroup
from inflight.stream.training_queue import TrainingQueue

OF_CLIENT = "inflight.client"
"""Key in the metadata of a prompt that a client of the server has sent."""


class Assignments:
    """The engines of groups. A group whose engine has ended is unassigned until another engine continues it."""

    def __init__(self, table: GroupTable, queue: TrainingQueue):
        self._table, self._queue = table, queue
        self.next_ids = Ids(0, 0)
        """The ids of the next group; all earlier groups have smaller ones."""

    def begin(self, prompt: Prompt, at: Any, origin: tuple[int, int] | None = None) -> GroupRecord:
        """Make the record of a prompt that is about to be sent to an engine, with the lock held. A prompt without a
        seed gets one, since another engine needs it to continue the group. `Ledger.claim` sets its owner."""
        prompt, ids = prompt.seeded(), self.next_ids
        self.next_ids = Ids(ids.group_id + 1, ids.first_request_id + prompt.params.n)
        record = self._table.records[ids.group_id] = GroupRecord(
            ids.group_id, prompt=prompt, ids=ids, origin=origin, at=at
        )
        return record

    def count_from(self, ids: Ids) -> None:
        """Give later groups these ids or larger ones."""
        mine = self.next_ids
        self.next_ids = Ids(max(ids.group_id, mine.group_id), max(ids.first_request_id, mine.first_request_id))

    def note_cancelled(self, group_ids: Collection[int], request_ids: Collection[int]) -> None:
        """Note samples that have to end, also on an engine that continues their groups."""
        with self._table.lock:
            for record in self._table.known(group_ids):
                record.cancelled.update(record.request_ids)
            wanted = set(request_ids)
            for record in self._table.records.values() if wanted else ():
                if not record.is_finished:
                    record.cancelled.update(wanted.intersection(record.request_ids))

    @property
    def unassigned(self) -> list[GroupRecord]:
        """Groups that no engine draws. Called with the lock held."""
        return [record for record in self._table.records.values() if record.state is State.UNASSIGNED]

    def unassign(self, at: Any, engine_id: str, version: int) -> int:
        """Note that an engine has ended. All of its frames must have been read. Its unfinished groups become
        unassigned. Groups that are not outstanding are deleted. version: the newest one of the engine. Returns the
        number of groups that became unassigned."""
        with self._table.lock:
            num_left = 0
            for record in list(self._table.records.values()):
                if record.at is not at and record.engine_id != engine_id:
                    continue
                if not record.is_wanted:
                    self._table.forget([record])
                elif not record.is_finished:
                    record.version = max(record.version, version)
                    self._unassign(record)
                    num_left += 1
            self._table.changed.notify_all()
            return num_left

    def pin_of(self, record: GroupRecord) -> int | None:
        """Return the pin of a group, with the lock held. For LIVE_VERSION it is the version that the engine has chosen,
        if a token has been drawn."""
        group = self._table.assembler.groups.get(record.group_id)
        if group is None or record.pin != LIVE_VERSION:
            return record.pin
        has_tokens = any(len(rollout.token_ids) for rollout in [*group.finished, *group.partial()])
        return group.start.pin if has_tokens else LIVE_VERSION

    def assign(self, record: GroupRecord, at: Any) -> None:
        """Note that an engine is about to continue a group, with the lock held."""
        record.at, record.state = at, State.SUBMITTED if record.drawn is None else State.DRAWING

    def note_refusal(self, record: GroupRecord, by: Any, reason: str) -> None:
        """Note that an engine does not continue a group, with the lock held. Another engine can continue it."""
        record.refusals[by] = reason
        record.at, record.state = None, State.UNASSIGNED
        self._table.changed.notify_all()

    def _unassign(self, record: GroupRecord) -> None:
        group = self._table.assembler.groups.get(record.group_id)
        record.drawn = group.drawn() if group is not None else None
        record.at, record.state, record.waited_s = None, State.UNASSIGNED, 0.0
        if record.prompt is not None:
            record.prompt = msgspec.structs.replace(record.prompt, version=self.pin_of(record))
        if not record.drawn or not any(record.drawn.values()):
            record.version = 0

    def snapshot(self) -> list[SavedGroup[Rollout]]:
        """Return all outstanding groups with their samples so far, in the order in which `next` returns them. Groups of
        a server's clients are left out: no client waits for them in another process."""
        with self._table.lock:
            lent = sorted(group_id for group_id, record in self._table.records.items() if record.state is State.LENT)
            in_order = dict.fromkeys([*lent, *self._table.ready, *sorted(self._table.records)])
            groups: list[SavedGroup[Rollout]] = []
            for record in (self._table.records[group_id] for group_id in in_order):
                if not record.is_wanted or record.prompt is None or OF_CLIENT in record.prompt.metadata:
                    continue
                arrived = list(record.rollouts)
                is_open = record.state is State.OPEN
                if not (is_open or record.is_finished):
                    begun = self._table.assembler.groups.get(record.group_id)
                    arrived = [*begun.finished, *begun.partial()] if begun is not None else []
                calls, cancelled = list(record.calls.values()), sorted(record.cancelled)
                reserved = record.owner is Owner.CALLER
                prompt = msgspec.structs.replace(record.prompt, version=self.pin_of(record))
                groups.append(
                    SavedGroup(record.ids, reserved, prompt, record.origin, arrived, is_open, calls, cancelled)
                )
            return groups

    def restore(self, groups: Sequence[SavedGroup[Rollout]], next_ids: Ids) -> None:
        """Continue groups that another trainer has saved. Raises InflightError if prompts were submitted before."""
        with self._table.lock:
            if any(record.is_wanted for record in self._table.records.values()):
                raise InflightError("prompts were submitted already; load a run before that")
            self.count_from(next_ids)
            finished = []
            for group in groups:
                ids, prompt = group.ids, group.prompt
                owner = Owner.CALLER if group.reserved else Owner.TRAINING
                record = GroupRecord(ids.group_id, owner, prompt=prompt, ids=ids, origin=group.forked_from)
                record.cancelled.update(group.cancelled)
                self._table.records[record.group_id] = record
                if group.is_open:
                    record.state, record.rollouts = State.OPEN, group.rollouts
                    record.calls = {(call.sample, call.env, call.number): call for call in group.calls}
                elif len(samples_of(r for r in group.rollouts if r.finish_reason)) == prompt.params.n:
                    finished.append(group.rollouts)
                else:
                    if group.rollouts:
                        self._table.assembler.restore(start_of(group), group.rollouts)
                    record.version = max(
                        (int(r.weight_versions[-1]) for r in group.rollouts if len(r.weight_versions)), default=0
                    )
                    self._unassign(record)
            offered = self._table.finish(finished)
            self._table.changed.notify_all()
        self._queue.offer(offered)


def start_of(group: SavedGroup[Rollout]) -> GroupStart:
    """Return the announcement of a group that has rollouts."""
    prompt, ids = group.prompt, group.ids
    return GroupStart(
        ids.group_id,
        ids.first_request_id,
        prompt.token_ids,
        prompt.params,
        prompt.metadata,
        group.forked_from,
        group.rollouts[0].banned,
        prompt.adapter,
        prompt.version,
    )
