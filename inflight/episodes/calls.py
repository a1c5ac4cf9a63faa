"""Calls of tools and environments in an episode. They are logged: after a restart of the trainer the rollout function
gets the saved results."""

import asyncio
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from time import perf_counter
from typing import Any, Literal, NoReturn

import msgspec

from inflight.core.workers import is_async, name_of, without_exit
from inflight.episodes.limits import Limits
from inflight.episodes.stored_values import decode, encode, encode_error
from inflight.episodes.turns import Turns
from inflight.stream.held_groups import SavedCall

logger = logging.getLogger(__name__)

OnRestart = Literal["replay", "load", "drop"]
"""Treatment of an environment whose episode continues after a restart of the trainer, its attribute `on_restart`.
"replay": all of its methods are called again. "load": saved results are returned, and before the first further call a
new environment gets the last state. "drop": saved results are returned, and the first further call ends the episode."""
_FUNCTION = "the call function"
DROPPED = "dropped after a restart"
"""The reason of the end of an episode whose environment cannot continue."""
_NOT_STORED = "calls not stored"


def on_restart_of(env: Any) -> OnRestart:
    """Return the declaration of an environment. Without one it is "load" for an environment with the methods `save()`
    and `load(state)`, and otherwise "replay". Raises ValueError for another declaration, and for "load" without these
    methods."""
    # Wrappers of Gymnasium hide attributes of the environment.
    declared = getattr(env, "on_restart", getattr(getattr(env, "unwrapped", None), "on_restart", None))
    # Methods of a wrapped environment alone would omit the state of its wrapper.
    can_load = _takes(type(env), "save", 1) and _takes(type(env), "load", 2)
    if not isinstance(declared, str):
        return "load" if can_load else "replay"
    if declared not in ("replay", "load", "drop") or (declared == "load" and not can_load):
        raise ValueError(
            f'on_restart of {type(env).__name__} is {declared!r}; it must be "replay", "drop", or, with the methods '
            'save() and load(state), "load"'
        )
    return declared


@lru_cache(1 << 10)
def _takes(kind: type, name: str, count: int) -> bool:
    """Return True if a class has a method that takes this number of arguments, `self` included."""
    try:
        inspect.signature(getattr(kind, name)).bind(*range(count))
    except (AttributeError, TypeError, ValueError):
        return False
    return True


