"""The ledger of groups: one record per group, from its submission until a caller takes it.

    SUBMITTED → DRAWING → FINISHED → READY ⇄ LENT → GONE
         ⇅         ⇅
          UNASSIGNED (its engine has ended, and another one has to continue it)

A group belongs to the caller that submitted it. `next` returns groups for training, in the order in which they become
ready. Only a caller that names a reserved group gets it. One lock guards all records, the frames that are assembled,
and the callers that wait. A thread that holds the lock waits for nothing else.
"""

import logging
import secrets
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from inflight.core.errors import InflightError, StreamGapError
from inflight.core.frames import TokenFrame
from inflight.core.messages import LIVE_VERSION, Ids, Prompt
from inflight.stream.assembler import Assembler
from inflight.stream.held_groups import Group, GroupSize, HeldGroups, SavedGroup
from inflight.stream.waiters import Waiters
from inflight.stream.wire import Held

logger = logging.getLogger(__name__)


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
    """The engine that ended it."""
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
    waited_s: float = 0.0
    """Time in which engines served and none could continue it."""

    @property
    def is_finished(self) -> bool:
        """True if all samples have ended."""
        return self.state in _FINISHED

    @property
    def num_samples(self) -> int:
        """Number of its requests."""
        return self.prompt.params.n if self.prompt is not None else 0

    @property
    def num_unfinished(self) -> int:
        """Number of samples that another engine would continue."""
        return self.num_samples if self.drawn is None else len(self.drawn)

    @property
    def request_ids(self) -> range:
        """Ids of its requests."""
        return range(self.ids.first_request_id, self.ids.first_request_id + self.num_samples)

    @property
    def pin(self) -> int | None:
        """The weight version that draws all of its tokens; None: the newest one draws each token."""
        return self.prompt.version if self.prompt is not None else None

    @property
    def is_wanted(self) -> bool:
        """True if the group is outstanding: a caller gets it."""
        return self.owner in (Owner.TRAINING, Owner.CALLER)


