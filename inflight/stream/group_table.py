"""Records of groups: one per group, from its submission until a caller takes it.

    SUBMITTED → DRAWING → FINISHED → READY ⇄ LENT → GONE
         ⇅         ⇅          ↑
          UNASSIGNED        OPEN (a group of episodes, made of other groups)

The engine of an unassigned group has ended, and another one has to continue it.

A group belongs to the caller that submitted it. One lock guards all records, the frames that are assembled, and the
callers that wait. A thread that holds the lock waits for nothing else.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from inflight.core.errors import StreamGapError
from inflight.core.messages import Ids, Prompt
from inflight.stream.assembler import Assembler
from inflight.stream.held_groups import Group, GroupSize, HeldGroups, SavedCall
from inflight.stream.waiters import Waiters


class Owner(Enum):
    """The caller that gets a group."""

    NOBODY = auto()
    """No caller has learned its id yet."""
    TRAINING = auto()
    """The next caller of `next`."""
    CALLER = auto()
    """The caller that names it."""
    DROPPED = auto()
    """No caller any more: it is discarded when it ends."""


class State(Enum):
    """Progress of a group."""

    SUBMITTED = auto()
    """No frame has announced it."""
    UNASSIGNED = auto()
    """No engine draws it: its engine has ended, or another trainer saved it."""
    DRAWING = auto()
    """Some of its samples have not ended."""
    OPEN = auto()
    """This process makes its rollouts from the turns that engines draw in other groups."""
    FINISHED = auto()
    """All samples have ended, and its scores might be pending."""
    READY = auto()
    """`next` can return it."""
    LENT = auto()
    """`next` has returned it, and `put_back` can return it to the queue."""
    GONE = auto()
    """A caller has it, or no caller gets it. The ledger has deleted it."""


_NO_IDS = Ids(0, 0)
_FINISHED = (State.FINISHED, State.READY, State.LENT)


@dataclass(slots=True, eq=False)
class GroupRecord:
    """State of one group on the trainer's side."""

    group_id: int
    owner: Owner = Owner.NOBODY
    state: State = State.SUBMITTED
    rollouts: Group = field(default_factory=list)
    """Its samples in order, once all have ended."""
    engine_id: str = ""
    """The engine that announced it last, or that ended it."""
    size: GroupSize | None = None
    """Tokens and bytes of the rollouts."""
    scoring: Any = None
    """The last scoring of the group, an object of `GroupScoring`."""
    prompt: Prompt | None = None
    """The prompt, with a seed, if this process submitted it."""
    ids: Ids = _NO_IDS
    """Its own id and the id of its first request, if this process submitted it."""
    origin: tuple[int, int] | None = None
    """The request that it is forked from, and the number of tokens of that request."""
    at: Any = None
    """The connection to the engine that draws it; None if no engine does."""
    cancelled: set[int] = field(default_factory=set)
    """Ids of requests that have to end, on any engine that draws them."""
    drawn: dict[int, list[int]] | None = None
    """Maps its unfinished requests to their tokens at the end of its last engine; None: it had not begun."""
    version: int = 0
    """Minimum weight version of an engine that continues it."""
    calls: dict[tuple[int, int, int], SavedCall] = field(default_factory=dict)
    """Calls of tools and environments of episodes in progress, by sample, environment and number."""
    is_played: bool = False
    """True if a rollout function of this process makes the episodes of the group."""
    waited_s: float = 0.0
    """Time in which engines served and none could continue it."""
    refusals: dict[Any, str] = field(default_factory=dict)
    """Maps engines that have refused to continue it to their reasons."""

    @property
    def is_finished(self) -> bool:
        """True if all samples have ended."""
        return self.state in _FINISHED

    @property
    def num_samples(self) -> int:
        return self.prompt.params.n if self.prompt is not None else 0

    @property
    def num_unfinished(self) -> int:
        """Number of samples that another engine would continue."""
        return self.num_samples if self.drawn is None else len(self.drawn)

    @property
    def request_ids(self) -> range:
        return range(self.ids.first_request_id, self.ids.first_request_id + self.num_samples)

    @property
    def pin(self) -> int | None:
        """The weight version that draws all of its tokens; None: the newest one draws each token."""
        return self.prompt.version if self.prompt is not None else None

    @property
    def is_wanted(self) -> bool:
        """True if the group is outstanding: a caller gets it."""
        return self.owner in (Owner.TRAINING, Owner.CALLER)