@dataclass(slots=True, eq=False)
class _Sequence:
    """Calls of one environment, or of all functions without a state."""

    number: int
    """0 for functions without a state; otherwise the number of the environment, in the order of first calls."""
    env: Any = None
    on_restart: OnRestart = "load"
    num_requests: int = 0
    last: SavedCall | None = None
    """The last call whose result was returned."""
    is_live: bool = False
    """True if the environment itself was called."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Calls:
    """The calls of one attempt of an episode. Requests are compared with the saved calls in their order.

    A request that differs deletes the saved calls from there on. A function without a saved result is called. An
    environment that was called once gets all of its further calls.
    """

    def __init__(
        self,
        turns: Turns,
        limits: Limits,
        group_id: int,
        sample: int,
        seconds: defaultdict[str, float],
        end: Callable[[str], NoReturn],
    ):
        """seconds: as `Session.seconds`. end: ends the episode by a reason."""
        self._turns, self._limits, self._seconds, self._end = turns, limits, seconds, end
        self._episodes, self._group_id, self._sample, self._counts = turns.episodes, group_id, sample, turns.counts
        self._saved = {(call.env, call.number): call for call in self._episodes.calls(group_id, sample)}
        """Saved calls that were not requested yet."""
        self._called = {call.env for call in self._saved.values()}
        """Environments that were called before the restart."""
        self._sequences = [_Sequence(0)]

    async def call(
        self, timeout_s: float, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """Return the saved result of a call, or raise its saved exception; otherwise make the call and note its result.
        Raises TimeoutError and the exceptions of the function."""
        make = partial(self._make, timeout_s)
        calls, digest = self._find(function, arguments, keywords)
        if calls is None:
            return await make(function, *arguments, **keywords)
        request = SavedCall(self._sample, calls.number, calls.num_requests, digest)
        calls.num_requests += 1
        found, result = self._take(calls, request)
        if found:
            self._counts["calls made before"] += 1
            if isinstance(result, Exception):
                raise result
            return result
        if calls.env is not None:
            await self._prepare(calls, make)
            self._episodes.note_call(self._group_id, request)  # without a result: a call that has begun
        try:
            result = await make(function, *arguments, **keywords)
        except Exception as error:
            if calls.env is None:
                self._note(calls, request, partial(encode_error, error))
            raise
        state = None
        if calls.on_restart == "load" and calls.env is not None:
            try:
                state = encode(await make(calls.env.save))
            except Exception as error:
                if not self._counts[_NOT_STORED]:
                    logger.warning("a state cannot be saved: %s: %s", type(error).__name__, error)
                self._counts[_NOT_STORED] += 1
                return result
        self._note(calls, msgspec.structs.replace(request, state=state), partial(encode, result))
        return result

    def start(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> "asyncio.Future[Any]":
        """Call a function as a task, or in a thread if it is not async. An awaitable result is awaited."""
        call = partial(function, *arguments, **keywords)
        return asyncio.ensure_future(
            self._in_thread(call) if not is_async(function) else without_exit(call(), _FUNCTION)
        )

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        result = await asyncio.wrap_future(self._turns.workers.start(call))
        return await without_exit(result, _FUNCTION) if inspect.isawaitable(result) else result

    async def _make(self, timeout_s: float, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call a function within a time, in s, and within its rate limit."""
        rates, limited = self._limits.rates, function
        while rates and isinstance(limited, partial) and limited not in rates:
            limited = limited.func
        rate = rates.get(limited) if rates and isinstance(limited, Hashable) else None
        if rate is not None:
            began = perf_counter()
            try:
                await rate.take(timeout_s)
            finally:
                self._seconds["waits"] += perf_counter() - began
        began, call = perf_counter(), None
        self._turns.num_calling += 1
        try:
            call = self.start(function, *arguments, **keywords)
            # A call that ignores its cancellation is left behind.
            await asyncio.wait([call], timeout=timeout_s)
            if not call.done():
                self._counts["calls that timed out"] += 1
                raise TimeoutError(f"{name_of(function)} did not return within {timeout_s:g} s")
            return call.result()
        finally:
            if call is not None:
                call.cancel()
            if rate is not None:
                rate.give_back()
            self._turns.num_calling -= 1
            self._seconds["calls"] += perf_counter() - began

    def _find(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[_Sequence | None, bytes]:
        """Return the calls that a call belongs to (None: it is not logged), and its digest (b"": it has none)."""
        while isinstance(function, partial):
            arguments, keywords = [*function.args, *arguments], {**function.keywords, **keywords}
            function = function.func
        env, name = _env_of(function), getattr(function, "__qualname__", "")
        if env is None:
            on_restart = getattr(function, "on_restart", "replay" if "<" in name else "load")
            if on_restart not in ("replay", "load"):
                raise ValueError(f'on_restart of the function {name} must be "replay" or "load", got {on_restart!r}')
        else:
            on_restart = on_restart_of(env)
        if on_restart == "replay":
            return None, b""
        try:
            described = encode([getattr(function, "__module__", None), name, list(arguments), dict(keywords)])
            digest = blake2b(described, digest_size=16).digest()
        except TypeError:
            if env is None:
                return None, b""
            digest = b""
        calls = next((calls for calls in self._sequences if calls.env is env), None)
        if calls is None:
            calls = _Sequence(len(self._sequences), env, on_restart)
            self._sequences.append(calls)
        return calls, digest

    def _take(self, calls: _Sequence, request: SavedCall) -> tuple[bool, Any]:
        """Return True and the saved result of a request, or False if the call has to be made."""
        saved = self._saved.pop((request.env, request.number), None)
        if saved is not None and saved.digest != request.digest:
            self._forget([saved, *self._saved.values()])
        elif saved is not None and saved.result is not None:
            try:
                result = decode(saved.result)
            except (AttributeError, KeyError):
                logger.info("the class of a saved exception was not imported; its function is called again")
            else:
                calls.last = saved
                return True, result
        if calls.env is not None:
            self._forget([call for call in self._saved.values() if call.env == calls.number])
        return False, None

    async def _prepare(self, calls: _Sequence, make: Callable[..., Any]) -> None:
        """Give a new environment the last state before its first call. Ends the episode if that is impossible."""
        async with calls.loading:
            if calls.is_live:
                return
            if calls.number in self._called:
                last = calls.last
                if calls.on_restart == "drop" or (last is not None and last.state is None):
                    self._end(DROPPED)
                if last is not None and last.state is not None:
                    await make(calls.env.load, decode(last.state))
            calls.is_live = True

    def _note(self, calls: _Sequence, made: SavedCall, encoded: Callable[[], bytes]) -> None:
        """Note the result of a call, if it can be stored."""
        if not made.digest:
            return
        try:
            made = msgspec.structs.replace(made, result=encoded())
        except TypeError:
            self._counts[_NOT_STORED] += 1
            return
        self._episodes.note_call(self._group_id, made)
        before, calls.last = calls.last, made
        if before is not None and before.state is not None and before.number == made.number - 1:
            self._episodes.note_call(self._group_id, msgspec.structs.replace(before, state=None))

    def _forget(self, calls: Sequence[SavedCall]) -> None:
        """Delete saved calls that were not requested."""
        for call in calls:
            self._saved.pop((call.env, call.number), None)
        self._episodes.forget_calls(self._group_id, calls)


def _env_of(function: Callable[..., Any]) -> Any:
    """Return the object whose method a function is; None for a function without an object."""
    if not inspect.ismethod(function):
        function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        return function  # an object that is called
    owner = getattr(function, "__self__", None)
    return None if inspect.ismodule(owner) or inspect.isclass(owner) else owner
