"""Where the groups of one engine arrive: a thread reads the stream, any number of threads and tasks take groups.

A group belongs to whoever it was submitted for. One that was submitted for nobody in particular comes out of `next`, in
the order in which groups get ready; one that is reserved goes only to the taker that names it.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any, Protocol

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, EngineHungError, FrameError, InflightError, StreamGapError
from inflight.core.frames import GroupStart, TokenFrame
from inflight.core.keys import ClientKeys
from inflight.stream.assembler import Assembler
from inflight.stream.held_groups import Drawn, Group, GroupSize, HeldGroup, HeldGroups
from inflight.stream.journal import JournalWriter
from inflight.stream.reader import StreamReader
from inflight.stream.wire import Held

logger = logging.getLogger(__name__)

_POLL_MS = 100
_CLOSE_S = 2.0
_MOST_TAKEN = 64
"""Groups that were taken by name and may still be noted as ready."""
SILENCE_S = 5.0
"""If nothing comes for so long while groups are outstanding, the engine is asked whether it is there."""
MEMORY_BYTES = 1 << 30


class FrameSource(Protocol):
    """Where frames come from: what an inbox asks of a `StreamReader`, which describes it."""

    @property
    def state(self) -> str: ...

    @property
    def silent_s(self) -> float: ...

    def receive(self, timeout_ms: int) -> TokenFrame | None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Waiter:
    """Somebody who waits until `needed` of the `wanted` groups have finished, or for `next` if none is wanted."""

    wanted: set[int]
    needed: int
    future: "Future[None]"


class Inbox:
    """Finished groups of one engine. Safe to use from several threads at once.

    Who asks for what is not there yet gets a future without a value: when it is done, ask again. It fails with what
    went wrong: EngineDiedError, EngineHungError, JournalError, or FrameError or StreamGapError when frames were lost.
    Then every group that was in flight counts as lost, and its samples come with finish_reason "error".
    """

    def __init__(
        self,
        source: str | FrameSource,
        *,
        on_frame: Callable[[TokenFrame], None],
        on_group: Callable[[Group], bool],
        on_removed: Callable[[Collection[int]], None] = lambda group_ids: None,
        check_engine: Callable[[], None],
        ask_engine: Callable[[float], None] = lambda silent_s: None,
        recover: Callable[[EngineDiedError], str] | None = None,
        silence_s: float = SILENCE_S,
        memory_bytes: int = MEMORY_BYTES,
        journal: JournalWriter | None = None,
        begin: int | None = 0,
        keys: ClientKeys | None = None,
    ):
        """source: an engine's endpoint, or what frames come from instead. on_group: is given a group that has finished
        and is not reserved, and returns whether it is ready now; if it is not, somebody calls `ready` later.
        on_removed: is given the ids of groups that are not outstanding any more, by whichever thread took them; the
        inbox's thread calls all others. check_engine: raises if the engine is known to be dead. ask_engine: raises if
        it does not answer; it is given the seconds for which nothing has come. recover: replaces an engine that has
        ended, and returns the endpoint of its successor's frames, or raises. memory_bytes: while finished groups take
        more and nobody waits, nothing more is read. journal: takes every frame of an engine before the inbox does.
        begin and keys: those of the StreamReader."""
        self._memory_bytes, self._journal, self._keys = memory_bytes, journal, keys
        self._held = HeldGroups()
        self._assembler = Assembler()
        self._on_frame, self._on_group, self._on_removed = on_frame, on_group, on_removed
        self._check_engine, self._ask_engine, self._silence_s = check_engine, ask_engine, silence_s
        self._recover, self._recovering = recover, False
        self.newest_version = 0
        """The newest version of which a token has come."""
        self._lock = threading.RLock()
        self._open: set[int] = set()
        """Ids of groups for `next` that were submitted and not handed out."""
        self._lent: set[int] = set()
        """Ids of open groups that came out of `next` and may be put back."""
        self._reserved: set[int] = set()
        """Ids of groups for those who name them that were submitted and not handed out."""
        self._dropped: set[int] = set()
        """Ids of unfinished groups that nobody waits for any more."""
        self._finished: dict[int, Group] = {}
        """Maps ids to groups that have finished and were not handed out."""
        self._held_of: defaultdict[str, HeldGroups] = defaultdict(HeldGroups)
        """What those of them hold that an engine drew, by its id."""
        self._drawn_by: dict[int, tuple[str, GroupSize]] = {}
        """Maps their ids to those of these engines, and to what they hold."""
        self._ready: deque[int] = deque()
        """Ids of groups that `next` may return, in this order; some of them may have been taken by name."""
        self._waiters: list[_Waiter] = []
        self._errors: deque[InflightError] = deque()
        """Errors of which nobody has learned; each is raised once."""
        self._ended: InflightError | None = None
        """The reason why nothing more will come."""
        self._lost_below: int | None = None
        """Groups with ids below this of which nothing is known were lost with their frames."""
        self._damaged = False
        """Frames were lost, and the next one has not told yet which groups went with them."""
        self._closing = False
        self._listeners: tuple[Callable[[], None], ...] = ()
        self.source: FrameSource = self._read_from(source, begin) if isinstance(source, str) else source
        """What is read now."""
        self._thread = threading.Thread(target=self._run, name="inflight-stream", daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        """Tokens received so far, of finished and unfinished samples."""
        return self._assembler.num_tokens

    @property
    def state(self) -> str:
        """What the engine said last of what it does, "silent" if it has said nothing for long, or "closed"."""
        if self._ended is not None:
            return "closed"
        if self._recovering:
            return "restarting"
        return "silent" if self.source.silent_s > self._silence_s else self.source.state

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that were received and not handed out, but for ragged columns of unfinished samples."""
        with self._lock:
            return self._assembler.nbytes + self._held.nbytes

    @property
    def outstanding(self) -> list[int]:
        """Ids of the groups that were submitted and not handed out yet."""
        with self._lock:
            return sorted(self._open | self._reserved)

    @property
    def needs_frames(self) -> bool:
        """Whether somebody waits for what has not finished yet."""
        with self._lock:
            all_in_hand = self._lent.issuperset(self._open & self._finished.keys())
            return any(waiter.wanted or all_in_hand for waiter in self._waiters)

    def expect(self, group_ids: Collection[int], *, reserved: bool = False) -> None:
        """These groups were submitted; some may have finished by now."""
        with self._lock:
            (self._reserved if reserved else self._open).update(group_ids)
            if self._lost_below is not None:
                self._forget_what_was_lost(self._lost_below)
            arrived = [self._finished[group_id] for group_id in group_ids if group_id in self._finished]
        self._offer([] if reserved else arrived)

    def reserve(self, group_ids: Collection[int]) -> None:
        """These groups are not for `next` any more."""
        with self._lock:
            self._reserved |= self._open & set(group_ids)
            self._close(group_ids)

    def next(self) -> "Group | Future[None] | None":
        """A group that is ready, or None if all that is outstanding is reserved. The group stays outstanding until
        `remove` is called, and comes again after `put_back`."""
        with self._lock:
            self._raise_error()
            while self._ready:
                group_id = self._ready.popleft()
                if group_id in self._open and group_id in self._finished:
                    self._lent.add(group_id)
                    return self._finished[group_id]
            if self._open == self._lent:
                return None
            return self._wait(set(), 1)

    def take(self, group_ids: Collection[int], count: int | None = None) -> "dict[int, Group] | Future[None]":
        """So many of these groups (None: all), once they have finished; then they are not outstanding any more.

        Raises ValueError if one is not outstanding, and StreamGapError if one was lost; then nothing has been taken.
        """
        wanted = set(group_ids)
        with self._lock:
            self._raise_error()
            if unknown := wanted - self._open - self._reserved:
                raise ValueError(
                    f"groups {sorted(unknown)} are not outstanding: not submitted here, or handed out already"
                )
            count = len(wanted) if count is None else count
            finished = [group_id for group_id in wanted if group_id in self._finished]
            if len(finished) < count:
                return self._wait(wanted.difference(finished), count - len(finished))
            found = {group_id: self._finished[group_id] for group_id in finished[:count]}
            self.remove(found)
            return found

    def remove(self, group_ids: Collection[int]) -> None:
        """These groups are in somebody's hands, and not outstanding any more."""
        with self._lock:
            self._reserved -= set(group_ids)
            self._let_go(group_ids)
            self._close(group_ids)
            self._on_removed(group_ids)

    def _let_go(self, group_ids: Iterable[int]) -> None:
        """These groups are not held here any more, if they were."""
        for group_id in group_ids:
            if self._finished.pop(group_id, None) is not None:
                engine_id, size = self._drawn_by.pop(group_id)
                self._held.remove(size)
                self._held_of[engine_id].remove(size)

    def _close(self, group_ids: Collection[int]) -> None:
        """These groups do not come out of `next` any more."""
        self._open -= set(group_ids)
        self._lent -= set(group_ids)
        if self._open == self._lent:  # nothing is left to wait for
            self._wake(lambda waiter: not waiter.wanted)

    def put_back(self, group_ids: Collection[int]) -> None:
        """These groups, which came out of `next`, come first when it is called again."""
        with self._lock:
            self._lent -= set(group_ids)
            self._ready.extendleft(reversed(list(group_ids)))
            self._wake(lambda waiter: not waiter.wanted)

    def drop(self, group_ids: Collection[int]) -> None:
        """Nobody waits for these groups any more; what arrives of them is thrown away. Who waits all the same learns
        that they are not outstanding."""
        with self._lock:
            coming = set(group_ids) - self._finished.keys()
            self._dropped |= coming & (self._open | self._reserved)
            self.remove(group_ids)
            self._wake(lambda waiter: not waiter.wanted.isdisjoint(group_ids))

    def hold(self, group_id: int) -> None:
        """A group that came out of `next` is not ready until `ready` is called."""
        with self._lock:
            self._lent.discard(group_id)

    def ready(self, group: Group) -> bool:
        """A group that was not ready is ready now. Returns False if it is not outstanding any more."""
        with self._lock:
            if group[0].group_id not in self._open:
                return False
            self._ready.append(group[0].group_id)
            if len(self._ready) > 2 * len(self._open) + _MOST_TAKEN:
                self._ready = deque(group_id for group_id in self._ready if group_id in self._open)
            self._wake(lambda waiter: not waiter.wanted)
            return True

    def unfinished(self) -> tuple[dict[int, Drawn | None], int]:
        """What an engine that has ended left unfinished, and somebody waits for; all else is forgotten.

        Maps the ids of groups to what has been drawn of them, or to None if nothing has come. Beside it, the first
        request id that was not announced."""
        with self._lock:
            self._damaged, self._lost_below = False, None
            known = {*self._open, *self._reserved, *self._dropped, *self._finished, *self._assembler.group_ids}
            return self.unfinished_of("", known), self._assembler.next_request_id

    def unfinished_of(self, engine_id: str, group_ids: Collection[int]) -> dict[int, Drawn | None]:
        """The same of one of several engines, which has ended; these groups were submitted to it."""
        with self._lock:
            wanted = self._open | self._reserved
            given_up = (self._assembler.group_ids_at(engine_id) | set(group_ids)) - wanted
            self._let_go(given_up)
            self._assembler.forget(given_up)
            self._dropped -= given_up
            return {i: self._assembler.drawn(i) for i in sorted(wanted & set(group_ids) - self._finished.keys())}

    def snapshot(self) -> tuple[list[HeldGroup], int]:
        """All groups that are outstanding, those that are ready first and in their order, with all that has come of
        them. Beside it, the first request id that was not announced."""
        with self._lock:
            wanted = self._open | self._reserved
            in_order = dict.fromkeys([*sorted(self._lent), *self._ready, *sorted(wanted)])
            groups = [HeldGroup(i, i in self._reserved, self._known(i)) for i in in_order if i in wanted]
            return groups, self._assembler.next_request_id

    def restore(self, groups: Sequence[HeldGroup], starts: Mapping[int, GroupStart], next_request_id: int) -> None:
        """Go on with groups of another inbox. starts: how each of them begins of which something has come, by its
        id."""
        with self._lock:
            self._assembler.next_request_id = max(next_request_id, self._assembler.next_request_id)
            for group in groups:
                (self._reserved if group.reserved else self._open).add(group.group_id)
                if group.group_id in starts and not group.is_finished:
                    self._assembler.restore(starts[group.group_id], group.rollouts)
            offered = self._finish([group.rollouts for group in groups if group.is_finished])
        self._offer(offered)

    def _known(self, group_id: int) -> Group:
        if group_id in self._finished:
            return self._finished[group_id]
        return self._assembler.known(group_id) if self._assembler.knows(group_id) else []

    def fail(self, group_ids: Collection[int]) -> None:
        """No engine goes on with these groups: they come out with finish_reason "error"."""
        with self._lock:
            known = [group_id for group_id in group_ids if self._assembler.knows(group_id)]
            offered = self._finish([self._assembler.fail(group_id) for group_id in known])
            lost = set(group_ids).difference(known)
            self._count_as_lost(lost, f"no engine goes on with groups {sorted(lost)}, of which nothing has come")
        self._offer(offered)

    def partial(self, group_id: int) -> Group:
        """The unfinished samples of a group, as far as they have arrived."""
        with self._lock:
            self._raise_error()
            return self._assembler.partial(group_id)

    def news(self, group_id: int, seen: Mapping[int, int]) -> Group:
        """What has come of the samples of a group that is outstanding, of each request beyond the first so many tokens
        that `seen` names, as `Rollout.since` gives them; nothing if the group is not outstanding."""
        with self._lock:
            if group_id in self._finished:
                return [rollout.since(seen.get(rollout.request_id, 0)) for rollout in self._finished[group_id]]
            return self._assembler.since(group_id, seen) if self._assembler.knows(group_id) else []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this after every frame, in the thread that reads; it must return at once."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Do not call this any more."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def close(self) -> None:
        """Stop reading. Whoever still waits gets an InflightError. If the thread waits for a hung engine's answer, it
        ends with the engine."""
        self._closing = True
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._end(InflightError("the stream was closed"))

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read()
        except InflightError as error:
            self._end(error)
        except Exception as error:
            logger.exception("the reader of the stream failed")
            self._end(InflightError(f"the reader of the stream failed: {error!r}"))
        else:
            self._end(InflightError("the stream was closed"))
        finally:
            self.source.close()

    def _read(self) -> None:
        asked_ns = now_ns()
        while not self._closing:
            if self._held.nbytes > self._memory_bytes and not self._waiters:
                self._check_engine()
                sleep(_POLL_MS / 1e3)
                continue
            try:
                frame = self.source.receive(_POLL_MS)
                if frame is not None:
                    self._take_in(frame)
                    continue
            except (FrameError, StreamGapError) as error:
                self._lose(error)
                continue
            try:
                self._check_engine()
            except EngineDiedError as error:
                self._go_on_with_successor(error)
            silent_s = min(self.source.silent_s, (now_ns() - asked_ns) / 1e9)
            if silent_s > self._silence_s and self.outstanding:
                self._ask(self.source.silent_s)
                asked_ns = now_ns()

    def _read_from(self, endpoint: str, begin: int | None) -> StreamReader:
        held = partial(self.held_of, None)
        return StreamReader(endpoint, begin=begin, held=held, journal=self._journal, keys=self._keys)

    def _go_on_with_successor(self, death: EngineDiedError) -> None:
        """Read the frames of the engine that follows the one that has ended."""
        if self._recover is None or self._closing:
            raise death
        self._recovering = True
        try:
            self.source.close()
            self.source = self._read_from(self._recover(death), 0)
        finally:
            self._recovering = False

    def held_of(self, engine_id: str | None, num_tokens: int, num_rollouts: int) -> Held:
        """What an engine, which has sent so much, is told of what is held here. engine_id: says which one of several it
        is, and then of what it drew alone."""
        with self._lock:
            held, unfinished = self._held, self._assembler.num_unfinished_tokens
            if engine_id is not None:
                held, unfinished = self._held_of[engine_id], self._assembler.num_unfinished_tokens_at[engine_id]
            return Held(
                num_tokens, num_rollouts, held.num_tokens + unfinished, held.num_rollouts, held.oldest,
                waits=bool(self._waiters), follows=bool(self._listeners),
                awaits_ends=any(waiter.wanted for waiter in self._waiters),
            )  # fmt: skip

    def _ask(self, silent_s: float) -> None:
        """Ask whether the engine is there, and tell those who wait if it hangs. It may take as long as the bound on the
        engine's answers."""
        try:
            self._ask_engine(silent_s)
        except EngineHungError as error:
            with self._lock:
                self._wake(lambda waiter: True, error)

    def _take_in(self, frame: TokenFrame) -> None:
        with self._lock:
            self.newest_version = max(self.newest_version, frame.header.version if frame.header.num_tokens else 0)
            self._on_frame(frame)
            groups = self._assembler.add(frame)
            if self._assembler.faults:
                self._raise_faults()
            offered = self._finish(groups, frame.header.engine_id)
            if self._damaged:
                self._damaged = False
                self._lost_below = frame.header.next_group_id
                self._forget_what_was_lost(self._lost_below)
        self._offer(offered)
        for listener in self._listeners:
            listener()

    def _raise_faults(self) -> None:
        """Raise the errors of single requests where their groups are awaited, or else in the next call."""
        for group_id, error in self._assembler.faults.items():
            logger.error("%s", error)
            if not self._wake(lambda waiter, group_id=group_id: group_id in waiter.wanted, error):
                self._errors.append(error)
        self._assembler.faults.clear()

    def _lose(self, error: InflightError) -> None:
        with self._lock:
            offered = self._finish(self._assembler.abandon())
            self._damaged = True
            if not self._wake(lambda waiter: True, error):
                self._errors.append(error)
        self._offer(offered)

    def _offer(self, groups: list[Group]) -> None:
        for group in groups:
            if self._on_group(group):
                self.ready(group)

    def _finish(self, groups: list[Group], engine_id: str = "") -> list[Group]:
        """Take groups that this engine has ended. Returns those of them that are for `next`."""
        for group in groups:
            group_id = group[0].group_id
            if group_id in self._dropped:
                self._dropped.remove(group_id)
                continue
            self._finished[group_id], size = group, GroupSize.of(group)
            self._drawn_by[group_id] = engine_id, size
            self._held.add(size)
            self._held_of[engine_id].add(size)
            for waiter in self._waiters:
                waiter.needed -= group_id in waiter.wanted
        self._wake(lambda waiter: waiter.needed <= 0)
        return [group for group in groups if group[0].group_id in self._open]

    def _forget_what_was_lost(self, next_group_id: int) -> None:
        """Give up groups that were announced by now and of which nothing is known: they went with the lost frames."""
        lost = {
            group_id
            for group_id in self._open | self._reserved
            if group_id < next_group_id and group_id not in self._finished and not self._assembler.knows(group_id)
        }
        if lost:
            logger.error("groups %s were lost with their frames", sorted(lost))
            self._count_as_lost(lost, f"groups {sorted(lost)} were lost with their frames")

    def _count_as_lost(self, group_ids: set[int], why: str) -> None:
        """These groups are not outstanding any more, and whoever waits for one learns why."""
        self._reserved -= group_ids
        self._close(group_ids)
        self._wake(lambda waiter: bool(waiter.wanted & group_ids), StreamGapError(why))

    def _end(self, error: InflightError) -> None:
        with self._lock:
            self._ended = error
            self._wake(lambda waiter: True, error)
            self._errors.clear()

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def _wait(self, wanted: set[int], needed: int) -> "Future[None]":
        if self._ended is not None:
            raise self._ended
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a task that is cancelled leaves it alone
        self._waiters.append(_Waiter(wanted, needed, future))
        return future

    def leave(self, future: "Future[Any]") -> None:
        """Whoever was given this future waits no more."""
        with self._lock:
            self._waiters = [waiter for waiter in self._waiters if waiter.future is not future]

    def _wake(self, is_over: Callable[[_Waiter], bool], error: InflightError | None = None) -> bool:
        """End the waits that are over, with an error if there is one. Returns False if there were none."""
        over = [waiter for waiter in self._waiters if is_over(waiter)]
        self._waiters = [waiter for waiter in self._waiters if not is_over(waiter)]
        for waiter in over:
            if error is None:
                waiter.future.set_result(None)
            else:
                waiter.future.set_exception(error)
        return bool(over)
