"""Where the groups of one engine arrive: a thread reads the stream, any number of threads and tasks take groups.

A group belongs to whoever it was submitted for. One that was submitted for nobody in particular comes out of `next`, in
the order in which groups get ready; one that is reserved goes only to the taker that names it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from inflight.core.clock import now_ns
from inflight.core.errors import EngineHungError, FrameError, InflightError, StreamGapError
from inflight.core.frames import TokenFrame
from inflight.core.rollout import Rollout
from inflight.stream.assembler import Assembler
from inflight.stream.reader import StreamReader

logger = logging.getLogger(__name__)

_POLL_MS = 100
_CLOSE_S = 2.0
SILENCE_S = 5.0
"""If no frame comes for so long while groups are outstanding, the engine is asked whether it is there."""
Group = list[Rollout]


@dataclass(slots=True)
class _Waiter:
    """Somebody who waits until `needed` of the `wanted` groups have finished, or for `next` if none is wanted."""

    wanted: set[int]
    needed: int
    future: "Future[None]"


class Inbox:
    """Finished groups of one engine. Safe to use from several threads at once.

    Who asks for what is not there yet gets a future without a value: when it is done, ask again. It fails with what
    went wrong: EngineDiedError, EngineHungError, or FrameError or StreamGapError when frames were lost. Then every
    group that was in flight counts as lost, and its samples come with finish_reason "error".
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_frame: Callable[[TokenFrame], None],
        on_group: Callable[[Group], bool],
        on_removed: Callable[[Collection[int]], None] = lambda group_ids: None,
        check_engine: Callable[[], None],
        ask_engine: Callable[[float], None] = lambda silent_s: None,
        silence_s: float = SILENCE_S,
    ):
        """on_group: is given a group that has finished and is not reserved, and returns whether it is ready now; if it
        is not, somebody calls `ready` later. on_removed: is given the ids of groups that are not outstanding any more,
        by whichever thread took them; the inbox's thread calls all others. check_engine: raises if the engine is known
        to be dead. ask_engine: raises if it does not answer; it is given the seconds for which nothing has come."""
        self._reader = StreamReader(endpoint)
        self._assembler = Assembler()
        self._on_frame, self._on_group, self._on_removed = on_frame, on_group, on_removed
        self._check_engine, self._ask_engine, self._silence_s = check_engine, ask_engine, silence_s
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
        self._thread = threading.Thread(target=self._run, name="inflight-stream", daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        """Tokens received so far, of finished and unfinished samples."""
        return self._assembler.num_tokens

    @property
    def outstanding(self) -> list[int]:
        """Ids of the groups that were submitted and not handed out yet."""
        with self._lock:
            return sorted(self._open | self._reserved)

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
            for group_id in group_ids:
                self._finished.pop(group_id, None)
            self._close(group_ids)
            self._on_removed(group_ids)

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
        """Nobody waits for these groups any more; what arrives of them is thrown away."""
        with self._lock:
            coming = set(group_ids) - self._finished.keys()
            self._dropped |= coming & (self._open | self._reserved)
            self.remove(group_ids)

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
            self._wake(lambda waiter: not waiter.wanted)
            return True

    def partial(self, group_id: int) -> Group:
        """The unfinished samples of a group, as far as they have arrived."""
        with self._lock:
            self._raise_error()
            return self._assembler.partial(group_id)

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
            self._reader.close()

    def _read(self) -> None:
        heard_ns = asked_ns = now_ns()
        while not self._closing:
            try:
                frame = self._reader.receive(_POLL_MS)
            except (FrameError, StreamGapError) as error:
                self._lose(error)
                continue
            if frame is not None:
                heard_ns = now_ns()
                self._take_in(frame)
                continue
            self._check_engine()
            if not self.outstanding:
                heard_ns = now_ns()
            if (now_ns() - max(heard_ns, asked_ns)) / 1e9 > self._silence_s:
                self._ask((now_ns() - heard_ns) / 1e9)
                asked_ns = now_ns()

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
            self._on_frame(frame)
            offered = self._finish(self._assembler.add(frame))
            if self._damaged:
                self._damaged = False
                self._lost_below = frame.header.next_group_id
                self._forget_what_was_lost(self._lost_below)
        self._offer(offered)

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

    def _finish(self, groups: list[Group]) -> list[Group]:
        """Returns those of the groups that are for `next`."""
        for group in groups:
            group_id = group[0].group_id
            if group_id in self._dropped:
                self._dropped.remove(group_id)
                continue
            self._finished[group_id] = group
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
        if not lost:
            return
        logger.error("groups %s were lost with their frames", sorted(lost))
        self._reserved -= lost
        self._close(lost)
        error = StreamGapError(f"groups {sorted(lost)} were lost with their frames")
        self._wake(lambda waiter: bool(waiter.wanted & lost), error)
        self._wake(lambda waiter: not waiter.wanted)

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
