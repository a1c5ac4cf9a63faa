"""Calls to all engines of a fleet."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import sleep
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, EngineHungError, InflightError
from inflight.core.messages import Digests, Status
from inflight.engine.process.client import EngineClient
from inflight.fleet.fleet import UNDO, Fleet
from inflight.fleet.frames import EngineFrames
from inflight.fleet.member import Member

_MOST_CALLS = 64
_ASK_AGAIN_S = 0.02
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
_NOTHING: type[Any] = type(None)
ENDED = object()
"""The answer of an engine that has ended, or that hangs and is treated as ended."""
Value = TypeVar("Value")


class FleetCalls:
    """Calls engines. An engine that does not answer in time is treated as ended if another engine, or a successor, can
    continue its groups; otherwise the call raises EngineHungError."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="inflight-fleet-call")
        """Threads for calls that wait for nothing but the answer of an engine."""

    def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
        returns: type[Value] = _NOTHING,
        *,
        timeout_s: float | None = None,
    ) -> Value:
        """Call a verb of every engine that takes prompts. Returns the answer of one of them, and raises the error of
        one. `pause` and `sleep` also apply to engines that join later."""
        with self._fleet.lock:
            before = self._fleet.held_back
            self._fleet.held_back = frozenset(
                held for held, undo in UNDO.items() if verb == held or (held in before and verb != undo)
            )
        try:
            answers = self.call_all(lambda client: client.call(verb, arguments, returns, timeout_s=timeout_s))
        except BaseException:
            self._fleet.held_back = before  # An engine has refused, so that a successor must not follow.
            raise
        return next(iter(answers.values()))

    def call_all(self, call: Callable[[EngineClient], Value]) -> dict[Member, Value]:
        """Call every engine that takes prompts. Returns the answers of engines that have not ended during the call, at
        least one; raises the error of one, as soon as all have answered."""
        while True:
            (first, frames), *others = self._fleet.ready().items()
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
            if not self._fleet.lose_if_spared(member, frames, error):
                raise
        except EngineDiedError as error:
            self._fleet.lose(member, frames, error)
        except InflightError:
            if not frames.given_up:  # Otherwise its connection was closed during the call.
                raise
        return ENDED

    def statuses(self) -> dict[Member, Status]:
        return self.call_all(client_status)

    def digests(self, least: int, timeout_s: float) -> Digests:
        """Do what `Engine.digests` does. least: the oldest version that counts."""
        deadline_ns = now_ns() + int(timeout_s * 1e9)

        def ask(client: EngineClient) -> list[Digests]:
            return client.call("digests", {"least": least}, list[Digests])

        while not all((answers := self.call_all(ask)).values()):
            if now_ns() > deadline_ns:
                raise TimeoutError(f"the digests of version {least} were not computed within {timeout_s:.0f} s")
            sleep(_ASK_AGAIN_S)
        found: dict[int, Digests] = {}
        for [each] in answers.values():
            if found.setdefault(each.version, each) != each:
                raise InflightError(f"the engines hold different tensors under version {each.version}")
        return found[max(found)]

    def later(self, function: Callable[..., Value], *arguments: Any) -> "Future[Value]":
        """Call in another thread a function that waits for an engine. Raises InflightError if the fleet was closed."""
        try:
            return self._threads.submit(function, *arguments)
        except RuntimeError as error:
            raise InflightError("the engine was closed") from error

    def close(self) -> None:
        """Accept no further calls. Queued calls fail at once, as the engines are closed."""
        self._threads.shutdown(wait=False)


def client_status(client: EngineClient) -> Status:
    return client.call("status", returns=Status)


def summed(parts: Sequence[Status]) -> Status:
    """Return the counters of several engines as one: sums of counts, the oldest version, and the versions of all."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in msgspec.structs.fields(Status) if field.type is int]
    counts = {name: sum(getattr(part, name) for part in parts) for name in names}
    counts["version"] = min(part.version for part in parts)
    seconds: Counter[str] = Counter()
    for part in parts:
        seconds.update(part.seconds_by_state)
    return Status(
        **counts,
        paused=all(part.paused for part in parts),
        asleep=all(part.asleep for part in parts),
        versions=sorted({version for part in parts for version in part.versions}),
        seconds_by_state=dict(seconds),
    )
