"""Sends prompts to the engines of a pool, and what an engine leaves unfinished to the others."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import msgspec

from inflight.core.errors import EngineDiedError, EngineHungError, InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION, Ids, Prompt, Status
from inflight.core.waiting import Wait
from inflight.engine.client import EngineClient
from inflight.pool.frames import EngineFrames
from inflight.pool.member import Group, Member
from inflight.stream.held_groups import Drawn
from inflight.stream.ledger import Ledger
from inflight.supervisor import (
    HELD_BACK_AFTER,
    MOST_NOTED,
    NO_ARGUMENTS,
    NOTHING,
    Expect,
    Process,
    Snapshot,
    Value,
    seeded,
)

logger = logging.getLogger("inflight.pool")

_CHECK_S = 0.1
_MOST_CALLS = 64
ENDED = object()
"""What an engine answers that has ended, or that hangs and counts as one that has."""
Part = tuple[Member, EngineFrames, list[tuple[int, Group]]]
"""An engine, its process, and what it is given, each beside its place in the list that was submitted."""


class Dispatcher:
    """What a Supervisor is to one engine, over several: calls go to all, prompts to the one that has least to do.

    It counts the ids of groups and requests itself, so that they are unique over all engines. Calls are safe from
    several threads at once. While no engine takes prompts, calls wait; once there will be none any more they raise the
    EngineDiedError that tells of all deaths. An engine that does not answer in time counts as one that has ended.
    """

    ledger: Ledger
    """Where the frames of all engines arrive. It is set before the first engine comes."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        """Guards all that follows, and members. Whoever holds it may take the ledger's lock, and not the other way."""
        self.members: list[Member] = []
        self.held_back: str | None = None
        """The verb, pause or sleep, that the user called last and has not undone."""
        self.gone: EngineDiedError | None = None
        """Why there is no engine any more."""
        self.newest_version = 0
        """The newest version that a process had which has ended."""
        self.closing = threading.Event()
        self.groups: dict[int, Group] = {}
        """Maps their ids to the groups that may be unfinished."""
        self.homeless: list[Group] = []
        """Those of them that no engine has, and that others are to go on with (`Placer`)."""
        self._next = Ids(0, 0)
        self._calls = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="inflight-pool-call")
        """Threads for calls that wait for nothing but an engine's answer."""
        self._submits = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="inflight-pool-submit")

    # ---- what a running engine calls ----------------------------------------------------------------------------

    @property
    def launcher(self) -> Process:
        """The process of one of the engines that serve, or of one that served."""
        return next(iter(self.usable), self.members[0]).supervisor.launcher

    @property
    def usable(self) -> dict[Member, EngineFrames]:
        """The engines that take prompts, each with what its process sends."""
        with self.lock:
            return {m: m.frames for m in self.members if m.usable and m.frames is not None}

    def check(self) -> None:
        """Raise EngineDiedError if no engine is left."""
        if self.gone is not None:
            raise self.gone

    def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        returns: type[Value] = NOTHING,
        *,
        timeout_s: float | None = None,
    ) -> Value:
        """Call a verb of every engine that takes prompts. Returns what one of them returned, and raises what one of
        them raised. What holds them back holds engines that come later back, too."""
        if verb in HELD_BACK_AFTER:
            self.held_back = HELD_BACK_AFTER[verb]
        if verb == "cancel":
            self._note_cancelled(arguments["group_ids"], arguments["request_ids"])
        answers = self.call_all(lambda client: client.call(verb, arguments, returns, timeout_s=timeout_s))
        return next(iter(answers.values()))

    def call_all(self, call: Callable[[EngineClient], Value]) -> dict[Member, Value]:
        """Call every engine that takes prompts. Returns what each of them returned that has not ended meanwhile, at
        least one; raises what one of them raised, as soon as all have answered."""
        while True:
            asked = {m: self.later(self.reach, m, frames, call) for m, frames in self.serving().items()}
            wait(asked.values())
            answers = {member: answer.result() for member, answer in asked.items()}
            if there := {member: answer for member, answer in answers.items() if answer is not ENDED}:
                return there

    def submit(self, prompts: Sequence[Prompt], expect: Expect) -> list[int]:
        """Have prompts accepted, all or none, each by the engine that has least to do, and tell `expect` the ids of
        their groups before an engine can end with them. Raises what an engine refuses them with."""
        todo, groups = list(enumerate(seeded(prompts))), dict[int, Group]()
        try:
            while todo:
                parts = self._assign(todo)
                groups |= {index: group for *_, given in parts for index, group in given}
                todo = self._enter(self._send(parts), expect)
        except BaseException:
            self._undo([group.ids.group_id for group in groups.values()])
            raise
        return [groups[index].ids.group_id for index in range(len(prompts))]

    async def asubmit(self, prompts: Sequence[Prompt], expect: Expect, undo: Expect) -> list[int]:
        """Do the same for asyncio. undo: is not called: if the task is cancelled, nothing has been submitted."""
        submitting = self._submits.submit(self.submit, prompts, expect)
        try:
            return await asyncio.wrap_future(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(self._undo_late)
            raise

    def fork(self, arguments: Mapping[str, Any], prompt: Prompt, expect: Expect) -> int:
        """Have a fork accepted by the engine that has the request. prompt: what another one would draw it from."""
        [prompt] = seeded([prompt])
        request_id, at = arguments["request_id"], arguments["at"]
        while True:
            with self.lock:
                member, frames = self._wait_for_owner(request_id)
                group = self._new_group(prompt, member, (request_id, at))
            part = (member, frames, [(0, group)])
            accepted = self._ask(part, "fork", {**arguments, "params": prompt.params, "ids": group.ids}, int)
            if not self._enter([(part, accepted)], expect):
                return group.ids.group_id

    def forget(self, outstanding: Sequence[int]) -> None:
        """Groups that are not outstanding need no other engine. What is noted of them goes as soon as it is much."""
        with self.lock:
            if len(self.groups) > 2 * len(outstanding) + MOST_NOTED:
                wanted = set(outstanding)
                self.groups = {i: group for i, group in self.groups.items() if i in wanted or not group.accepted}

    def cancel_soon(self, group_ids: Collection[int]) -> None:
        """End the unfinished samples of these groups, without waiting for the engines."""
        self._note_cancelled(group_ids, ())
        for frames in self.usable.values():
            self.cancel_at(frames, group_ids)

    def kill(self, endpoint: str) -> None:
        """The engine at this endpoint was given up by its publisher: it counts as one that has ended."""
        for member, frames in self.usable.items():
            if frames.client.endpoint == endpoint:
                self.lose(member, frames, EngineHungError("its publisher could not send it weights in time"))

    def stop_restarting(self) -> None:
        """From now on an engine that ends is not replaced, and what it had goes nowhere."""
        self.closing.set()
        for member in list(self.members):
            member.supervisor.stop_restarting()

    def close(self) -> None:
        """End the engines. Safe to call twice."""
        self.stop_restarting()
        closing = [threading.Thread(target=member.supervisor.close) for member in self.members]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        for executor in (self._calls, self._submits):
            executor.shutdown(wait=False, cancel_futures=True)

    # ---- what outlives the trainer ------------------------------------------------------------------------------

    def snapshot(self, ledger: Ledger) -> Snapshot:
        """What is outstanding, all of one moment."""
        with self.lock:
            groups, _ = ledger.snapshot()
            known = [self.groups[group.group_id] for group in groups]
            submitted = [(group.prompt, group.origin) for group in known]
            return Snapshot(groups, submitted, self._next.group_id, self._next.first_request_id)

    def restore(self, snapshot: Snapshot, ledger: Ledger) -> None:
        """Go on with what was outstanding where another trainer ended; nothing was submitted here yet."""
        with self.lock:
            if self._next.group_id:
                raise InflightError("prompts were submitted already; load a run before that")
            self._next = Ids(snapshot.next_group_id, snapshot.next_request_id)
            ledger.restore(snapshot.groups, snapshot.starts, snapshot.next_request_id)
            for held, (prompt, origin) in zip(snapshot.groups, snapshot.submitted, strict=True):
                start, first = snapshot.starts.get(held.group_id), self._next.first_request_id
                if start is None:
                    self._next = Ids(self._next.group_id, first + prompt.params.n)
                ids = Ids(held.group_id, first if start is None else start.first_request_id)
                group = self.groups[held.group_id] = Group(ids, prompt, origin, accepted=True)
                drawn_by = [int(r.weight_versions[-1]) for r in held.rollouts if len(r.weight_versions)]
                group.version = max(drawn_by, default=0)
            for group_id, drawn in ledger.unfinished_of("", list(self.groups)).items():
                self._let_go(self.groups[group_id], drawn)
            self.lock.notify_all()

    # ---- what the others of a pool call -------------------------------------------------------------------------

    @property
    def next(self) -> Ids:
        """Whatever is accepted later has larger ids, or these."""
        return self._next

    def lose(self, member: Member, frames: EngineFrames, error: Exception) -> None:
        """The process that sends these frames counts as one that has ended."""
        with self.lock:
            if member.frames is frames and member.failure is None:
                member.failure = error
                self.lock.notify_all()

    def release(self, frames: EngineFrames) -> int:
        """All has been read that this process sent, and its unfinished groups go on elsewhere. Returns their number."""
        with self.lock:
            frames.given_up = True
            self.newest_version = max(self.newest_version, frames.version)
            given = {i: group for i, group in self.groups.items() if group.at is frames}
            left = self.ledger.unfinished_of(frames.engine_id, given)
            for group_id in given.keys() - left.keys():  # it has ended, or was not accepted
                if not given[group_id].accepted:
                    del self.groups[group_id]
            for group_id, drawn in left.items():
                given[group_id].version = max(given[group_id].version, frames.version)
                self._let_go(given[group_id], drawn)
            self.lock.notify_all()
            return len(left)

    def _let_go(self, group: Group, drawn: Drawn | None) -> None:
        """A group has no engine. drawn: as `Assembler.drawn` says."""
        group.at, group.waited_s, group.drawn = None, 0.0, drawn and drawn[1]
        if drawn is None or not any(drawn[1].values()):
            group.version = 0
        elif group.prompt.version == LIVE_VERSION:  # it is the one that drew it
            rollouts = self.ledger.partial(group.ids.group_id)
            version = next(int(r.weight_versions[0]) for r in rollouts if len(r.weight_versions))
            group.prompt = msgspec.structs.replace(group.prompt, version=version)
        self.homeless.append(group)

    def fail(self, refused: Mapping[int, str]) -> None:
        """No engine can go on with these groups, and why."""
        for group_id, reason in refused.items():
            logger.error("no other engine of the pool can go on with group %d: %s", group_id, reason)
            with self.lock:
                self.groups.pop(group_id, None)
        if refused:
            self.ledger.fail(refused)

    def cancel_at(self, frames: EngineFrames, group_ids: Collection[int], request_ids: Collection[int] = ()) -> None:
        """Have a process end what it has of these groups and samples, without waiting for it."""
        with suppress(InflightError):  # it has ended
            frames.client.call_soon("cancel", {"group_ids": list(group_ids), "request_ids": list(request_ids)})

    def later(self, function: Callable[..., Value], *arguments: Any) -> "Future[Value]":
        """Call a function that waits for an engine in another thread. Raises InflightError if the pool was closed."""
        try:
            return self._calls.submit(function, *arguments)
        except RuntimeError as error:
            raise InflightError("the pool was closed") from error

    def serving(self) -> dict[Member, EngineFrames]:
        """What `usable` has, once there are some. Others get the lock meanwhile."""
        waited = Wait()
        with self.lock:
            while not (usable := self.usable):
                self._wait(waited, "all engines of the pool are being restarted")
            return usable

    def reach(self, member: Member, frames: EngineFrames, call: Callable[[EngineClient], Any]) -> Any:
        """What a process answers, or ENDED. Raises any other InflightError."""
        try:
            return call(frames.client)
        except (EngineDiedError, EngineHungError) as error:
            self.lose(member, frames, error)
            return ENDED

    # ---- submitting ---------------------------------------------------------------------------------------------

    def _wait_for_owner(self, request_id: int) -> tuple[Member, EngineFrames]:
        """The engine that draws a request, once one does. Called with the lock, which others get meanwhile."""
        waited = Wait()
        while True:
            group = next((group for group in self.groups.values() if request_id in group.request_ids), None)
            if group is None or (group.at is not None and group.at.given_up):  # it has ended
                raise InvalidRequestError(
                    f"request {request_id} is not unfinished; submit its prompt and tokens as a new prompt instead"
                )
            for member, frames in self.usable.items():
                if frames is group.at:
                    return member, frames
            self._wait(waited, f"the engine of request {request_id} has ended, and another one goes on with it")

    def _wait(self, waited: Wait, what: str) -> None:
        self.check()
        if self.closing.is_set():
            raise InflightError("the pool was closed")
        self.lock.wait(_CHECK_S)
        waited.tick()
        waited.tell(what)

    def _assign(self, prompts: Sequence[tuple[int, Prompt]]) -> list[Part]:
        """Give each prompt to the engine that has least to do."""
        versions = {prompt.version for _, prompt in prompts} - {None, LIVE_VERSION}
        statuses = self.call_all(lambda client: client.call("status", returns=Status)) if versions else {}
        holders = {v: [member for member, status in statuses.items() if v in status.versions] for v in versions}
        parts: dict[Member, Part] = {}
        with self.lock:
            members = self.serving()
            for index, prompt in prompts:
                fit = [member for member in members if member in holders.get(prompt.version, members)]
                member = min(fit or members, key=lambda member: member.load)
                part = parts.setdefault(member, (member, members[member], []))
                part[2].append((index, self._new_group(prompt, member)))
        return list(parts.values())

    def _new_group(self, prompt: Prompt, member: Member, origin: tuple[int, int] | None = None) -> Group:
        """Note a group with new ids, which this engine is given. Called with the lock."""
        group = Group(self._next, prompt, origin, member.frames)
        self._next = Ids(self._next.group_id + 1, self._next.first_request_id + prompt.params.n)
        self.groups[group.ids.group_id] = group
        member.num_given += prompt.params.n
        return group

    def _send(self, parts: Sequence[Part]) -> list[tuple[Part, bool]]:
        """Say beside each part whether the engine has accepted it, and not ended. Raises what one refuses it with, as
        soon as all have answered."""
        rest = [self.later(self._submit, part) for part in parts[1:]]
        try:
            first = self._submit(parts[0])
        except InflightError:
            wait(rest)
            raise
        wait(rest)
        return list(zip(parts, [first, *(each.result() for each in rest)], strict=True))

    def _submit(self, part: Part) -> bool:
        """What `_ask` does. Raises InvalidRequestError that names a prompt by its place in the list that the user
        submitted."""
        given = [group for _, group in part[2]]
        arguments = {"prompts": [group.prompt for group in given], "ids": [group.ids for group in given]}
        try:
            return self._ask(part, "submit", arguments, list[int])
        except InvalidRequestError as error:
            places = [index for index, _ in part[2]]
            text = re.sub(r"^prompt (\d+)", lambda match: f"prompt {places[int(match[1])]}", str(error))
            raise InvalidRequestError(text) from None

    def _ask(self, part: Part, verb: str, arguments: Mapping[str, Any], returns: Any) -> bool:
        """Returns whether the engine has accepted a part, and not ended. Raises what it refuses it with."""
        member, frames, given = part
        try:
            return self.reach(member, frames, lambda client: client.call(verb, arguments, returns)) is not ENDED
        except InflightError:
            with self.lock:
                if member.frames is frames:
                    member.num_given -= sum(group.prompt.params.n for _, group in given)
                for _, group in given:
                    self.groups.pop(group.ids.group_id, None)
            raise

    def _enter(self, parts: Iterable[tuple[Part, bool]], expect: Expect) -> list[tuple[int, Prompt]]:
        """What engines have accepted whose groups were not left to others yet is the user's from now on. Returns the
        rest: nothing that comes of it counts, and it is to be submitted anew."""
        again: list[tuple[int, Prompt]] = []
        with self.lock:
            for (_, frames, given), accepted in parts:
                ids = [group.ids.group_id for _, group in given]
                if accepted and not frames.given_up:
                    for _, group in given:
                        group.accepted = True
                    expect(ids)
                    continue
                for _, group in given:
                    self.groups.pop(group.ids.group_id, None)
                self.cancel_at(frames, ids)  # where it lives on
                again += [(index, group.prompt) for index, group in given]
        return again

    def _undo(self, group_ids: Collection[int]) -> None:
        """Nobody wants these groups, of which engines may have accepted some."""
        with self.lock:
            known = [group for group_id in group_ids if (group := self.groups.pop(group_id, None)) is not None]
        ids = [group.ids.group_id for group in known]
        self.ledger.expect(ids, reserved=True)
        self.ledger.drop(ids)
        for group in known:
            if group.at is not None:
                self.cancel_at(group.at, [group.ids.group_id])

    def _undo_late(self, submitted: "Future[list[int]]") -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self._undo(submitted.result())

    def _note_cancelled(self, group_ids: Collection[int], request_ids: Collection[int]) -> None:
        """Whoever goes on with these learns that they are to end."""
        wanted = set(request_ids)
        with self.lock:
            for group_id in group_ids:
                if group_id in self.groups:
                    self.groups[group_id].cancelled.update(self.groups[group_id].request_ids)
            for group in self.groups.values() if wanted else ():
                group.cancelled |= wanted.intersection(group.request_ids)
