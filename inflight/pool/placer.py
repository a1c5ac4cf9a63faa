"""Finds engines of a pool that go on with what others left unfinished."""

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from inflight.core.errors import EngineDiedError, InflightError
from inflight.core.messages import LIVE_VERSION, Status
from inflight.core.waiting import Wait
from inflight.engine.client import EngineClient
from inflight.pool.dispatcher import ENDED, Dispatcher
from inflight.pool.frames import EngineFrames
from inflight.pool.member import Group, Member
from inflight.supervisor import adopt

logger = logging.getLogger("inflight.pool")

_AGAIN_S = 0.05
_IDLE_S = 1.0
_ANSWER_S = 1.0
"""An engine that has not answered by then is given nothing for now."""
Answers = Mapping[Member, tuple[EngineFrames, Status]]


class Placer:
    """A thread that hands groups without an engine to those that have the weights to go on with them.

    A group whose tokens were drawn with some version goes on with that version or a newer one, and one that is pinned
    to a version at an engine that holds it. Where no engine gets such weights in time, it ends with finish_reason
    "error".
    """

    def __init__(self, dispatcher: Dispatcher, timeout_s: float):
        """timeout_s: how long engines that take prompts may lack the weights."""
        self._dispatcher, self._timeout_s = dispatcher, timeout_s
        self._lock = dispatcher.lock
        self._asked: dict[Member, tuple[EngineFrames, Future[Any]]] = {}
        """What engines have not answered yet."""
        self._thread = threading.Thread(target=self._run, name="inflight-pool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Place nothing any more. The dispatcher is closing."""
        with self._lock:
            self._lock.notify_all()
        self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        dispatcher, waited = self._dispatcher, Wait()
        try:
            while not dispatcher.closing.wait(_AGAIN_S):
                with self._lock:
                    self._lock.wait_for(lambda: dispatcher.homeless or dispatcher.closing.is_set(), _IDLE_S)
                if dispatcher.homeless:
                    self._place(self._ask(), waited.tick())
        except InflightError as error:
            logger.info("unfinished groups go nowhere: %s", error)  # no engine is left, or the pool was closed
        except Exception as error:
            logger.exception("groups of engines that end would be lost from now on")
            dispatcher.gone = EngineDiedError(f"the pool failed to find other engines for groups: {error!r}")

    def _ask(self) -> Answers:
        """The state of the engines that answer soon."""
        dispatcher = self._dispatcher
        for member, frames in dispatcher.serving().items():
            if member not in self._asked:  # else it has not answered yet
                self._asked[member] = frames, dispatcher.later(dispatcher.reach, member, frames, _status)
        wait([answer for _, answer in self._asked.values()], timeout=_ANSWER_S)
        answered = [member for member, (_, answer) in self._asked.items() if answer.done()]
        answers = {member: self._asked.pop(member) for member in answered}
        told = {m: each for m, each in answers.items() if not isinstance(each[1].exception(), InflightError)}
        return {m: (f, status) for m, (f, answer) in told.items() if (status := answer.result()) is not ENDED}

    def _place(self, engines: Answers, passed_s: float) -> None:
        given: dict[Member, tuple[EngineFrames, list[Group]]] = {}
        refused: dict[int, str] = {}
        with self._lock:
            engines = {m: answer for m, answer in engines.items() if m.usable and m.frames is answer[0]}
            all_answered = len(engines) == len(self._dispatcher.usable)
            homeless, self._dispatcher.homeless = self._take_wanted(), []
            for group in homeless:
                group.waited_s += passed_s if engines else 0.0
                fit = [member for member, (_, status) in engines.items() if _can_go_on(group, status)]
                if fit:
                    member = min(fit, key=lambda member: member.load)
                    frames = group.at = engines[member][0]
                    member.num_given += group.num_unfinished
                    given.setdefault(member, (frames, []))[1].append(group)
                elif group.waited_s > self._timeout_s or (all_answered and _is_past(group, engines)):
                    refused[group.ids.group_id] = f"none has {_wanted(group)}"
                else:
                    self._dispatcher.homeless.append(group)
        for member, (frames, groups) in given.items():
            self._dispatcher.later(self._adopt, member, frames, groups)
        self._dispatcher.fail(refused)

    def _take_wanted(self) -> list[Group]:
        """The groups that somebody still wants; nothing is kept of the others."""
        dispatcher = self._dispatcher
        wanted = [group for group in dispatcher.homeless if group.ids.group_id in dispatcher.groups]
        unwanted = [group.ids.group_id for group in dispatcher.homeless if group.ids.group_id not in dispatcher.groups]
        dispatcher.ledger.unfinished_of("", unwanted)
        return wanted

    def _adopt(self, member: Member, frames: EngineFrames, groups: list[Group]) -> None:
        """Let an engine go on with groups. If it ends meanwhile, they are taken from it as all that it has."""
        dispatcher, unfinished = self._dispatcher, [group.unfinished for group in groups]
        try:
            refused = dispatcher.reach(member, frames, lambda client: adopt(client, unfinished, dispatcher.next))
        except InflightError as error:
            refused = {group.ids.group_id: str(error) for group in groups}
        if refused is ENDED:
            return
        dispatcher.fail(refused)
        with self._lock:
            if member.frames is frames:
                member.num_given -= sum(group.num_unfinished for group in groups if group.ids.group_id in refused)
            cancelled = [request_id for group in groups for request_id in group.cancelled]
        if cancelled:
            dispatcher.cancel_at(frames, (), cancelled)
        logger.warning("%d unfinished groups go on at the engine that is %s", len(groups) - len(refused), member.name)


def _status(client: EngineClient) -> Status:
    return client.call("status", returns=Status)


def _can_go_on(group: Group, status: Status) -> bool:
    pin = group.prompt.version
    return status.version >= group.version if pin in (None, LIVE_VERSION) else pin in status.versions


def _is_past(group: Group, engines: Answers) -> bool:
    """Whether the version to which a group is pinned will not come again."""
    pin = group.prompt.version
    return bool(engines) and pin not in (None, LIVE_VERSION) and all(s.version > pin for _, s in engines.values())


def _wanted(group: Group) -> str:
    pin = group.prompt.version
    return f"version {group.version} or a newer one" if pin in (None, LIVE_VERSION) else f"version {pin}"
