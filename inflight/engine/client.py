"""A trainer's connection to an engine process: calls of its verbs, from any number of threads and tasks."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from inflight.core.connection import Answer, Connection
from inflight.core.errors import EngineDiedError, EngineHungError, InflightError, ProtocolError
from inflight.core.messages import Call, FromEngine, Hello, Result, Welcome, read, to_raw
from inflight.core.waiting import Wait

logger = logging.getLogger("inflight.client")

_CHECK_S = 0.1
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
_NONE: type[Any] = type(None)
Value = TypeVar("Value")


class EngineClient:
    """Calls the verbs of one engine over its control socket. Safe to use from several threads at once.

    A thread of its own owns the socket; callers wait for a future. `check_engine` raises EngineDiedError if the engine
    is known to be dead; it is called while waiting for an answer. Every call raises EngineHungError if the engine lives
    and does not answer within `answer_timeout_s` seconds, EngineDiedError if it has ended, and what the engine raises.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        check_engine: Callable[[], None] = lambda: None,
        answer_timeout_s: float = 60.0,
    ):
        self.endpoint = endpoint
        self.answer_timeout_s = answer_timeout_s
        self._check_engine = check_engine
        self._closing = False
        self._connection = Connection(endpoint, self._take_unasked)
        self._thread = threading.Thread(target=self._run, name="inflight-control", daemon=True)
        self._thread.start()

    def hello(self, *, timeout_s: float) -> Welcome:
        """Wait until the engine has loaded its model. Raises the error that kept it from doing so."""
        answer = self._connection.send(Hello(ticket=self._connection.ticket()))
        reason = "launch with timeout_s for another bound"
        welcome = self._wait_for(answer, _AnswerWait("has not loaded its model", timeout_s, reason, self._check_engine))
        if not isinstance(welcome, Welcome):
            raise _unexpected(welcome, "Welcome")
        return welcome

    def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
        returns: type[Value] = _NONE,
        *,
        timeout_s: float | None = None,
    ) -> Value:
        """Call a verb of the engine and return what it returns, which must be of type `returns`.

        timeout_s: a bound for this call; None: `answer_timeout_s`. Raises what the engine raises, InvalidRequestError
        for arguments that cannot be sent, and ProtocolError for an unknown verb or arguments that do not fit it.
        """
        return _value_of(self._wait_for(self._ask(verb, arguments), self._answer_wait(verb, timeout_s)), returns)

    async def acall(
        self, verb: str, arguments: Mapping[str, Any], returns: type[Value], *, undo: Callable[[Value], None]
    ) -> Value:
        """As `call`, for asyncio. If the task is cancelled before the answer has come, `undo` is called with it when it
        comes, by another thread."""
        answer, wait = self._ask(verb, arguments), self._answer_wait(verb)
        wrapped = asyncio.wrap_future(answer)
        try:
            while not (await asyncio.wait([wrapped], timeout=_CHECK_S))[0]:
                wait.check(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(lambda late: None if late.exception() else undo(_value_of(late.result(), returns)))
            raise
        return _value_of(wrapped.result(), returns)

    def call_soon(self, verb: str, arguments: Mapping[str, Any] = _NO_ARGUMENTS) -> None:
        """Call a verb without waiting for the answer: for somebody who is on the way out."""
        self._ask(verb, arguments)

    def close(self) -> None:
        """Let the socket go; whoever still waits for an answer gets an InflightError. Safe to call twice."""
        self._closing = True
        self._connection.wake()
        self._thread.join()

    def _ask(self, verb: str, arguments: Mapping[str, Any]) -> Answer:
        raw = to_raw(dict(arguments), f"what {verb} is called with")
        return self._connection.send(Call(ticket=self._connection.ticket(), verb=verb, arguments=raw))

    def _answer_wait(self, verb: str, timeout_s: float | None = None) -> "_AnswerWait":
        reason = (
            "it is stopped, starved of CPU time, or in a forward pass that takes longer (launch with answer_timeout_s "
            "for another bound)"
        )
        bound_s = self.answer_timeout_s if timeout_s is None else timeout_s
        return _AnswerWait(f"did not answer {verb}", bound_s, reason, self._check_engine)

    def _wait_for(self, answer: Answer, wait: "_AnswerWait") -> FromEngine:
        while not concurrent.futures.wait([answer], timeout=_CHECK_S).done:
            wait.check(answer)
        return answer.result()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._connection.pump()
        except Exception as error:  # told to everybody who waits
            logger.exception("the connection to the engine at %s failed", self.endpoint)
            self._connection.fail_all(InflightError(f"the connection to the engine failed: {error!r}"))
        finally:
            self._connection.close()

    def _take_unasked(self, message: FromEngine | InflightError) -> None:
        if isinstance(message, InflightError):  # nobody knows whose answer it is
            self._connection.fail_all(message)


class _AnswerWait:
    """How long a caller waits for an answer, and what it says meanwhile."""

    def __init__(self, what: str, bound_s: float, reason: str, check_engine: Callable[[], None]):
        """what: completes "the engine …", as in "did not answer pause". reason: what may be wrong."""
        self._what, self._bound_s, self._reason, self._check_engine = what, bound_s, reason, check_engine
        self._wait = Wait()
        self._dead: EngineDiedError | None = None

    def check(self, answer: Answer) -> None:
        """Raises EngineDiedError or EngineHungError if it makes no sense to wait on."""
        if self._dead is not None and not answer.done():  # else it said why before it ended
            raise self._dead
        try:
            self._check_engine()
        except EngineDiedError as error:
            self._dead = error
            return
        self._wait.tick()
        if self._wait.waited_s > self._bound_s:
            raise EngineHungError(f"the engine lives and {self._what} within {self._bound_s:g} s: {self._reason}")
        self._wait.tell(f"the engine {self._what}")


def _value_of(answer: FromEngine, returns: type[Value]) -> Value:
    if not isinstance(answer, Result):
        raise _unexpected(answer, "Result")
    return read(msgspec.msgpack.Decoder(returns), answer.value)


def _unexpected(answer: FromEngine, expected: str) -> ProtocolError:
    return ProtocolError(f"expected {expected} from the engine, got {type(answer).__name__}")
