"""Keeps an engine running: when its process ends, a successor takes the newest weights and what was unfinished."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import msgspec

from inflight.core.errors import EngineDiedError, EngineHungError, InflightError
from inflight.core.frames import GroupStart
from inflight.core.keys import ClientKeys
from inflight.core.messages import Ids, Prompt, Status, Unfinished, Welcome
from inflight.core.options import EngineOptions
from inflight.core.waiting import Wait
from inflight.engine.client import EngineClient
from inflight.engine.launcher import EngineLauncher
from inflight.stream.held_groups import HeldGroup
from inflight.stream.ledger import Ledger

if TYPE_CHECKING:
    from inflight.weights.publisher import Publisher

logger = logging.getLogger("inflight")

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 30.0
_TOKENS_PER_CALL = 1 << 20
MOST_NOTED = 1000
"""Groups that have ended and of which it may still be noted what was submitted."""
_CHECK_S = 0.1
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
NOTHING: type[Any] = type(None)
HELD_BACK_AFTER = {"pause": "pause", "sleep": "sleep", "resume": None, "wake": None}
"""Maps verbs to the one that holds an engine back after them."""
Value = TypeVar("Value")
Expect = Callable[[list[int]], None]
"""Is told the ids of groups that were accepted."""
Submitted = tuple[Prompt, tuple[int, int] | None]
"""A prompt, and the request and the number of its tokens that it is forked from."""


class Process(Protocol):
    """The process of an engine, on whichever machine: an EngineLauncher describes it."""

    client: EngineClient
    welcome: Welcome
    """What the engine said of itself, with endpoints as they are reached from here."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def check(self) -> None: ...
    def kill(self) -> None: ...
    def remove(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[[threading.Event], Process]
"""Starts a process and returns it when it serves, or gives up soon after the event is set, when nobody needs it any
more. Raises InflightError or OSError."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was submitted and not handed out, and what has come of it."""

    groups: list[HeldGroup]
    submitted: list[Submitted]
    """What was submitted for each."""
    next_group_id: int
    next_request_id: int
    """Those that come later have these ids, or larger ones."""

    @property
    def starts(self) -> dict[int, GroupStart]:
        """How the groups began of which something has come, by their ids."""
        return {
            group.group_id: GroupStart(
                group.group_id,
                group.rollouts[0].request_id - group.rollouts[0].sample,
                prompt.token_ids,
                prompt.params,
                prompt.metadata,
                origin,
            )
            for group, (prompt, origin) in zip(self.groups, self.submitted, strict=True)
            if group.rollouts
        }


class Supervisor:
    """The process of an engine, and its successors, of which its options allow so many (`restarts`).

    Calls are safe from several threads at once. While the engine is being replaced they wait, as long as that takes,
    and go to the successor; once there is none any more they raise the EngineDiedError that tells of all deaths.
    """

    def __init__(self, options: EngineOptions, start: Start | None = None):
        """start: where the process and its successors come from; None: they are launched here."""
        self._options = options
        self._start: Start = start or (lambda _: EngineLauncher(options))
        self._closing = threading.Event()
        self.launcher: Process = self._start(self._closing)
        """The process that lives, or the last one."""
        self._processes: dict[str, Process] = {self.launcher.client.endpoint: self.launcher}
        """Maps control sockets to processes, of all so far; each publisher knows one of them."""
        self._followers: WeakSet[Publisher] = WeakSet()
        """Publishers that are told of successors."""
        self._condition = threading.Condition()
        self._accepting: Process | None = self.launcher
        """The process whose answers count: what one accepted that has ended since must be submitted anew."""
        self._submitted: dict[int, Submitted] = {}
        """Maps ids of groups to what was submitted."""
        self._next_group_id = 0
        self._held_back: str | None = None
        """The verb, pause or sleep, that the user called last and has not undone."""
        self._deaths: list[str] = []
        self._fruitless = 0
        """Deaths in a row between which no token came."""
        self._tokens_at_death = 0
        self._gone: EngineDiedError | None = None

    @property
    def endpoints(self) -> frozenset[str]:
        """Control sockets of all processes so far."""
        return frozenset(self._processes)

    @property
    def restarts(self) -> bool:
        """Whether an engine that ends may have a successor."""
        return self._options.restarts > 0

    def check(self) -> None:
        """Raise EngineDiedError if the engine has ended and has no successor."""
        if not self.restarts:
            self.launcher.check()
        elif self._gone is not None:
            raise self._gone

    def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
        returns: type[Value] = NOTHING,
        *,
        timeout_s: float | None = None,
    ) -> Value:
        """Call a verb as `EngineClient.call` does."""
        _, value = self._reach(lambda client: client.call(verb, arguments, returns, timeout_s=timeout_s))
        if verb in HELD_BACK_AFTER:
            self._held_back = HELD_BACK_AFTER[verb]
        return value

    def submit(self, prompts: Sequence[Prompt], expect: Expect) -> list[int]:
        """Have prompts accepted, and tell `expect` the ids of their groups before an engine can end with them."""
        prompts = seeded(prompts)
        submitted = [(prompt, None) for prompt in prompts]
        return self._have_accepted(
            lambda client: client.call("submit", {"prompts": prompts}, list[int]), submitted, expect
        )

    async def asubmit(self, prompts: Sequence[Prompt], expect: Expect, undo: Expect) -> list[int]:
        """Do the same for asyncio. undo: is handed the ids if the task is cancelled meanwhile."""
        prompts = seeded(prompts)
        while True:
            launcher = self.launcher
            try:
                group_ids = await launcher.client.acall("submit", {"prompts": prompts}, list[int], undo=undo)
            except EngineDiedError as error:
                await asyncio.to_thread(self._wait_for_successor, launcher, error)
                continue
            if self._enter(launcher, group_ids, [(prompt, None) for prompt in prompts], expect):
                return group_ids

    def fork(self, arguments: Mapping[str, Any], prompt: Prompt, expect: Expect) -> int:
        """Have a fork accepted. prompt: what a successor draws it from."""
        [prompt] = seeded([prompt])
        arguments = {**arguments, "params": prompt.params}
        submitted = [(prompt, (arguments["request_id"], arguments["at"]))]
        [group_id] = self._have_accepted(lambda client: [client.call("fork", arguments, int)], submitted, expect)
        return group_id

    def cancel_soon(self, group_ids: Collection[int]) -> None:
        """End the unfinished samples of these groups, without waiting for the engine."""
        with suppress(InflightError):  # it is gone, and its requests with it
            self.launcher.client.call_soon("cancel", {"group_ids": list(group_ids)})

    def kill(self, endpoint: str) -> None:
        """End the process that answers at this endpoint, if it is the one that runs; it may have a successor."""
        launcher = self.launcher
        if launcher.client.endpoint == endpoint:
            launcher.kill()

    def check_process(self, endpoint: str) -> None:
        """Raise EngineDiedError if the process that answered at this endpoint has ended."""
        if endpoint in self._processes:
            self._processes[endpoint].check()

    def keys_of(self, endpoint: str) -> ClientKeys | None:
        """With which keys the process at this endpoint is reached, where it is reached over TCP."""
        return self._processes[endpoint].client.keys

    def living(self, endpoint: str = "") -> str:
        """Return the endpoint of the process that serves; while the engine is being restarted, wait for it. Raises
        EngineDiedError if there will be none. endpoint: an earlier one, which does not matter."""
        launcher = self.launcher
        try:
            launcher.check()
        except EngineDiedError as error:
            self._wait_for_successor(launcher, error)
        return self.launcher.client.endpoint

    def follow(self, publisher: "Publisher", endpoint: str) -> bool:
        """Tell a publisher of successors of the process at this endpoint. Returns False if it does not serve."""
        with self._condition:
            if self._accepting is None or self._accepting.client.endpoint != endpoint:
                return False
            self._followers.add(publisher)
            return True

    def is_followed_by(self, publisher: "Publisher") -> bool:
        """Whether a publisher is told of successors."""
        return publisher in self._followers

    def leave(self, publisher: "Publisher") -> None:
        """Do not tell a publisher of successors any more."""
        with self._condition:
            self._followers.discard(publisher)

    def close(self) -> None:
        """End the engine; it has no successor. Safe to call twice."""
        self.stop_restarting()
        self.launcher.close()

    def stop_restarting(self) -> None:
        """From now on an engine that ends has no successor."""
        with self._condition:
            self._closing.set()

    # ---- what outlives the trainer ------------------------------------------------------------------------------

    def snapshot(self, ledger: Ledger) -> Snapshot:
        """What is outstanding, all of one moment."""
        with self._condition:
            groups, next_request_id = ledger.snapshot()
            submitted = [self._submitted[group.group_id] for group in groups]
            return Snapshot(groups, submitted, self._next_group_id, next_request_id)

    def restore(self, snapshot: Snapshot, ledger: Ledger) -> None:
        """Go on with what was outstanding where another trainer ended; nothing was submitted here yet."""
        ids = [group.group_id for group in snapshot.groups]
        with self._condition:
            if self._next_group_id:
                raise InflightError("prompts were submitted already; load a run before that")
            self._submitted = dict(zip(ids, snapshot.submitted, strict=True))
            self._next_group_id = snapshot.next_group_id
            ledger.restore(snapshot.groups, snapshot.starts, snapshot.next_request_id)
        self._go_on(self.launcher.client, ledger)

    # ---- succession ---------------------------------------------------------------------------------------------

    def succeed(
        self, death: EngineDiedError, num_tokens: int, newest_version: int, ledger: Ledger | None = None
    ) -> str:
        """Replace the process that has ended: start another one after a while, have publishers send it their newest
        weights, and let it go on with what the ledger has not got yet (None: others go on with that). num_tokens: those
        that have come so far. newest_version: what its successor has to have at least. Returns the endpoint of its
        frames. Called by the thread that sees to the engine. Raises EngineDiedError if there may be no successor, or
        none starts."""
        old = self.launcher
        with self._condition:
            self._accepting = None
        old.remove()  # at once: if this process is killed meanwhile, nobody else would
        if num_tokens > self._tokens_at_death:
            self._fruitless = 0
        self._tokens_at_death = num_tokens
        while True:
            self._deaths.append(f"{len(self._deaths) + 1}. {death}")
            if self._closing.is_set() or len(self._deaths) > self._options.restarts:
                raise self._give_up(death)
            backoff_s = min(_FIRST_BACKOFF_S * 2**self._fruitless, _LONGEST_BACKOFF_S)
            self._fruitless += 1
            logger.warning(
                "the engine ended; restart %d of %d in %.1f s. %s",
                len(self._deaths), self._options.restarts, backoff_s, death,
            )  # fmt: skip
            if self._closing.wait(backoff_s):
                continue
            launcher = None
            try:
                following = [publisher for publisher in list(self._followers) if not publisher.closed]
                for publisher in following:
                    publisher.let_go(self._processes.keys())
                launcher = self._start(self._closing)
                self._hand_over(launcher, newest_version, ledger, following)
            except Exception as error:  # whatever it is, those who wait for a successor must learn of it
                if not isinstance(error, (InflightError, OSError)):
                    logger.exception("an engine could not be replaced")
                if launcher is not None:
                    launcher.close()
                death = EngineDiedError(f"a successor did not start: {type(error).__name__}: {error}")
                continue
            if not self._accept(launcher):
                launcher.close()
                continue
            old.close()
            logger.warning("the engine runs again, as %s", launcher.name)
            return launcher.welcome.stream_endpoint

    def _accept(self, new: Process) -> bool:
        """Let calls go to a process from now on. Returns False if nobody needs it any more."""
        with self._condition:
            if self._closing.is_set():
                return False
            self.launcher = self._accepting = new
            self._condition.notify_all()
            return True

    def _hand_over(
        self, new: Process, least_version: int, ledger: Ledger | None, publishers: Sequence["Publisher"]
    ) -> None:
        self._processes[new.client.endpoint] = new
        for publisher in publishers:
            publisher.replace(self._processes.keys(), new.client.endpoint)
        newest = max([publisher.sent_version for publisher in publishers], default=0)
        if newest < least_version:
            raise EngineDiedError(
                f"the engine had version {least_version}, which no open publisher holds any more; keep the "
                "publisher open as long as the engine may be restarted"
            )
        wait_for_version(new.client, newest, self._options.answer_timeout_s)
        if self._held_back is not None:
            new.client.call(self._held_back)
        num_groups = 0 if ledger is None else self._go_on(new.client, ledger)
        logger.warning("%d unfinished groups go on with version %d of the weights", num_groups, newest)

    def _go_on(self, client: EngineClient, ledger: Ledger) -> int:
        """Let an engine go on with all that is unfinished. Returns the number of groups."""
        groups, next_request_id = ledger.unfinished()
        with self._condition:
            wanted = {group_id: self._submitted[group_id] for group_id in groups}
            self.forget(ledger.outstanding)
        unfinished = [
            Unfinished(group_id, prompt, *(groups[group_id] or (None, {})), origin)
            for group_id, (prompt, origin) in wanted.items()
        ]
        refused = adopt(client, unfinished, Ids(self._next_group_id, next_request_id))
        for group_id, reason in refused.items():
            logger.error("the engine cannot go on with group %d, which another one began: %s", group_id, reason)
        ledger.fail(refused)
        return len(wanted) - len(refused)

    def _give_up(self, death: EngineDiedError) -> EngineDiedError:
        if self.restarts and not self._closing.is_set():
            allowed = self._options.restarts
            death = EngineDiedError(
                f"the engine ended {len(self._deaths)} times, and launch(restarts={allowed}) allows {allowed} restarts:"
                + "".join(f"\n{death}" for death in self._deaths)
            )
        with self._condition:
            self._gone = death
            self._condition.notify_all()
        return death

    def _wait_for_successor(self, launcher: Process, death: EngineDiedError) -> None:
        """Return when another process accepts calls. Raises EngineDiedError if none will."""
        wait = Wait()
        while True:
            with self._condition:
                if self._gone is not None or not self.restarts or self._closing.is_set():
                    raise self._gone or death
                if self._accepting not in (None, launcher):
                    return
                self._condition.wait(_CHECK_S)
            wait.tick()
            wait.tell("the engine is being restarted")

    def _reach(self, call: Callable[[EngineClient], Value]) -> tuple[Process, Value]:
        """Call the process that lives, or a successor if it has ended. Returns which one it was and its answer."""
        while True:
            launcher = self.launcher
            try:
                return launcher, call(launcher.client)
            except EngineDiedError as error:
                self._wait_for_successor(launcher, error)

    def _have_accepted(
        self, call: Callable[[EngineClient], list[int]], submitted: Sequence[Submitted], expect: Expect
    ) -> list[int]:
        while True:
            launcher, group_ids = self._reach(call)
            if self._enter(launcher, group_ids, submitted, expect):
                return group_ids

    def _enter(self, launcher: Process, group_ids: list[int], submitted: Sequence[Submitted], expect: Expect) -> bool:
        """Note what a process has accepted. Returns False if it has ended since: then it was not accepted."""
        with self._condition:
            if launcher is not self._accepting:
                return False
            self._submitted |= zip(group_ids, submitted, strict=True)
            self._next_group_id = max([self._next_group_id, *(i + 1 for i in group_ids)])
            expect(group_ids)
            return True

    def forget(self, outstanding: Sequence[int]) -> None:
        """Groups that are not outstanding need no successor. What is noted of them goes as soon as it is much."""
        with self._condition:
            if len(self._submitted) > 2 * len(outstanding) + MOST_NOTED:
                self._submitted = {i: self._submitted[i] for i in outstanding if i in self._submitted}


