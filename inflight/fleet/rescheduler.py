"""Finds engines that continue the groups of engines that have ended."""

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import msgspec

from inflight.core.errors import EngineDiedError, InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION, Ids, Status, Unfinished
from inflight.core.waiting import Wait
from inflight.engine.process.client import EngineClient
from inflight.fleet.calls import ENDED, FleetCalls, client_status
from inflight.fleet.fleet import Fleet
from inflight.fleet.frames import EngineFrames
from inflight.fleet.member import Member
from inflight.stream.group_table import GroupRecord

logger = logging.getLogger("inflight.fleet")

_AGAIN_S = 0.05
_IDLE_S = 1.0
_ANSWER_S = 1.0
"""An engine that takes longer to answer gets no groups for now."""
_BYTES_PER_CALL = 4 << 20
"""An engine refuses messages of more than MAX_MESSAGE_BYTES."""
Answers = Mapping[Member, tuple[EngineFrames, Status]]


class Rescheduler:
    """A thread that assigns groups without an engine to engines whose weights can continue them.

    A group continues with the version of its last token, or a newer one. A group that is pinned to a version continues
    on an engine that holds it. If no engine gets such weights in time, or all engines refuse the group, it ends with
    finish_reason "error".
    """

    def __init__(self, fleet: Fleet, calls: FleetCalls, timeout_s: float):
        """timeout_s: time for which engines that take prompts can lack the weights."""
        self._fleet, self._calls, self._timeout_s = fleet, calls, timeout_s
        self._asked: dict[Member, tuple[EngineFrames, Future[Any]]] = {}
        """Engines that have not answered yet."""
        self._thread = threading.Thread(target=self._run, name="inflight-rescheduler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. The fleet is closing."""
        with self._fleet.lock:
            self._fleet.lock.notify_all()
        self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fleet, waited = self._fleet, Wait()
        try:
            while not fleet.closing.wait(_AGAIN_S):
                with fleet.lock:
                    fleet.lock.wait_for(lambda: fleet.ledger.engines.unassigned or fleet.closing.is_set(), _IDLE_S)
                    has_work = bool(fleet.ledger.engines.unassigned)
                passed_s = waited.tick()
                if has_work:
                    self._place(self._ask(), passed_s)
        except InflightError as error:
            logger.info("unfinished groups go nowhere: %s", error)  # no engine is left, or the fleet was closed
        except Exception as error:
            logger.exception("groups of engines that end would be lost from now on")
            fleet.gone = EngineDiedError(f"no engines can be found for unfinished groups: {error!r}")

    def _ask(self) -> Answers:
        """Return the status of the engines that answer soon."""
        fleet = self._fleet
        for member, frames in fleet.ready().items():
            if member not in self._asked:  # else it has not answered yet
                self._asked[member] = frames, self._calls.later(self._calls.reach, member, frames, client_status)
        wait([answer for _, answer in self._asked.values()], timeout=_ANSWER_S)
        answered = [member for member, (_, answer) in self._asked.items() if answer.done()]
        answers = {member: self._asked.pop(member) for member in answered}
        told = {m: each for m, each in answers.items() if not isinstance(each[1].exception(), InflightError)}
        return {m: (f, status) for m, (f, answer) in told.items() if (status := answer.result()) is not ENDED}

    def _place(self, engines: Answers, passed_s: float) -> None:
        given: dict[Member, tuple[EngineFrames, list[GroupRecord]]] = {}
        refused: dict[int, str] = {}
        fleet = self._fleet
        with fleet.lock:
            engines = {m: answer for m, answer in engines.items() if m.usable and m.frames is answer[0]}
            all_answered = len(engines) == len(fleet.usable)
            alive = {member for member in fleet.members if member.death is None}  # restarting members included
            for record in fleet.ledger.engines.unassigned:
                record.waited_s += passed_s if engines else 0.0
                by = record.refusals
                fit = [m for m, (_, status) in engines.items() if m not in by and can_continue(record, status)]
                if fit:
                    member = min(fit, key=lambda member: member.load)
                    frames = engines[member][0]
                    fleet.ledger.engines.assign(record, frames)
                    member.num_given += record.num_unfinished
                    given.setdefault(member, (frames, []))[1].append(record)
                elif by and by.keys() >= alive:
                    refused[record.group_id] = "; ".join(dict.fromkeys(by.values()))
                elif record.waited_s > self._timeout_s or (all_answered and is_past(record, engines)):
                    lacking = f"no {'other' if by else 'engine'} has {_wanted(record)}"
                    refused[record.group_id] = "; ".join([*by.values(), lacking])
        for member, (frames, records) in given.items():
            self._calls.later(self._adopt, member, frames, records)
        self._fail(refused)

    def _adopt(self, member: Member, frames: EngineFrames, records: list[GroupRecord]) -> None:
        """Have an engine continue groups. If it ends before that, they are reassigned like all of its groups. Groups
        that it refuses are unassigned again, for the other engines."""
        fleet, unfinished = self._fleet, [unfinished_of(record) for record in records]
        try:
            refused = self._calls.reach(
                member, frames, lambda client: adopt(client, unfinished, fleet.ledger.engines.next_ids)
            )
        except InflightError as error:  # The engine might draw them, so that no other one gets them.
            self._fail({record.group_id: str(error) for record in records})
            return
        if refused is ENDED:
            return
        with fleet.lock:
            for record in records:
                if (reason := refused.get(record.group_id)) is None:
                    record.refusals.clear()
                elif record.at is frames:
                    fleet.ledger.engines.note_refusal(record, member, reason)
            if member.frames is frames:
                member.num_given -= sum(record.num_unfinished for record in records if record.group_id in refused)
            cancelled = [request_id for record in records for request_id in record.cancelled]
            dropped = [record.group_id for record in records if not record.is_wanted]
        if cancelled or dropped:
            frames.cancel(dropped, cancelled)
        logger.warning("%d unfinished groups go on at the engine that is %s", len(records) - len(refused), member.name)

    def _fail(self, refused: Mapping[int, str]) -> None:
        """End groups that no engine can continue. refused: the reasons, by their ids."""
        for group_id, reason in refused.items():
            logger.error("no engine can go on with group %d: %s", group_id, reason)
        if refused:
            self._fleet.ledger.frames.fail(refused)


def can_continue(record: GroupRecord, status: Status) -> bool:
    """Return True if an engine has weights that can continue a group."""
    pin = record.pin
    return status.version >= record.version if pin in (None, LIVE_VERSION) else pin in status.versions


def is_past(record: GroupRecord, engines: Answers) -> bool:
    """Return True if a group is pinned to a version that all engines have passed."""
    pin = record.pin
    return bool(engines) and pin not in (None, LIVE_VERSION) and all(s.version > pin for _, s in engines.values())


def unfinished_of(record: GroupRecord) -> Unfinished:
    """Return the message with which another engine continues a group."""
    drawn = {request_id: [] for request_id in record.request_ids} if record.drawn is None else record.drawn
    assert record.prompt is not None
    return Unfinished(record.group_id, record.prompt, record.ids.first_request_id, drawn, record.origin)


def adopt(client: EngineClient, groups: list[Unfinished], following: Ids) -> dict[int, str]:
    """Have an engine continue groups that another one began. following: later groups have these ids, or larger ones.
    Returns a mapping from the ids of groups that it cannot continue to the reasons."""
    refused: dict[int, str] = {}
    for part in _in_parts(groups):
        arguments = {
            "groups": part, "next_group_id": following.group_id, "next_request_id": following.first_request_id
        }  # fmt: skip
        try:
            refused |= client.call("adopt", arguments, dict[int, str])
        except InvalidRequestError as error:  # the engine has accepted none of this part
            refused |= {group.group_id: str(error) for group in part}
    return refused


def _in_parts(groups: list[Unfinished]) -> Iterable[list[Unfinished]]:
    """Split groups into calls of a bounded size. A larger group has its own call."""
    part: list[Unfinished] = []
    num_bytes = 0
    for group in groups:
        size = len(msgspec.msgpack.encode(group))
        if part and num_bytes + size > _BYTES_PER_CALL:
            yield part
            part, num_bytes = [], 0
        part.append(group)
        num_bytes += size
    yield part


def _wanted(record: GroupRecord) -> str:
    pin = record.pin
    return f"version {record.version} or a newer one" if pin in (None, LIVE_VERSION) else f"version {pin}"
