"""The members of a fleet: routes calls to all of them and each prompt to the least loaded one.

Locks, in the order in which they are taken: `changing`, then `lock`, then the condition of a member. `lock` is the lock
of the ledger, so that groups and members change together. No call to an engine is made with `lock` held.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakSet

from inflight.core.errors import EngineDiedError, EngineHungError, InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION, Prompt, Status
from inflight.core.waiting import Wait
from inflight.engine.process.client import EngineClient
from inflight.fleet.frames import EngineFrames, MergedFrames
from inflight.fleet.member import Member
from inflight.fleet.process.base import Process
from inflight.observability.staleness_meter import StalenessMeter
from inflight.stream.group_table import GroupRecord
from inflight.stream.journal import JournalWriter
from inflight.stream.ledger import Ledger
from inflight.stream.reader import StreamReader
from inflight.stream.wire import Held
from inflight.weights.trainer.engine_link import EngineAddress

if TYPE_CHECKING:
    from inflight.weights.trainer.publisher import Publisher

logger = logging.getLogger("inflight.fleet")

_CHECK_S = 0.1
_MOST_CALLS = 64
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
_NOTHING: type[Any] = type(None)
_HOLDS = {"pause": {"pause"}, "sleep": {"sleep"}}
"""Maps verbs to the verbs that hold an engine back after them."""
_RELEASES = {"resume": {"pause"}, "wake": {"sleep"}}
"""Maps verbs to the verbs that they undo."""
ENDED = object()
"""The answer of an engine that has ended, or that hangs and is treated as ended."""
Value = TypeVar("Value")
Part = tuple[Member, EngineFrames, list[tuple[int, GroupRecord]]]
"""An engine, the connection to its process, and the groups for it, each with its place in the submitted list."""
Sent = tuple[Part, Callable[[], Any]]
"""A part that was sent to its engine, and the function that waits for the answer."""


class Fleet:
    """One engine or several, with one ledger. Safe to use from several threads at once.

    While no engine takes prompts, calls wait. Once no engine is left, they raise the EngineDiedError that lists all
    deaths. An engine that does not answer in time is treated as ended if another engine, or a successor, can continue
    its groups; otherwise the call raises EngineHungError.
    """

    def __init__(self, meter: StalenessMeter, journal: JournalWriter | None = None):
        """meter: receives the times of versions that publishers send."""
        self.published, self.stepped = meter.published, meter.stepped
        self.ledger = Ledger()
        self.lock = self.ledger.table.changed
        """Guards the ledger, and all fields below."""
        self.changing = threading.RLock()
        """Held while members join and leave, and while a publisher attaches to the serving members."""
        self.members: list[Member] = []
        self.publishers: WeakSet[Publisher] = WeakSet()
        """Publishers to all members."""
        self.held_back: frozenset[str] = frozenset()
        """The verbs, pause and sleep, that the user has called and not undone."""
        self.gone: EngineDiedError | None = None
        """The reason why no engine is left."""
        self.newest_version = 0
        """The newest version of a process that has ended."""
        self.closing = threading.Event()
        self.merged = MergedFrames()
        """The frames of all members."""
        self._journal = journal
        self._reads = False
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="inflight-fleet-call")
        """Threads for calls that wait for nothing but the answer of an engine."""
        self._submits = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="inflight-fleet-submit")

    # ---- members ------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> dict[Member, EngineFrames]:
        """The engines that take prompts, each with the connection to its process."""
        with self.lock:
            return {member: member.frames for member in self.members if member.usable and member.frames is not None}

    @property
    def open_publishers(self) -> "list[Publisher]":
        """Publishers that were not closed."""
        with self.lock:
            return [publisher for publisher in self.publishers if not publisher.closed]

    def can_spare(self, member: Member) -> bool:
        """Return True if a successor, or another engine, can continue the groups of this one."""
        return member.can_restart or any(m is not member and m.death is None for m in self.members)

    @property
    def comes_back(self) -> bool:
        """True if another process replaces one that ends."""
        return len(self.members) > 1 or any(member.options.restarts for member in self.members)

    def address_of(self, member: Member, process: Process) -> EngineAddress:
        """Return the address of a member's process for publishers."""
        return EngineAddress(process.client.endpoint, self, process.client.keys, process.check)

    def serving(self) -> list[EngineAddress]:
        """Return the addresses of serving processes, for publishers. While all are being restarted, wait for one."""
        waited = Wait()
        while True:
            with self.lock:
                there = [self.address_of(member, member.process) for member in self.usable if member.lives]
            if there:
                return there
            restarted = next((member for member in self.members if member.death is None), self.members[0])
            if restarted.options.restarts:  # it does not take prompts before it has weights
                return [self.address_of(restarted, restarted.living())]
            with self.lock:
                self._wait(waited, "the engine is being restarted")

    def follow(self, publisher: "Publisher") -> None:
        """Have a publisher send to members that join later."""
        with self.lock:
            self.publishers.add(publisher)

    def forget_process(self, endpoint: str) -> None:
        """Stop publishers from sending to an ended process."""
        for publisher in self.open_publishers:
            publisher.remove(endpoint)

    def check(self) -> None:
        """Raise EngineDiedError if no engine is left."""
        if self.gone is not None:
            raise self.gone
        if len(self.members) == 1 and not self.members[0].options.restarts:
            self.members[0].process.check()

    def open(self) -> None:
        """Read the frames of all members from now on. Safe to call twice."""
        with self.lock:
            self._reads = True
            for member in self.members:
                if member.frames is not None:
                    self._read(member.frames, member.placement.first_frame)

    def connect(self, member: Member) -> EngineFrames:
        """Return a connection to the process of a member. If the stream is open, its frames are read."""
        frames = EngineFrames(member.process, can_spare=lambda: self.can_spare(member))
        with self.lock:
            self.ledger.engines.count_from(member.process.welcome.next_ids)
            if self._reads:
                self._read(frames, member.placement.first_frame if member.frames is None else 0)
        return frames

    def _read(self, frames: EngineFrames, begin: int | None) -> None:
        if frames.reader is None:
            welcome = frames.process.welcome

            def held(num_tokens: int, num_rollouts: int) -> Held:
                # A single engine's bounds also count the output of its earlier processes and of a loaded run.
                engine_id = welcome.engine_id if len(self.members) > 1 else None
                return self.ledger.held_of(engine_id, num_tokens, num_rollouts)

            frames.reader = StreamReader(
                welcome.stream_endpoint, begin=begin, keys=frames.client.keys, journal=self._journal,
                held=held,
            )  # fmt: skip
            self.merged.add(frames)

    def lose(self, member: Member, frames: EngineFrames, error: Exception) -> None:
        """Treat the process of this connection as ended."""
        with self.lock:
            if member.frames is frames and member.failure is None:
                member.failure = error
                is_last = not (member.options.restarts or self.can_spare(member))
                if is_last and isinstance(error, EngineDiedError):
                    self.bury(member, error)
                self.lock.notify_all()

    def bury(self, member: Member, death: EngineDiedError) -> int:
        """Note that an engine has ended for good. Returns the number of engines that are left."""
        with self.lock:
            member.death = death
            num_left = sum(other.death is None for other in self.members)
            if not num_left and self.gone is None:
                deaths = "".join(f"\n{other.name}: {other.death}" for other in self.members)
                alone = len(self.members) <= 1
                self.gone = death if alone else EngineDiedError(f"all engines have ended:{deaths}")
            self.lock.notify_all()
            return num_left

    def release(self, frames: EngineFrames) -> int:
        """Unassign the unfinished groups of a process, so that other engines continue them. All of its frames must have
        been read. Returns the number of groups."""
        with self.lock:
            frames.given_up = True
            self.newest_version = max(self.newest_version, frames.version)
            return self.ledger.engines.unassign(frames, frames.engine_id, frames.version)

    def kill(self, endpoint: str) -> None:
        """Treat the engine at this endpoint as ended: its publisher could not send it weights in time."""
        for member, frames in self.usable.items():
            if frames.client.endpoint == endpoint:
                if self.can_spare(member):
                    self.lose(member, frames, EngineHungError("its publisher could not send it weights in time"))
                else:
                    frames.process.kill()

    def stop_restarting(self) -> None:
        """Stop replacing engines that end. Their groups are not continued."""
        self.closing.set()
        for member in list(self.members):
            member.stop_restarting()

    def close(self) -> None:
        """End the engines. Safe to call twice."""
        self.stop_restarting()
        closing = [threading.Thread(target=member.close) for member in self.members[1:]]
        for thread in closing:
            thread.start()
        for member in self.members[:1]:
            member.close()
        for thread in closing:
            thread.join()
        for executor in (self._threads, self._submits):
            executor.shutdown(wait=False)  # Queued calls fail at once, as the engines are closed.

    # ---- calls --------------------------------------------------------------------------------------------------

    def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
        returns: type[Value] = _NOTHING,
        *,
        timeout_s: float | None = None,
    ) -> Value:
        """Call a verb of every engine that takes prompts. Returns the answer of one of them, and raises the error of
        one. A verb that holds engines back holds back those that join later, too."""
        before = self.held_back
        self.held_back = (before | _HOLDS.get(verb, set())) - _RELEASES.get(verb, set())
        try:
            answers = self.call_all(lambda client: client.call(verb, arguments, returns, timeout_s=timeout_s))
        except BaseException:
            self.held_back = before  # An engine has refused, so that a successor must not follow.
            raise
        return next(iter(answers.values()))

    def call_all(self, call: Callable[[EngineClient], Value]) -> dict[Member, Value]:
        """Call every engine that takes prompts. Returns the answers of engines that have not ended during the call, at
        least one; raises the error of one, as soon as all have answered."""
        while True:
            (first, frames), *others = self.ready().items()
            asked = {member: self.later(self.reach, member, theirs, call) for member, theirs in others}
            answers = {first: self.reach(first, frames, call)}
            wait(asked.values())
            answers |= {member: answer.result() for member, answer in asked.items()}
            if there := {member: answer for member, answer in answers.items() if answer is not ENDED}:
                return there

    def reach(self, member: Member, frames: EngineFrames, call: Callable[[EngineClient], Any]) -> Any:
        """Return the answer of a process, or ENDED. Raises any other InflightError."""
        try:
            return call(frames.client)
        except EngineHungError as error:
            if not self.can_spare(member):
                raise
            self.lose(member, frames, error)
        except EngineDiedError as error:
            self.lose(member, frames, error)
        except InflightError:
            if not frames.given_up:  # Otherwise its connection was closed during the call.
                raise
        return ENDED

    def later(self, function: Callable[..., Value], *arguments: Any) -> "Future[Value]":
        """Call in another thread a function that waits for an engine. Raises InflightError if the fleet was closed."""
        try:
            return self._threads.submit(function, *arguments)
        except RuntimeError as error:
            raise InflightError("the engine was closed") from error

    def ready(self) -> dict[Member, EngineFrames]:
        """Return `usable`, as soon as it is not empty."""
        waited = Wait()
        with self.lock:
            while not (usable := self.usable):
                self._wait(waited, "the engine is being restarted")
            return usable

    def _wait(self, waited: Wait, what: str) -> None:
        """Release the lock for a moment. Raises EngineDiedError if no engine is left."""
        if self.gone is not None:
            raise self.gone
        if self.closing.is_set():
            raise InflightError("the engine was closed")
        self.lock.wait(_CHECK_S)
        waited.tick()
        waited.tell(what)

    # ---- groups -------------------------------------------------------------------------------------------------

    def submit(self, prompts: Sequence[Prompt], *, reserved: bool) -> list[int]:
        """Submit all prompts or none, each to the least loaded engine. Returns the ids of their groups. Raises the
        error of an engine that refuses one."""
        return self._complete(self._dispatch(list(enumerate(prompts))), reserved)

    async def asubmit(self, prompts: Sequence[Prompt]) -> list[int]:
        """Do the same for asyncio, with groups that are reserved. If the task is cancelled, its groups are discarded.
        Prompts of several tasks are sent in the order of the calls, unless their engine is being restarted."""
        several = len(self.members) > 1 and any(prompt.version not in (None, LIVE_VERSION) for prompt in prompts)
        with self.lock:  # An engine that is lost in between would block the event loop.
            parts = self._assign(list(enumerate(prompts))) if self.usable and not several else None
        sent = None if parts is None else self._send(parts)
        try:
            if sent is None:
                submitting = self._submits.submit(self.submit, prompts, reserved=True)
            else:
                submitting = self._submits.submit(self._complete, sent, reserved=True)
        except RuntimeError as error:
            raise InflightError("the engine was closed") from error
        try:
            return await asyncio.shield(asyncio.wrap_future(submitting))
        except asyncio.CancelledError:
            submitting.add_done_callback(self._undo_late)
            raise

    def fork(self, arguments: Mapping[str, Any], prompt: Prompt) -> int:
        """Submit a fork to the engine that draws the request. prompt: the equivalent prompt, for another engine."""
        request_id, at = arguments["request_id"], arguments["at"]
        while True:
            with self.lock:
                member, frames = self._wait_for_owner(request_id)
                record = self._new_record(prompt, member, frames, (request_id, at))
            params = record.prompt.params if record.prompt is not None else prompt.params
            sent = self._start((member, frames, [(0, record)]), "fork", {**arguments, "params": params}, int)
            try:
                again = self._claim(self._accepted([sent]), reserved=False)
            except BaseException:
                self._undo([record])
                raise
            if not again:
                return record.group_id

    def cancel(self, group_ids: Collection[int], request_ids: Collection[int]) -> None:
        """End the unfinished samples of these groups, and these samples."""
        self.ledger.engines.note_cancelled(group_ids, request_ids)
        self.call("cancel", {"group_ids": list(group_ids), "request_ids": list(request_ids)})

    def abandon(self, group_ids: Collection[int]) -> None:
        """Discard groups, and end their unfinished samples without waiting for the engines."""
        self.ledger.drop(group_ids)
        for frames in self.usable.values():
            self.cancel_at(frames, group_ids)

    def cancel_at(self, frames: EngineFrames, group_ids: Collection[int], request_ids: Collection[int] = ()) -> None:
        """Have a process end these groups and samples, without waiting for it."""
        with suppress(InflightError):  # it has ended
            frames.client.call_soon("cancel", {"group_ids": list(group_ids), "request_ids": list(request_ids)})

    def fail(self, refused: Mapping[int, str]) -> None:
        """End groups that no engine can continue. refused: the reasons, by their ids."""
        for group_id, reason in refused.items():
            logger.error("no engine can go on with group %d: %s", group_id, reason)
        if refused:
            self.ledger.frames.fail(refused)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _assign(self, prompts: Sequence[tuple[int, Prompt]]) -> list[Part]:
        """Give each prompt to the least loaded engine, or to one that has its version."""
        versions = {prompt.version for _, prompt in prompts} - {None, LIVE_VERSION}
        several = bool(versions) and len(self.members) > 1
        statuses = self.call_all(lambda client: client.call("status", returns=Status)) if several else {}
        holders = {v: [member for member, status in statuses.items() if v in status.versions] for v in versions}
        parts: dict[Member, Part] = {}
        with self.lock:
            serving = self.ready()
            for index, prompt in prompts:
                fit = [member for member in serving if member in holders.get(prompt.version, ())]
                member = min(fit or serving, key=lambda member: member.load)
                part = parts.setdefault(member, (member, serving[member], []))
                part[2].append((index, self._new_record(prompt, member, serving[member])))
        return list(parts.values())

    def _new_record(
        self, prompt: Prompt, member: Member, frames: EngineFrames, origin: tuple[int, int] | None = None
    ) -> GroupRecord:
        member.num_given += prompt.params.n
        return self.ledger.engines.begin(prompt, frames, origin)

    def _dispatch(self, prompts: Sequence[tuple[int, Prompt]]) -> list[Sent]:
        """Send prompts to engines, without waiting for their answers."""
        return self._send(self._assign(prompts)) if prompts else []

    def _send(self, parts: Sequence[Part]) -> list[Sent]:
        return [
            self._start(part, "submit", {"prompts": [record.prompt for _, record in part[2]]}, list[int])
            for part in parts
        ]

    def _start(self, part: Part, verb: str, arguments: dict[str, Any], returns: Any) -> Sent:
        """Send a part to its engine. Returns it with the function that waits for the answer."""
        _, frames, given = part
        ids = [record.ids for _, record in given]
        arguments["ids"] = ids if verb == "submit" else ids[0]
        try:
            return part, frames.client.start_call(verb, arguments, returns)
        except InflightError as error:  # raised when the answers are collected
            return part, partial(_raise, error)

    def _complete(self, sent: list[Sent], reserved: bool) -> list[int]:
        """Wait for the answers to sent prompts, and submit prompts of ended engines again."""
        records: dict[int, GroupRecord] = {}
        try:
            while sent:
                records |= {index: record for (_, _, given), _ in sent for index, record in given}
                sent = self._dispatch(self._claim(self._accepted(sent), reserved))
        except BaseException:
            self._undo(records.values())
            raise
        return [records[index].group_id for index in sorted(records)]

    def _accepted(self, sent: Sequence[Sent]) -> list[tuple[Part, bool]]:
        """Return each part with True if its engine has accepted it, and not ended. Raises the error of an engine that
        refuses one, as soon as all have answered."""
        answered: list[tuple[Part, bool]] = []
        refusal: InflightError | None = None
        for part, answer in sent:
            member, frames, given = part
            try:
                answered.append((part, self.reach(member, frames, lambda _, answer=answer: answer()) is not ENDED))
            except InflightError as error:
                refusal = refusal or _by_place(error, [index for index, _ in given])
                if not isinstance(error, EngineHungError):  # else it might accept the part later
                    with self.lock:
                        if member.frames is frames:
                            member.num_given -= sum(record.num_samples for _, record in given)
                        self.ledger.table.forget(record for _, record in given)
        if refusal is not None:
            raise refusal
        return answered

    def _claim(self, parts: Iterable[tuple[Part, bool]], reserved: bool) -> list[tuple[int, Prompt]]:
        """Make the user the owner of groups that engines have accepted. Returns the prompts to submit again: their
        engine has ended, and other engines do not continue their groups."""
        again: list[tuple[int, Prompt]] = []
        finished: list[GroupRecord] = []
        with self.lock:
            for (_, frames, given), accepted in parts:
                ids = [record.group_id for _, record in given]
                if accepted and not frames.given_up:
                    finished += self.ledger.claim(ids, reserved=reserved)
                    continue
                self.ledger.table.forget(record for _, record in given)
                self.cancel_at(frames, ids)  # the process might still live
                again += [(index, record.prompt) for index, record in given if record.prompt is not None]
        self.ledger.queue.offer(finished)
        return again

    def _undo(self, records: Iterable[GroupRecord]) -> None:
        """Discard groups. Engines might have accepted some of them."""
        with self.lock:
            for record in records:
                if self.ledger.discard(record) and record.at is not None:
                    self.cancel_at(record.at, [record.group_id])

    def _undo_late(self, submitted: "Future[list[int]]") -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self.abandon(submitted.result())

    def _wait_for_owner(self, request_id: int) -> tuple[Member, EngineFrames]:
        """Return the engine that draws a request, as soon as one does. Called with the lock. Waiting releases it."""
        waited = Wait()
        while True:
            record = self.ledger.engines.find(request_id)
            if record is None:
                raise InvalidRequestError(
                    f"request {request_id} is not unfinished; submit its prompt and tokens as a new prompt instead"
                )
            for member, frames in self.usable.items():
                if frames is record.at:
                    return member, frames
            self._wait(waited, f"the engine of request {request_id} has ended, and another one goes on with it")


def _by_place(error: InflightError, places: Sequence[int]) -> InflightError:
    """Let an error name a prompt by its place in the list of the user."""
    if not isinstance(error, InvalidRequestError) or list(places) == list(range(len(places))):
        return error
    text = re.sub(r"\bprompt (\d+)", lambda match: f"prompt {places[int(match[1])]}", str(error), count=1)
    return type(error)(text)


def _raise(error: InflightError) -> NoReturn:
    raise error
