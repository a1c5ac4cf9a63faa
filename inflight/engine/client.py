"""A trainer's connection to an engine process: requests and their answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, InvalidRequestError, ProtocolError, from_wire
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

_POLL_MS = 100
Answer = TypeVar("Answer", Welcome, Submitted, Done, Status, TraceWritten)


class EngineClient:
    """Talks to the control socket of one engine. Not for use from several threads at once.

    `check_engine` raises if the engine is known to be dead; it is called while waiting for an answer.
    """

    def __init__(self, endpoint: str, *, check_engine: Callable[[], None] = lambda: None):
        self.endpoint = endpoint
        self._check_engine = check_engine
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._ticket = 0

    def hello(self, *, timeout_s: float) -> Welcome:
        """Wait until the engine has loaded its model. Raises the error that kept it from doing so."""
        return self._ask(Hello(ticket=self._next_ticket()), Welcome, timeout_s=timeout_s)

    def submit(self, prompts: Sequence[Prompt]) -> list[int]:
        """Queue prompts and return a group id for each. Raises InvalidRequestError; then none was accepted."""
        return self._ask(Submit(ticket=self._next_ticket(), prompts=list(prompts)), Submitted).group_ids

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

    def pause(self) -> None:
        """No forward pass begins after this returns, until `resume()`."""
        self._ask(Pause(ticket=self._next_ticket()), Done)

    def resume(self) -> None:
        self._ask(Resume(ticket=self._next_ticket()), Done)

    def sleep(self) -> None:
        """No forward pass until `wake()`; the memory of the KV cache is given back."""
        self._ask(Sleep(ticket=self._next_ticket()), Done)

    def wake(self) -> None:
        """Raises DeviceMemoryError if the memory is not there any more."""
        self._ask(Wake(ticket=self._next_ticket()), Done)

    def status(self) -> Status:
        return self._ask(GetStatus(ticket=self._next_ticket()), Status)

    def start_trace(self, *, details: bool) -> None:
        """Returns when the engine's process is being recorded. Raises InflightError if it was already."""
        self._ask(StartTrace(ticket=self._next_ticket(), details=details), Done)

    def stop_trace(self) -> Path:
        """Where the engine wrote what it recorded. Raises InflightError if it recorded nothing."""
        return Path(self._ask(StopTrace(ticket=self._next_ticket()), TraceWritten).path)

    def shutdown(self, *, timeout_s: float) -> None:
        self._ask(Shutdown(ticket=self._next_ticket()), Done, timeout_s=timeout_s)

    def close(self) -> None:
        self._socket.close()

    def _next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def _ask(self, message: ToEngine, expected: type[Answer], *, timeout_s: float | None = None) -> Answer:
        """Without a timeout, wait as long as the engine lives: it answers between two forward passes."""
        try:
            data = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"a prompt or its metadata cannot be sent: {error}") from error
        self._socket.send(data)
        deadline = None if timeout_s is None else now_ns() + int(timeout_s * 1e9)
        while deadline is None or now_ns() < deadline:
            if not self._socket.poll(_POLL_MS):
                try:
                    self._check_engine()
                except EngineDiedError:
                    if not self._socket.poll(0):  # else it said why before it ended
                        raise
                continue
            answer = decode_from_engine(self._socket.recv())
            if isinstance(answer, Failed) and answer.ticket in (0, message.ticket):
                raise from_wire(answer.kind, answer.message)
            if answer.ticket == message.ticket:
                return _expect(answer, expected)
        raise TimeoutError(f"the engine did not answer {type(message).__name__} within {timeout_s:.0f} s")


def _expect(answer: FromEngine, expected: type[Answer]) -> Answer:
    if not isinstance(answer, expected):
        raise ProtocolError(f"expected {expected.__name__} from the engine, got {type(answer).__name__}")
    return answer