class Ledger:
    """Records of groups that were submitted and not taken. Safe to use from several threads at once.

    A caller that asks for groups that have not finished gets a future without a value: when it is done, the caller asks
    again. The future fails with EngineDiedError, EngineHungError, JournalError, or with FrameError or StreamGapError
    when frames were lost. In that case the samples of every unfinished group arrive with finish_reason "error".
    """

    def __init__(self) -> None:
        self.on_frame: Callable[[TokenFrame], None] = lambda frame: None
        """Called with each frame, with the lock held."""
        self.on_finished: Callable[[GroupRecord], bool] = lambda record: True
        """Called with each finished group for training. Returns True if it is ready; else `ready` is called later."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when groups become unassigned."""
        self.records: dict[int, GroupRecord] = {}
        """Maps group ids to records of outstanding groups, and of groups whose frames still arrive."""
        self.waiters = Waiters()
        self._ready: OrderedDict[int, GroupRecord] = OrderedDict()
        """Groups in the state READY, in the order in which `next` returns them."""
        self._assembler = Assembler()
        self._held: defaultdict[str, HeldGroups] = defaultdict(HeldGroups)
        """Totals of the finished groups that each engine has drawn, by its id."""
        self._lost_below: int | None = None
        """Unknown groups with smaller ids were lost with their frames."""
        self._damaged = False
        """Frames were lost, and the next frame will show which groups were announced in them."""
        self._listeners: tuple[Callable[[], None], ...] = ()
        self.next_ids = Ids(0, 0)
        """The ids of the next group; all earlier groups have smaller ones."""

    # ---- totals -------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens received, of finished and unfinished samples."""
        return self._assembler.num_tokens

    @property
    def finished_bytes(self) -> int:
        """Bytes of finished groups that were not taken."""
        return sum(held.nbytes for held in list(self._held.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of tokens that were not taken, without ragged columns of unfinished samples."""
        with self.lock:
            return self._assembler.nbytes + self.finished_bytes

    @property
    def outstanding(self) -> list[int]:
        """Ids of groups that were submitted and not taken."""
        with self.lock:
            return sorted(group_id for group_id, record in self.records.items() if record.is_wanted)

    @property
    def needs_frames(self) -> bool:
        """True if a caller waits for a group that has not finished."""
        with self.lock:
            if not len(self.waiters):  # The common case needs no scan.
                return False
            finished = (r for r in self.records.values() if r.owner is Owner.TRAINING and r.state in _FINISHED[:2])
            return self.waiters.for_named_groups or not any(True for _ in finished)

    def held_of(self, engine_id: str | None, num_tokens: int, num_rollouts: int) -> Held:
        """Return the flow-control report for an engine that has sent this number of tokens and rollouts. engine_id:
        counts the output of one of several engines; None counts the output of all."""
        with self.lock:
            if engine_id is None:
                held, unfinished = list(self._held.values()), self._assembler.num_unfinished_tokens
            else:
                held, unfinished = [self._held[engine_id]], self._assembler.num_unfinished_tokens_at[engine_id]
            return Held(
                num_tokens, num_rollouts, sum(h.num_tokens for h in held) + unfinished,
                sum(h.num_rollouts for h in held), min((h.oldest for h in held if h.oldest is not None), default=None),
                waits=len(self.waiters) > 0, follows=bool(self._listeners), awaits_ends=self.waiters.for_named_groups,
            )  # fmt: skip

    # ---- owners of groups ---------------------------------------------------------------------------------------

    def expect(self, group_ids: Collection[int], *, reserved: bool = False) -> None:
        """Note that these groups were submitted; some might have finished by now. reserved: only callers that name them
        get them."""
        with self.lock:
            finished = self.claim(group_ids, reserved=reserved)
        self.offer(finished)

    def claim(self, group_ids: Collection[int], *, reserved: bool) -> list[GroupRecord]:
        """Do the same with the lock held. Returns the groups for training that have finished, for `offer`."""
        records = [self._record(group_id) for group_id in group_ids]
        # Groups that had an owner were offered when they finished.
        unoffered = [record for record in records if record.owner is Owner.NOBODY and not reserved]
        for record in records:
            record.owner = Owner.CALLER if reserved else Owner.TRAINING
        if self._lost_below is not None:
            self._forget_lost_groups(self._lost_below)
        return [record for record in unoffered if record.is_finished]

    def offer(self, records: Iterable[GroupRecord]) -> None:
        """Let finished groups for training become ready. Called without the lock."""
        for record in records:
            if self.on_finished(record):
                self.ready(record)

    def reserve(self, group_ids: Collection[int]) -> None:
        """Keep these groups for callers that name them."""
        with self.lock:
            for record in self._known(group_ids):
                if record.owner is Owner.TRAINING:
                    record.owner = Owner.CALLER
                    if record.is_finished:
                        self._move(record, State.FINISHED)
            self._wake_if_nothing_is_left()

    def drop(self, group_ids: Collection[int]) -> None:
        """Discard these groups and their later tokens. Callers that wait for them are woken, and get the error that
        they are not outstanding."""
        with self.lock:
            for record in self._known(group_ids):
                if record.is_finished or record.is_wanted:
                    self.discard(record)
            self._wake_if_nothing_is_left()
            self.waiters.wake(lambda waiter: not waiter.wanted.isdisjoint(group_ids))

    def discard(self, record: GroupRecord) -> bool:
        """Discard a group with the lock held. Returns True if an engine might still draw it."""
        if record.is_finished or record.state is State.UNASSIGNED:
            self.forget([record])
        elif record.state is not State.GONE:
            record.owner = Owner.DROPPED
            return True
        return False

    def forget(self, records: Iterable[GroupRecord]) -> None:
        """Delete groups and their tokens, with the lock held."""
        for record in records:
            if record.state is not State.GONE:
                self._assembler.forget({record.group_id})
                self._delete(record)

    # ---- groups for training ------------------------------------------------------------------------------------

    def next(self) -> "GroupRecord | Future[None] | None":
        """Return a ready group, in the state LENT until `remove` or `put_back` is called. Returns None if all
        outstanding groups are reserved or in that state."""
        with self.lock:
            self.waiters.raise_error()
            if self._ready:
                _, record = self._ready.popitem(last=False)
                record.state = State.LENT
                return record
            return None if self._nothing_is_left else self.waiters.wait(set(), 1)

    def put_back(self, group_ids: Collection[int]) -> None:
        """Queue groups again that `next` has returned. `next` returns them first."""
        with self.lock:
            for record in reversed(self._known(group_ids)):
                if record.owner is Owner.TRAINING and record.is_finished:
                    self._move(record, State.READY)
                    self._ready.move_to_end(record.group_id, last=False)
            self.waiters.wake_for_any()

    def hold(self, record: GroupRecord) -> None:
        """Keep a group that `next` has returned out of the queue until `ready` is called."""
        with self.lock:
            if record.state is State.LENT:
                record.state = State.FINISHED

    def ready(self, record: GroupRecord) -> bool:
        """Let `next` return a finished group. Returns False if the group is not for training."""
        with self.lock:
            if record.owner is not Owner.TRAINING or record.state is not State.FINISHED:
                return False
            self._move(record, State.READY)
            self.waiters.wake_for_any()
            return True

    def remove(self, group_ids: Collection[int]) -> None:
        """Delete groups that a caller has taken."""
        with self.lock:
            for record in self._known(group_ids):
                self._delete(record)
            self._wake_if_nothing_is_left()

    # ---- groups by name -----------------------------------------------------------------------------------------

    def take(self, group_ids: Collection[int], count: int | None = None) -> "dict[int, Group] | Future[None]":
        """Take this number of the groups (None: all), once they have finished, and remove them from the ledger.

        Raises ValueError if one is not outstanding, and StreamGapError if one was lost, without taking any group.
        """
        wanted = set(group_ids)
        with self.lock:
            self.waiters.raise_error()
            records = [record for record in self._known(wanted) if record.is_wanted]
            if len(records) < len(wanted):
                unknown = wanted.difference(record.group_id for record in records)
                raise ValueError(
                    f"groups {sorted(unknown)} are not outstanding: not submitted here, or handed out already"
                )
            count = len(wanted) if count is None else count
            finished = [record for record in records if record.is_finished]
            if len(finished) < count:
                missing = {record.group_id for record in records if not record.is_finished}
                return self.waiters.wait(missing, count - len(finished))
            found = {record.group_id: record.rollouts for record in finished[:count]}
            self.remove(found)
            return found

    def leave(self, future: "Future[Any]") -> None:
        """Forget the caller that has this future."""
        with self.lock:
            self.waiters.leave(future)

    def partial(self, group_id: int) -> Group:
        """Return the unfinished samples of a group, with the tokens so far."""
        with self.lock:
            self.waiters.raise_error()
            return self._assembler.partial(group_id)

    def news(self, group_id: int, seen: Mapping[int, int]) -> Group:
        """Return the samples of an outstanding group without the tokens that the caller has. seen: maps request ids to
        the number of those tokens."""
        with self.lock:
            record = self.records.get(group_id)
            if record is not None and record.is_finished:
                return [rollout.since(seen.get(rollout.request_id, 0)) for rollout in record.rollouts]
            return self._assembler.since(group_id, seen) if self._assembler.knows(group_id) else []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this listener after every frame, in the thread that reads; it must return at once."""
        with self.lock:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Stop calling this listener."""
        with self.lock:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    # ---- frames -------------------------------------------------------------------------------------------------

    def take_in(self, frame: TokenFrame) -> None:
        """Add the tokens of a frame, and note the groups that start or end with it."""
        header = frame.header
        with self.lock:
            self.on_frame(frame)
            groups = self._assembler.add(frame)
            for start in header.groups:
                if not (record := self._record(start.group_id)).is_finished:
                    record.state, record.engine_id = State.DRAWING, header.engine_id
            if self._assembler.faults:
                self._raise_faults()
            offered = self._finish(groups, header.engine_id)
            if self._damaged:
                self._damaged = False
                self._lost_below = header.next_group_id
                self._forget_lost_groups(self._lost_below)
        self.offer(offered)
        for listener in self._listeners:
            listener()

    def lose(self, error: InflightError) -> None:
        """End all unfinished groups as "error", since frames were lost, and raise the error in callers that wait."""
        with self.lock:
            offered = self._finish(self._assembler.abandon())
            self._damaged = True
            self.waiters.fail(error)
        self.offer(offered)

    def fail(self, group_ids: Collection[int]) -> None:
        """End groups that no engine continues, with finish_reason "error"."""
        with self.lock:
            known = [group_id for group_id in group_ids if self._assembler.knows(group_id)]
            offered = self._finish([self._assembler.fail(group_id) for group_id in known])
            # These ids include groups that ended before; only groups without any frame are lost.
            finished = {record.group_id for record in self._known(group_ids) if record.is_finished}
            lost = set(group_ids) - finished
            self._count_as_lost(lost, f"no engine goes on with groups {sorted(lost)}, of which nothing has come")
        self.offer(offered)

    def end(self, error: InflightError) -> None:
        """Note that the stream has ended. Raise this error in waiting callers, and from now on in callers that would
        wait."""
        with self.lock:
            self.waiters.end(error)

    def report(self, error: InflightError) -> None:
        """Raise an error in all callers that wait."""
        with self.lock:
            self.waiters.wake(lambda waiter: True, error)

    # ---- engines ------------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt, at: Any, origin: tuple[int, int] | None = None) -> GroupRecord:
        """Make the record of a prompt that is about to be sent to an engine, with the lock held. A prompt without a
        seed gets one, since another engine needs it to continue the group. `claim` sets the owner of the group."""
        params, ids = prompt.params, self.next_ids
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(62))
            prompt = msgspec.structs.replace(prompt, params=params)
        self.next_ids = Ids(ids.group_id + 1, ids.first_request_id + params.n)
        record = self.records[ids.group_id] = GroupRecord(ids.group_id, prompt=prompt, ids=ids, origin=origin, at=at)
        return record

    def count_from(self, ids: Ids) -> None:
        """Give later groups these ids or larger ones."""
        mine = self.next_ids
        self.next_ids = Ids(max(ids.group_id, mine.group_id), max(ids.first_request_id, mine.first_request_id))

    def find(self, request_id: int) -> GroupRecord | None:
        """Return the unfinished group of a request, if this process submitted it."""
        with self.lock:
            unfinished = (record for record in self.records.values() if not record.is_finished)
            return next((record for record in unfinished if request_id in record.request_ids), None)

    def note_cancelled(self, group_ids: Collection[int], request_ids: Collection[int]) -> None:
        """Note samples that have to end, also on an engine that continues their groups."""
        with self.lock:
            for record in self._known(group_ids):
                record.cancelled.update(record.request_ids)
            wanted = set(request_ids)
            for record in self.records.values() if wanted else ():
                if not record.is_finished:
                    record.cancelled.update(wanted.intersection(record.request_ids))

    @property
    def unassigned(self) -> list[GroupRecord]:
        """Groups that no engine draws. Called with the lock held."""
        return [record for record in self.records.values() if record.state is State.UNASSIGNED]

    def unassign(self, at: Any, engine_id: str, version: int) -> int:
        """Note that an engine has ended. All of its frames must have been read. Its unfinished groups become
        unassigned. Groups that are not outstanding are deleted. version: the newest one of the engine. Returns the
        number of groups that became unassigned."""
        with self.lock:
            num_left = 0
            for record in list(self.records.values()):
                if record.at is not at and record.engine_id != engine_id:
                    continue
                if not record.is_wanted:
                    self.forget([record])
                elif not record.is_finished:
                    record.version = max(record.version, version)
                    self._unassign(record)
                    num_left += 1
            self.changed.notify_all()
            return num_left

    def assign(self, record: GroupRecord, at: Any) -> None:
        """Note that an engine is about to continue a group, with the lock held."""
        record.at, record.state = at, State.SUBMITTED if record.drawn is None else State.DRAWING

    def _unassign(self, record: GroupRecord) -> None:
        record.drawn = self._assembler.drawn(record.group_id)
        record.at, record.state, record.waited_s = None, State.UNASSIGNED, 0.0
        if not record.drawn or not any(record.drawn.values()):
            record.version = 0
        elif record.prompt is not None and record.pin == LIVE_VERSION:  # the version that has drawn it becomes its pin
            partial = self._assembler.partial(record.group_id)
            version = next(int(r.weight_versions[0]) for r in partial if len(r.weight_versions))
            record.prompt = msgspec.structs.replace(record.prompt, version=version)

    # ---- trainers that follow -----------------------------------------------------------------------------------

    def snapshot(self) -> list[SavedGroup]:
        """Return all outstanding groups with their samples so far, in the order in which `next` returns them."""
        with self.lock:
            lent = sorted(group_id for group_id, record in self.records.items() if record.state is State.LENT)
            in_order = dict.fromkeys([*lent, *self._ready, *sorted(self.records)])
            records = [self.records[group_id] for group_id in in_order]
            return [
                SavedGroup(r.ids, r.owner is Owner.CALLER, r.prompt, r.origin, self._arrived(r))
                for r in records
                if r.is_wanted and r.prompt is not None
            ]

    def restore(self, groups: Sequence[SavedGroup], next_ids: Ids) -> None:
        """Continue groups that another trainer has saved. Raises InflightError if prompts were submitted before."""
        with self.lock:
            if any(record.is_wanted for record in self.records.values()):
                raise InflightError("prompts were submitted already; load a run before that")
            self.count_from(next_ids)
            for group in groups:
                owner = Owner.CALLER if group.reserved else Owner.TRAINING
                record = GroupRecord(group.ids.group_id, owner, prompt=group.prompt, ids=group.ids, origin=group.origin)
                self.records[record.group_id] = record
                if not group.is_finished:
                    if group.rollouts:
                        self._assembler.restore(group.start, group.rollouts)
                    record.version = max(
                        (int(r.weight_versions[-1]) for r in group.rollouts if len(r.weight_versions)), default=0
                    )
                    self._unassign(record)
            offered = self._finish([group.rollouts for group in groups if group.is_finished])
            self.changed.notify_all()
        self.offer(offered)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _record(self, group_id: int) -> GroupRecord:
        """Return the record of a group, a new one if there is none."""
        record = self.records.get(group_id)
        if record is None:
            record = self.records[group_id] = GroupRecord(group_id)
        return record

    def _known(self, group_ids: Iterable[int]) -> list[GroupRecord]:
        return [self.records[group_id] for group_id in group_ids if group_id in self.records]

    def _arrived(self, record: GroupRecord) -> Group:
        if record.is_finished:
            return record.rollouts
        return self._assembler.known(record.group_id) if self._assembler.knows(record.group_id) else []

    def _move(self, record: GroupRecord, state: State) -> None:
        """Change the state of a finished group."""
        record.state = state
        if state is State.READY:
            self._ready[record.group_id] = record
        else:
            self._ready.pop(record.group_id, None)

    def _delete(self, record: GroupRecord) -> None:
        if record.size is not None:
            self._held[record.engine_id].remove(record.size)
        record.scoring = None  # A cycle: the scoring refers to the record, and so to all tokens.
        self._move(record, State.GONE)
        del self.records[record.group_id]

    @property
    def _nothing_is_left(self) -> bool:
        """True if every group for training has been returned by `next`."""
        records = self.records.values()
        return all(record.owner is not Owner.TRAINING or record.state is State.LENT for record in records)

    def _wake_if_nothing_is_left(self) -> None:
        if self.waiters.for_any_group and self._nothing_is_left:
            self.waiters.wake_for_any()

    def _finish(self, groups: list[Group], engine_id: str = "") -> list[GroupRecord]:
        """Record finished groups of this engine. Returns the groups for training, for `offer`."""
        finished: list[GroupRecord] = []
        for group in groups:
            record = self._record(group[0].group_id)
            if record.owner is Owner.DROPPED:
                self._delete(record)
                continue
            record.rollouts, record.size, record.engine_id = group, GroupSize.of(group), engine_id
            record.state = State.FINISHED
            self._held[engine_id].add(record.size)
            finished.append(record)
        if finished:
            self.waiters.finished([record.group_id for record in finished])
        # Decided with the lock held, so that each group is offered once, here or by `claim`.
        return [record for record in finished if record.owner is Owner.TRAINING]

    def _raise_faults(self) -> None:
        """Raise the errors of single requests in callers that wait for their groups, or else in the next call."""
        for group_id, error in self._assembler.faults.items():
            logger.error("%s", error)
            self.waiters.fail(error, [group_id])
        self._assembler.faults.clear()

    def _forget_lost_groups(self, next_group_id: int) -> None:
        """Delete groups that were announced in lost frames: no other frame has named them."""
        lost = {
            group_id
            for group_id, record in self.records.items()
            if group_id < next_group_id and record.is_wanted and record.state is State.SUBMITTED
        }
        if lost:
            logger.error("groups %s were lost with their frames", sorted(lost))
            self._count_as_lost(lost, f"groups {sorted(lost)} were lost with their frames")

    def _count_as_lost(self, group_ids: set[int], why: str) -> None:
        """Delete these groups, and raise StreamGapError with this reason in callers that wait for one."""
        self.remove(group_ids)
        self.waiters.wake(lambda waiter: not waiter.wanted.isdisjoint(group_ids), StreamGapError(why))
