"""Sends prompts to the engines of a fleet, each to the least loaded one."""

import asyncio
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import msgspec

from inflight.core.errors import EngineHungError, InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.waiting import Wait
from inflight.fleet.calls import ENDED, FleetCalls
from inflight.fleet.fleet import Fleet
from inflight.fleet.frames import EngineFrames
from inflight.fleet.member import Member
from inflight.stream.group_table import GroupRecord

_MOST_CALLS = 64
_MOST_SESSIONS = 65_536
Part = tuple[Member, EngineFrames, list[tuple[int, GroupRecord]]]
"""An engine, the connection to its process, and the groups for it, each with its place in the submitted list."""
Sent = tuple[Part, Callable[[], Any]]
"""A part that was sent to its engine, and the function that waits for the answer."""


class Submissions:
    """Submits prompts and forks. Prompts of an engine that ends before it has accepted them are submitted again."""

    def __init__(self, fleet: Fleet, calls: FleetCalls):
        self._fleet, self._calls = fleet, calls
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="inflight-fleet-submit")
        self._of_sessions: dict[Hashable, Member] = {}
        """The engines that drew the last prompts of sessions, the session that drew last at the end."""

    def submit(self, prompts: Sequence[Prompt], *, reserved: bool) -> list[int]:
        """Submit all prompts or none, each to the least loaded engine. Returns the ids of their groups. Raises the
        error of an engine that refuses one."""
        return self._complete(_send(self._assign(list(enumerate(prompts)))) if prompts else [], reserved)

    async def asubmit(self, prompts: Sequence[Prompt], session: Hashable = None) -> list[int]:
        """Do the same for asyncio, with groups that are reserved. If the task is cancelled, its groups are discarded.
        Prompts of several tasks are sent in the order of the calls, unless their engine is being restarted. session:
        while the engine that drew its last prompts has a free batch row, that engine draws these, too."""

        def discard(submitted: "Future[list[int]]") -> None:
            if not submitted.cancelled() and submitted.exception() is None:
                self._fleet.abandon(submitted.result())

        several = len(self._fleet.members) > 1 and any(prompt.version not in (None, LIVE_VERSION) for prompt in prompts)
        with self._fleet.lock:  # An engine that is lost in between would block the event loop.
            parts = self._assign(list(enumerate(prompts)), session) if self._fleet.usable and not several else None
        submit = partial(self.submit, prompts) if parts is None else partial(self._complete, _send(parts))
        try:
            submitting = self._threads.submit(submit, reserved=True)
        except RuntimeError as error:
            raise InflightError("the engine was closed") from error
        try:
            return await asyncio.shield(asyncio.wrap_future(submitting))
        except asyncio.CancelledError:
            submitting.add_done_callback(discard)
            raise

    def fork(self, arguments: Mapping[str, Any], prompt: Prompt) -> int:
        """Submit a fork to the engine that draws the request. prompt: the equivalent prompt, for another engine. It
        gets the adapter and the pinned version of the request."""
        request_id, at = arguments["request_id"], arguments["at"]
        while True:
            with self._fleet.lock:
                member, frames, parent = self._wait_for_owner(request_id)
                if parent.prompt is not None:
                    version, adapter = self._fleet.ledger.engines.pin_of(parent), parent.prompt.adapter
                    prompt = msgspec.structs.replace(prompt, version=version, adapter=adapter)
                record = self._fleet.ledger.engines.begin(prompt, frames, (request_id, at))
                member.num_given += prompt.params.n
            params = record.prompt.params if record.prompt is not None else prompt.params
            sent = _start((member, frames, [(0, record)]), "fork", {**arguments, "params": params}, int)
            try:
                again = self._claim(self._accepted([sent]), reserved=False)
            except BaseException:
                self._undo([record])
                raise
            if not again:
                return record.group_id

    def close(self) -> None:
        """Accept no further prompts of asyncio tasks."""
        self._threads.shutdown(wait=False)

    def _assign(self, prompts: Sequence[tuple[int, Prompt]], session: Hashable = None) -> list[Part]:
        """Give each prompt to the least loaded engine, to one that has its version, or to the engine of its session."""
        versions = {prompt.version for _, prompt in prompts} - {None, LIVE_VERSION}
        several = bool(versions) and len(self._fleet.members) > 1
        statuses = self._calls.statuses() if several else {}
        holders = {v: [member for member, status in statuses.items() if v in status.versions] for v in versions}
        parts: dict[Member, Part] = {}
        with self._fleet.lock:
            serving = self._fleet.ready()
            for index, prompt in prompts:
                fit = [member for member in serving if member in holders.get(prompt.version, ())]
                member = min(fit or serving, key=lambda member: member.load)
                if session is not None:
                    last = self._of_sessions.pop(session, None)
                    if last in serving and last.load < 1 and not fit:  # its cache has the tokens so far
                        member = last
                    self._of_sessions[session] = member
                part = parts.setdefault(member, (member, serving[member], []))
                part[2].append((index, self._fleet.ledger.engines.begin(prompt, serving[member])))
                member.num_given += prompt.params.n
            while len(self._of_sessions) > _MOST_SESSIONS:
                del self._of_sessions[next(iter(self._of_sessions))]
        return list(parts.values())

    def _complete(self, sent: list[Sent], reserved: bool) -> list[int]:
        """Wait for the answers to sent prompts, and submit prompts of ended engines again."""
        records: dict[int, GroupRecord] = {}
        try:
            while sent:
                records |= {index: record for (_, _, given), _ in sent for index, record in given}
                again = self._claim(self._accepted(sent), reserved)
                sent = _send(self._assign(again)) if again else []
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
                answered.append(
                    (part, self._calls.reach(member, frames, lambda _, answer=answer: answer()) is not ENDED)
                )
            except InflightError as error:
                refusal = refusal or _by_place(error, [index for index, _ in given])
                if not isinstance(error, EngineHungError):  # else it might accept the part later
                    with self._fleet.lock:
                        if member.frames is frames:
                            member.num_given -= sum(record.num_samples for _, record in given)
                        self._fleet.ledger.table.forget(record for _, record in given)
        if refusal is not None:
            raise refusal
        return answered

    def _claim(self, parts: Iterable[tuple[Part, bool]], reserved: bool) -> list[tuple[int, Prompt]]:
        """Make the user the owner of groups that engines have accepted. Returns the prompts to submit again: their
        engine has ended, and other engines do not continue their groups."""
        again: list[tuple[int, Prompt]] = []
        finished: list[GroupRecord] = []
        with self._fleet.lock:
            for (_, frames, given), accepted in parts:
                ids = [record.group_id for _, record in given]
                if accepted and not frames.given_up:
                    finished += self._fleet.ledger.claim(ids, reserved=reserved)
                    continue
                self._fleet.ledger.table.forget(record for _, record in given)
                frames.cancel(ids)  # the process might still live
                again += [(index, record.prompt) for index, record in given if record.prompt is not None]
        self._fleet.ledger.queue.offer(finished)
        return again

    def _undo(self, records: Iterable[GroupRecord]) -> None:
        """Discard groups. Engines might have accepted some of them."""
        with self._fleet.lock:
            for record in records:
                if self._fleet.ledger.discard(record) and record.at is not None:
                    record.at.cancel([record.group_id])

    def _wait_for_owner(self, request_id: int) -> tuple[Member, EngineFrames, GroupRecord]:
        """Return the engine that draws a request, as soon as one does, and the group of the request. Called with the
        lock. Waiting releases it."""
        waited = Wait()
        while True:
            unfinished = (record for record in self._fleet.ledger.table.records.values() if not record.is_finished)
            record = next((record for record in unfinished if request_id in record.request_ids), None)
            if record is None:
                raise InvalidRequestError(
                    f"request {request_id} is not unfinished; submit its prompt and tokens as a new prompt instead"
                )
            for member, frames in self._fleet.usable.items():
                if frames is record.at:
                    return member, frames, record
            self._fleet.wait(waited, f"the engine of request {request_id} has ended, and another one goes on with it")


def _send(parts: Sequence[Part]) -> list[Sent]:
    return [_start(part, "submit", {"prompts": [record.prompt for _, record in part[2]]}, list[int]) for part in parts]


def _start(part: Part, verb: str, arguments: dict[str, Any], returns: Any) -> Sent:
    """Send a part to its engine. Returns it with the function that waits for the answer."""
    _, frames, given = part
    ids = [record.ids for _, record in given]
    arguments["ids"] = ids if verb == "submit" else ids[0]
    try:
        return part, frames.client.start_call(verb, arguments, returns)
    except InflightError as error:  # raised when the answers are collected
        return part, partial(_raise, error)


def _by_place(error: InflightError, places: Sequence[int]) -> InflightError:
    """Let an error name a prompt by its place in the list of the user."""
    if not isinstance(error, InvalidRequestError) or list(places) == list(range(len(places))):
        return error
    text = re.sub(r"\bprompt (\d+)", lambda match: f"prompt {places[int(match[1])]}", str(error), count=1)
    return type(error)(text)


def _raise(error: InflightError) -> NoReturn:
    raise error