class GroupTable:
    """The records, with the tokens of unfinished groups and the callers that wait. All methods except `remove` are
    called with the lock held."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when groups become unassigned."""
        self.records: dict[int, GroupRecord] = {}
        """Maps group ids to records of outstanding groups, and of groups whose frames still arrive."""
        self.ready: OrderedDict[int, GroupRecord] = OrderedDict()
        """Groups in the state READY, in the order in which they are returned."""
        self.waiters = Waiters()
        self.assembler = Assembler()
        self.held: defaultdict[str, HeldGroups] = defaultdict(HeldGroups)
        """Totals of the finished groups that each engine has drawn, by its id."""

    @property
    def finished_bytes(self) -> int:
        """Bytes of finished groups that were not taken. Does not need the lock."""
        return sum(held.nbytes for held in list(self.held.values()))

    def record(self, group_id: int) -> GroupRecord:
        """Return the record of a group, a new one if there is none."""
        record = self.records.get(group_id)
        if record is None:
            record = self.records[group_id] = GroupRecord(group_id)
        return record

    def known(self, group_ids: Iterable[int]) -> list[GroupRecord]:
        """Return the records of those groups that have one."""
        return [self.records[group_id] for group_id in group_ids if group_id in self.records]

    def move(self, record: GroupRecord, state: State) -> None:
        """Change the state of a finished group."""
        record.state = state
        if state is State.READY:
            self.ready[record.group_id] = record
        else:
            self.ready.pop(record.group_id, None)

    def finish(self, groups: list[Group], engine_id: str = "") -> list[GroupRecord]:
        """Record finished groups of this engine. Returns the groups for training, for `TrainingQueue.offer`."""
        finished: list[GroupRecord] = []
        for group in groups:
            record = self.record(group[0].group_id)
            if record.owner is Owner.DROPPED:
                self.delete(record)
                continue
            record.rollouts, record.size, record.engine_id = group, GroupSize.of(group), engine_id
            record.state = State.FINISHED
            self.held[engine_id].add(record.size)
            finished.append(record)
        if finished:
            self.waiters.finished([record.group_id for record in finished])
        # Decided with the lock held, so that each group is offered once, here or after `Ledger.claim`.
        return [record for record in finished if record.owner is Owner.TRAINING]

    def delete(self, record: GroupRecord) -> None:
        if record.size is not None:
            self.held[record.engine_id].add(record.size, -1)
        record.scoring = None  # A cycle: the scoring refers to the record, and so to all tokens.
        self.move(record, State.GONE)
        del self.records[record.group_id]

    def forget(self, records: Iterable[GroupRecord]) -> None:
        for record in records:
            if record.state is not State.GONE:
                self.assembler.forget({record.group_id})
                self.delete(record)

    def remove(self, group_ids: Collection[int]) -> None:
        """Delete groups that a caller has taken. Unknown ones are ignored."""
        with self.lock:
            for record in self.known(group_ids):
                self.delete(record)
            self.wake_if_nothing_is_left()

    def count_as_lost(self, group_ids: Collection[int], why: str) -> None:
        """Delete these groups, and raise StreamGapError with this reason in callers that wait for one."""
        self.remove(group_ids)
        self.waiters.wake(lambda waiter: not waiter.wanted.isdisjoint(group_ids), StreamGapError(why))

    @property
    def nothing_is_left(self) -> bool:
        """True if every group for training has been returned by `TrainingQueue.next`."""
        records = self.records.values()
        return all(record.owner is not Owner.TRAINING or record.state is State.LENT for record in records)

    def wake_if_nothing_is_left(self) -> None:
        if self.waiters.for_any_group and self.nothing_is_left:
            self.waiters.wake_for_any()
