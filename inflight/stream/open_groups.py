"""Groups of episodes in progress: their rollouts are made by a caller and not by an engine."""

from collections.abc import Container, Iterable

from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout
from inflight.stream.assignments import Assignments
from inflight.stream.group_table import GroupRecord, GroupTable, Owner, State
from inflight.stream.held_groups import Group, SavedCall
from inflight.stream.training_queue import TrainingQueue

EPISODE = "inflight.episode"
"""Key of the place of a turn in the metadata of the group that draws it: the group of its episode, and so on."""
PLAYER = "player"
"""Key of the name of the rollout function in the metadata of a prompt."""


def _player_of(record: GroupRecord) -> str:
    return record.prompt.metadata.get(PLAYER, "") if record.prompt is not None else ""


class OpenGroups:
    """Opens groups of episodes, notes their turns and calls, and ends them. Safe to use from several threads."""

    def __init__(self, table: GroupTable, queue: TrainingQueue, engines: Assignments):
        self._table, self._queue, self._engines = table, queue, engines

    def open(self, prompt: Prompt, *, reserved: bool) -> GroupRecord:
        """Make the record of a group of episodes, whose rollouts the caller passes to `fill`. Its prompt has a seed."""
        with self._table.lock:
            record = self._engines.begin(prompt, None)
            record.state, record.owner = State.OPEN, Owner.CALLER if reserved else Owner.TRAINING
            record.is_played = True
            return record

    def claim(self, others: Container[str]) -> list[GroupRecord]:
        """Return the groups of a loaded run that are not played yet, without groups of these other players. The caller
        plays them."""
        with self._table.lock:
            claimed = [
                record
                for record in self._table.records.values()
                if record.state is State.OPEN and not record.is_played and _player_of(record) not in others
            ]
            for record in claimed:
                record.is_played = True
            return claimed

    def turns_of(self, group_id: int) -> list[GroupRecord]:
        """Return the groups that draw turns of the episodes of a group. Called with the lock held."""
        return [
            record
            for record in self._table.records.values()
            if record.prompt is not None and (place := record.prompt.metadata.get(EPISODE)) and place[0] == group_id
        ]

    def note_turn(self, turn: Rollout) -> None:
        """Note a turn of an episode in progress, for `snapshot`. Its group_id and its sample are the episode's."""
        with self._table.lock:
            record = self._table.records.get(turn.group_id)
            if record is not None and record.state is State.OPEN:
                record.rollouts.append(turn)

    def note_call(self, group_id: int, call: SavedCall) -> None:
        """Note a call of an episode in progress, for `snapshot`. It replaces a call with the same number."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            if record is not None and record.state is State.OPEN:
                record.calls[call.sample, call.env, call.number] = call

    def calls(self, group_id: int, sample: int) -> list[SavedCall]:
        """Return the noted calls of an episode."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            return [call for call in record.calls.values() if call.sample == sample] if record is not None else []

    def forget_calls(self, group_id: int, calls: Iterable[SavedCall]) -> None:
        """Forget noted calls."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            if record is not None:
                for call in calls:
                    record.calls.pop((call.sample, call.env, call.number), None)

    def forget(self, group_id: int, sample: int) -> None:
        """Forget the noted turns and calls of an episode that begins again."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            if record is not None and record.state is State.OPEN:
                record.rollouts = [turn for turn in record.rollouts if turn.sample != sample]
                record.calls = {place: call for place, call in record.calls.items() if call.sample != sample}

    def fill(self, group_id: int, rollouts: Group) -> bool:
        """End a group of episodes with these rollouts, at least one. Returns False if the group was discarded."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            if record is None or record.state is not State.OPEN:
                return False
            record.calls.clear()
            offered = self._table.finish([rollouts])
        self._queue.offer(offered)
        return True
