"""A trainer's connection to an engine process: requests and their answers, for any number of threads and tasks."""

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import (
    EngineDiedError,
    EngineHungError,
    InflightError,
    InvalidRequestError,
    ProtocolError,
    from_wire,
)
from inflight.core.messages import (
    Cancel,
    Done,
    Failed,
    Fork,
    FromEngine,
    GetStatus,
    Hello,
    Pause,
    Prompt,
    Resume,
    Shutdown,
    Sleep,
    StartTrace,
    Status,
    StopTrace,
    Submit,
    Submitted,
    ToEngine,
    TraceWritten,
    Wake,
    Welcome,
    decode_from_engine,
    encode,
)
from inflight.core.sampling import SamplingParams

logger = logging.getLogger("inflight.client")

ANSWER_TIMEOUT_S = 60.0
"""For an answer, by default. The engine answers between two forward passes."""
_LONG_TIMEOUT_S = 600.0
"""For what takes the engine long: recording graphs anew, writing what a profiler saw."""
_CHECK_S = 0.1
_LOG_EVERY_S = 15.0
Answer = TypeVar("Answer", Welcome, Submitted, Done, Status, TraceWritten)


class EngineClient:
    """Talks to the control socket of one engine. Safe to use from several threads at once.

    A thread of its own owns the socket; callers wait for a future. `check_engine` raises if the engine is known to be
    dead; it is called while waiting for an answer. Every call raises EngineHungError if the engine lives and does not
    answer within `answer_timeout_s` seconds, and EngineDiedError if it has ended.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        check_engine: Callable[[], None] = lambda: None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ):
        self.endpoint = endpoint
        self.answer_timeout_s = answer_timeout_s
        self._check_engine = check_engine
        self._lock = threading.Lock()
        self._ticket = 0
        self._asked: dict[int, Future[FromEngine]] = {}
        """By ticket."""
        self._outbox: deque[bytes] = deque()
        self._closing = False
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # the thread never waits in a send, however much a hung engine leaves unread
        self._socket.connect(endpoint)
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._thread = threading.Thread(target=self._run, name="inflight-control", daemon=True)
        self._thread.start()

    def hello(self, *, timeout_s: float) -> Welcome:
        """Wait until the engine has loaded its model. Raises the error that kept it from doing so."""
        return self._ask(Hello(ticket=self._next_ticket()), Welcome, timeout_s=timeout_s, words=_LOADING)

    def submit(self, prompts: Sequence[Prompt]) -> list[int]:
        """Queue prompts and return a group id for each. Raises InvalidRequestError; then none was accepted."""
        return self._ask(Submit(ticket=self._next_ticket(), prompts=list(prompts)), Submitted).group_ids

    async def asubmit(self, prompts: Sequence[Prompt], *, accepted: Callable[[list[int]], None]) -> list[int]:
        """As `submit`, for asyncio. A task that is cancelled before the answer has come cancels its prompts.

        accepted: called with the group ids, unless the task was cancelled."""
        message = Submit(ticket=self._next_ticket(), prompts=list(prompts))
        future, patience = self._post(message), self._patience(message)
        wrapped = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([wrapped], timeout=_CHECK_S))[0]:
                patience.check(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._cancel_accepted)
            raise
        group_ids = _expect(wrapped.result(), Submitted).group_ids
        accepted(group_ids)
        return group_ids

    def fork(self, request_id: int, *, at: int | None, params: SamplingParams, metadata: Mapping[str, Any]) -> int:
        """Start a group whose prompt is that of an unfinished request and the first `at` tokens that it drew (None:
        all). Returns its group id. Raises InvalidRequestError."""
        fork = Fork(ticket=self._next_ticket(), request_id=request_id, at=at, params=params, metadata=dict(metadata))
        return self._ask(fork, Submitted).group_ids[0]

    def cancel(self, group_ids: Sequence[int], request_ids: Sequence[int] = ()) -> None:
        """End the unfinished requests of these groups, and these requests; they arrive with finish_reason
        "cancelled"."""
        message = Cancel(ticket=self._next_ticket(), group_ids=list(group_ids), request_ids=list(request_ids))
        self._ask(message, Done)

    def cancel_soon(self, group_ids: Sequence[int]) -> None:
        """As `cancel`, without waiting for the answer: for somebody who is on the way out."""
        self._post(Cancel(ticket=self._next_ticket(), group_ids=list(group_ids)))

    def pause(self) -> None:
        """No forward pass begins after this returns, until `resume()`."""
        self._ask(Pause(ticket=self._next_ticket()), Done)

    def resume(self) -> None:
        """Forward passes begin again."""
        self._ask(Resume(ticket=self._next_ticket()), Done)

    def sleep(self) -> None:
        """No forward pass until `wake()`; the memory of the KV cache is given back."""
        self._ask(Sleep(ticket=self._next_ticket()), Done)

    def wake(self) -> None:
        """Raises DeviceMemoryError if the memory is not there any more."""
        self._ask(Wake(ticket=self._next_ticket()), Done, timeout_s=max(self.answer_timeout_s, _LONG_TIMEOUT_S))

    def status(self, *, timeout_s: float | None = None) -> Status:
        """What the engine counts."""
        return self._ask(GetStatus(ticket=self._next_ticket()), Status, timeout_s=timeout_s)

    def start_trace(self, *, details: bool) -> None:
        """Returns when the engine's process is being recorded. Raises InflightError if it was already."""
        self._ask(StartTrace(ticket=self._next_ticket(), details=details), Done)

    def stop_trace(self) -> Path:
        """Where the engine wrote what it recorded. Raises InflightError if it recorded nothing."""
        message = StopTrace(ticket=self._next_ticket())
        return Path(self._ask(message, TraceWritten, timeout_s=max(self.answer_timeout_s, _LONG_TIMEOUT_S)).path)

    def shutdown(self, *, timeout_s: float) -> None:
        """Ask the engine to end. Raises EngineHungError if it does not answer in time."""
        self._ask(Shutdown(ticket=self._next_ticket()), Done, timeout_s=timeout_s)

    def close(self) -> None:
        """Let the socket go; whoever still waits for an answer gets an InflightError. Safe to call twice."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join()
            os.close(self._waking)

    def _next_ticket(self) -> int:
        with self._lock:
            self._ticket += 1
            return self._ticket

    def _ask(
        self,
        message: ToEngine,
        expected: type[Answer],
        *,
        timeout_s: float | None = None,
        words: "_Words | None" = None,
    ) -> Answer:
        future, patience = self._post(message), self._patience(message, timeout_s, words)
        while not wait([future], timeout=_CHECK_S).done:
            patience.check(future)
        return _expect(future.result(), expected)

    def _cancel_accepted(self, submitted: "Future[FromEngine]") -> None:
        if submitted.exception() is None and isinstance(answer := submitted.result(), Submitted):
            with contextlib.suppress(InflightError):  # the connection is closed, and the engine ends
                self.cancel_soon(answer.group_ids)

    def _patience(
        self, message: ToEngine, timeout_s: float | None = None, words: "_Words | None" = None
    ) -> "_Patience":
        bound_s = self.answer_timeout_s if timeout_s is None else timeout_s
        return _Patience(words or _answering(message), bound_s, self._check_engine)

    def _post(self, message: ToEngine) -> "Future[FromEngine]":
        """Hand a message to the thread; the future is its answer."""
        try:
            data = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"a prompt or its metadata cannot be sent: {error}") from error
        future: Future[FromEngine] = Future()
        future.set_running_or_notify_cancel()  # a task that is cancelled leaves it alone
        with self._lock:
            if self._closing:
                raise InflightError("the connection to the engine is closed")
            self._asked[message.ticket] = future
            self._outbox.append(data)
        self._wake()
        return future

    def _wake(self) -> None:
        try:
            os.write(self._waking, b"1")
        except (BlockingIOError, BrokenPipeError):  # full: the thread is awake; broken: it has ended, and says so
            return

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll())
                if self._woken in ready:
                    os.read(self._woken, 4096)
                while self._outbox:
                    self._socket.send(self._outbox.popleft())
                if self._socket in ready:
                    self._receive()
        except Exception as error:  # told to everybody who waits
            logger.exception("the connection to the engine at %s failed", self.endpoint)
            self._settle(0, InflightError(f"the connection to the engine failed: {error!r}"))
        finally:
            with self._lock:
                self._closing = True
            self._settle(0, InflightError("the connection to the engine was closed before it answered"))
            self._socket.close()
            os.close(self._woken)

    def _receive(self) -> None:
        try:
            answer = decode_from_engine(self._socket.recv())
        except ProtocolError as error:  # nobody knows whose answer it was
            self._settle(0, error)
            return
        if isinstance(answer, Failed):
            self._settle(answer.ticket, from_wire(answer.kind, answer.message))
        else:
            self._settle(answer.ticket, answer)

    def _settle(self, ticket: int, answer: "FromEngine | Exception") -> None:
        """An answer for the one who asked; an error with ticket 0 is everybody's."""
        with self._lock:
            tickets = [ticket] if ticket else list(self._asked)
            futures = [self._asked.pop(each) for each in tickets if each in self._asked]
        for future in futures:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


