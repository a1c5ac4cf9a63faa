"""A trainer's connection to an engine process: calls of its verbs, from any number of threads and tasks."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from inflight.core.connection import Answer, Connection
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import EngineDiedError, EngineHungError, InflightError
from inflight.core.keys import ClientKeys
from inflight.core.messages import Call, FromEngine, Hello, Result, Welcome, expect, read, to_raw
from inflight.core.waiting import Wait

logger = logging.getLogger("inflight.client")

_CHECK_S = 0.1
_WHY_SILENT = (
    "it is stopped, starved of CPU time, or in a forward pass that takes longer (answer_timeout_s sets this bound)"
)
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
_NONE: type[Any] = type(None)
Value = TypeVar("Value")


class EngineClient:
    """Calls the verbs of one engine over its control socket. Safe to use from several threads at once.

    A dedicated thread owns the socket, and callers wait for a future. While waiting for an answer, the client calls
    `check_engine`. That function raises EngineDiedError if the engine is known to be dead. Every call raises
    EngineHungError if the engine lives and does not answer within `answer_timeout_s` seconds, EngineDiedError if it has
    ended, and the exceptions of the engine. Time does not count while a call with a larger bound is in progress: the
    engine answers others after it.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        check_engine: Callable[[], None] = lambda: None,
        answer_timeout_s: float = 60.0,
        keys: ClientKeys | None = None,
    ):
        self.endpoint, self.keys = endpoint, keys
        self.answer_timeout_s = answer_timeout_s
        self._check_engine = check_engine
        self._why_silent = _WHY_SILENT if keys is None else f"it has ended, cannot be reached, or {_WHY_SILENT}"
        self._closing = False
        self._long_calls: set[Answer] = set()
        """Calls in progress with a bound above `answer_timeout_s`."""
        self._connection = Connection(endpoint, self._take_unasked, keys=keys)
        self._thread = threading.Thread(target=self._run, name="inflight-control", daemon=True)
        self._thread.start()

    def hello(self, *, timeout_s: float) -> Welcome:
        """Wait until the engine has loaded its model. Raises the error that prevented this."""
        answer = self._connection.send(Hello(ticket=self._connection.ticket()))
        answered = self._wait_for(
            answer, "has not loaded its model", timeout_s, "launch with timeout_s for another bound"
        )
        return expect(answered, Welcome)

    def call(
        self,
        verb: str,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
        returns: type[Value] = _NONE,
        *,
        timeout_s: float | None = None,
    ) -> Value:
        """Call a verb of the engine and return its value, of type `returns`. timeout_s: a bound for this call; None:
        `answer_timeout_s`. Raises the exceptions of the engine, InvalidRequestError for arguments that cannot be sent,
        and ProtocolError for an unknown verb or arguments that do not fit it."""
        return self.start_call(verb, arguments, returns, timeout_s=timeout_s)()

    def start_call(
        self,
        verb: str,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
        returns: type[Value] = _NONE,
        *,
        timeout_s: float | None = None,
    ) -> Callable[[], Value]:
        """Send a call at once, and return a function that waits for its value. Both raise the same as `call`."""
        answer = self.call_soon(verb, arguments)

        def value() -> Value:
            if timeout_s is not None and timeout_s > self.answer_timeout_s:
                self._long_calls.add(answer)
            try:
                result = self._wait_for(answer, f"did not answer {verb}", timeout_s, self._why_silent)
            finally:
                self._long_calls.discard(answer)
            return read(msgpack_decoder(returns), expect(result, Result).value)

        return value

    def call_soon(self, verb: str, arguments: Mapping[str, Any]) -> Answer:
        """Call a verb without waiting for the answer."""
        raw = to_raw(dict(arguments), f"what {verb} is called with")
        return self._connection.send(Call(ticket=self._connection.ticket(), verb=verb, arguments=raw))

    def close(self) -> None:
        """Close the socket. Pending calls get an InflightError. Safe to call twice."""
        self._closing = True
        self._connection.wake()
        self._thread.join()

    def _wait_for(self, answer: Answer, what: str, timeout_s: float | None, reason: str) -> FromEngine:
        """Wait for the answer and return it. Raises EngineDiedError, and EngineHungError after `timeout_s` seconds.

        what: completes "the engine …", as in "did not answer pause". timeout_s: None: `answer_timeout_s`, and time
        during longer calls does not count. reason: a possible reason for the silence.
        """
        wait, dead, silent_s = Wait(), None, 0.0
        bound_s = self.answer_timeout_s if timeout_s is None else timeout_s
        while True:
            concurrent.futures.wait([answer], timeout=_CHECK_S)
            if answer.done():
                return answer.result()
            if dead is not None:  # dead since the last check, and no answer gave the reason
                raise dead
            try:
                self._check_engine()
            except EngineDiedError as error:
                dead = error
                continue
            passed_s = wait.tick()
            if timeout_s is not None or not self._long_calls:
                silent_s += passed_s
            if silent_s > bound_s:
                known = "the engine lives and" if self.keys is None else f"the engine at {self.endpoint}"
                raise EngineHungError(f"{known} {what} within {bound_s:g} s: {reason}")
            wait.tell(f"the engine {what}")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._connection.pump()
        except Exception as error:  # all pending calls get this error
            logger.exception("the connection to the engine at %s failed", self.endpoint)
            self._connection.fail_all(InflightError(f"the connection to the engine failed: {error!r}"))
        finally:
            self._connection.close()

    def _take_unasked(self, message: FromEngine | InflightError) -> None:
        if isinstance(message, InflightError):  # an error that belongs to no particular call
            self._connection.fail_all(message)
