"""Groups of episodes in progress: their rollouts are made by a caller and not by an engine."""

from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout
from inflight.stream.assignments import Assignments
from inflight.stream.group_table import GroupRecord, GroupTable, Owner, State
from inflight.stream.held_groups import Group
from inflight.stream.training_queue import TrainingQueue


class OpenGroups:
    """Opens groups of episodes, notes their turns, and ends them. Safe to use from several threads at once."""

    def __init__(self, table: GroupTable, queue: TrainingQueue, engines: Assignments):
        self._table, self._queue, self._engines = table, queue, engines

    def open(self, prompt: Prompt, *, reserved: bool) -> GroupRecord:
        """Make the record of a group of episodes, whose rollouts the caller passes to `fill`. Its prompt has a seed."""
        with self._table.lock:
            record = self._engines.begin(prompt, None)
            record.state, record.owner = State.OPEN, Owner.CALLER if reserved else Owner.TRAINING
            return record

    def note_turn(self, turn: Rollout) -> None:
        """Note a turn of an episode in progress, for `snapshot`. Its group_id and its sample are the episode's."""
        with self._table.lock:
            record = self._table.records.get(turn.group_id)
            if record is not None and record.state is State.OPEN:
                record.rollouts.append(turn)

    def forget_turns(self, group_id: int, sample: int) -> None:
        """Forget the noted turns of an episode, which begins again."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            if record is not None and record.state is State.OPEN:
                record.rollouts = [turn for turn in record.rollouts if turn.sample != sample]

    @property
    def in_progress(self) -> list[GroupRecord]:
        """Groups of episodes in progress."""
        with self._table.lock:
            return [record for record in self._table.records.values() if record.state is State.OPEN]

    def fill(self, group_id: int, rollouts: Group) -> bool:
        """End a group of episodes with these rollouts, at least one. Returns False if the group was discarded."""
        with self._table.lock:
            record = self._table.records.get(group_id)
            if record is None or record.state is not State.OPEN:
                return False
            offered = self._table.finish([rollouts])
        self._queue.offer(offered)
        return True