@dataclass(frozen=True, slots=True)
class _Words:
    """How a wait is told."""

    waiting: str
    failed: str
    reason: str


_LOADING = _Words(
    "waiting for the engine to load its model",
    "the engine lives and has not loaded its model",
    "launch with timeout_s for another bound",
)


def _answering(message: ToEngine) -> _Words:
    what = type(message).__name__
    return _Words(
        f"waiting for the engine to answer {what}",
        f"the engine lives and did not answer {what}",
        "it is stopped, starved of CPU time, or in a forward pass that takes longer (launch with answer_timeout_s for "
        "another bound)",
    )


class _Patience:
    """How long a caller waits for an answer, and what it says meanwhile."""

    def __init__(self, words: _Words, bound_s: float, check_engine: Callable[[], None]):
        self._words, self._bound_s, self._check_engine = words, bound_s, check_engine
        self._began_ns = now_ns()
        self._log_at_s = _LOG_EVERY_S
        self._dead: EngineDiedError | None = None

    def check(self, future: "Future[FromEngine]") -> None:
        """Raises EngineDiedError or EngineHungError if it makes no sense to wait on."""
        if self._dead is not None and not future.done():  # else it said why before it ended
            raise self._dead
        try:
            self._check_engine()
        except EngineDiedError as error:
            self._dead = error
            return
        waited_s = (now_ns() - self._began_ns) / 1e9
        if waited_s > self._bound_s:
            raise EngineHungError(f"{self._words.failed} within {self._bound_s:g} s: {self._words.reason}")
        if waited_s > self._log_at_s:
            self._log_at_s += _LOG_EVERY_S
            logger.warning("%s for %.0f s", self._words.waiting, waited_s)


def _expect(answer: FromEngine, expected: type[Answer]) -> Answer:
    if not isinstance(answer, expected):
        raise ProtocolError(f"expected {expected.__name__} from the engine, got {type(answer).__name__}")
    return answer