def seeded(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give each prompt a seed that has none: a group that goes on elsewhere needs the one that it began with."""
    return [
        prompt
        if prompt.params.seed is not None
        else msgspec.structs.replace(prompt, params=msgspec.structs.replace(prompt.params, seed=secrets.randbits(62)))
        for prompt in prompts
    ]


def adopt(client: EngineClient, groups: list[Unfinished], following: Ids) -> dict[int, str]:
    """Let an engine go on with groups that another one began. following: whatever is accepted later has larger ids, or
    these. Returns why it cannot go on with some, by their ids."""
    refused: dict[int, str] = {}
    for part in _in_parts(groups):
        arguments = {
            "groups": part, "next_group_id": following.group_id, "next_request_id": following.first_request_id
        }  # fmt: skip
        refused |= client.call("adopt", arguments, dict[int, str])
    return refused


def _in_parts(groups: list[Unfinished]) -> Iterable[list[Unfinished]]:
    """Groups for one call each, which is of a bounded size."""
    part: list[Unfinished] = []
    num_tokens = 0
    for group in groups:
        size = len(group.prompt.token_ids) + sum(map(len, group.drawn.values()))
        if part and num_tokens + size > _TOKENS_PER_CALL:
            yield part
            part, num_tokens = [], 0
        part.append(group)
        num_tokens += size
    yield part


def wait_for_version(client: EngineClient, version: int, timeout_s: float) -> None:
    """Return when the engine draws with this version or a newer one. Raises EngineHungError."""
    waited = Wait()
    while (found := client.call("status", returns=Status).version) < version:
        if waited.waited_s > timeout_s:
            raise EngineHungError(
                f"version {version} did not reach the engine, which has version {found}, within {timeout_s:g} s"
            )
        sleep(0.01)
        waited.tick()
