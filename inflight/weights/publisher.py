"""The trainer's side of the weights: `publish()` returns at once, a thread fills an idle slot and announces it.

The thread owns the socket. It waits for a slot, copies the parameters, and sends SlotReady. Until its copy is done the
parameters must not change; every `torch.optim` optimizer waits for that by itself (a global step hook), other code
that writes to the parameters calls `wait_copied()` first. When publishing outruns the engine, the latest version wins.
"""

import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import zmq
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, InflightError, ProtocolError, PublisherConflictError, from_wire
from inflight.core.layout import WeightLayout
from inflight.core.messages import (
    Attach,
    Attached,
    CudaIpcDescriptor,
    Detach,
    Failed,
    FromEngine,
    Hello,
    SlotDescriptor,
    SlotFree,
    SlotReady,
    SlotRequest,
    ToEngine,
    Welcome,
    decode_from_engine,
    encode,
)
from inflight.weights.cuda_ipc import CudaSlot
from inflight.weights.receiver import Slot
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views

_POLL_MS = 100
Answer = TypeVar("Answer", Welcome, Attached)


@dataclass(frozen=True, slots=True)
class Published:
    """One call of `publish()`."""

    version: int
    called_ns: int


class Publisher:
    """Publishes a model's parameters to one engine.

    The model's tensor names and shapes must be the engine's; its dtypes may differ (fp32 masters are cast into bf16
    slots). Raises LayoutMismatchError, naming what differs, or PublisherConflictError if another publisher lives.
    """

    def __init__(
        self,
        endpoint: str,
        model: nn.Module,
        *,
        check_engine: Callable[[], None] = lambda: None,
        on_publish: Callable[[int, int], None] = lambda version, called_ns: None,
        timeout_s: float = 30.0,
    ):
        """`check_engine` raises if the engine is known to be dead; it is called while waiting for a slot.
        `on_publish(version, called_ns)` is told of every publish."""
        self._model = model
        self._check_engine = check_engine
        self._on_publish = on_publish
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._pending: Published | None = None
        self._copying = False
        self._copied_event: torch.cuda.Event | None = None
        self._closing = False
        self._error: InflightError | None = None

        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.connect(endpoint)
        self._lock_file: int | None = None
        try:
            welcome = self._ask(Hello(), Welcome)
            self._lock_file = _lock(welcome.publisher_lock)
            attached = self._ask(Attach(layout=layout_of(model)), Attached)
            self._layout: WeightLayout = attached.layout
            self._slots = [_attach(descriptor) for descriptor in attached.slots]
        except BaseException:
            self._release()
            raise
        self._views = [slot_views(slot.buffer, self._layout) for slot in self._slots]
        self._free = list(attached.free)
        self.version = attached.version
        """The version that the last `publish()` returned."""
        self._stream = torch.cuda.Stream(self._slots[0].buffer.device) if self._on_gpu else None
        self._events = [torch.cuda.Event(interprocess=True) for _ in self._slots] if self._on_gpu else []
        self._hook = register_optimizer_step_pre_hook(lambda *_: self.wait_copied())
        self._thread = threading.Thread(target=self._run, name="inflight-publisher", daemon=True)
        self._thread.start()

    def publish(self) -> int:
        """Announce the parameters as they are now as the next version, and return its number at once.

        The engine draws with it from one of its next forward passes on. A version that was not copied yet when this
        one is called is dropped: the latest wins. Raises what made an earlier publish fail.
        """
        with self._condition:
            if self._error is not None:
                raise self._error
            self.version += 1
            record = Published(self.version, now_ns())
            self._on_publish(record.version, record.called_ns)
            if self._on_gpu:
                self._copied_event = None
                self._written_event = torch.cuda.current_stream(self._slots[0].buffer.device).record_event()
            self._pending = record
            self._condition.notify_all()
        return record.version

    def wait_copied(self) -> None:
        """Return when no announced version still reads the parameters; from then on they may change."""
        if threading.current_thread() is self._thread:
            return
        with self._condition:
            self._condition.wait_for(lambda: (self._pending is None and not self._copying) or self._error is not None)
            if self._error is not None:
                raise self._error
        if self._copied_event is not None:
            torch.cuda.current_stream(self._slots[0].buffer.device).wait_event(self._copied_event)

    def close(self) -> None:
        """Finish the publish in progress and detach. The engine serves on with the newest whole version."""
        if self._closing:
            return
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(self._timeout_s)
        self._hook.remove()
        self._release()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread ---------------------------------------------------------------------------------------------

    @property
    def _on_gpu(self) -> bool:
        return isinstance(self._slots[0], CudaSlot)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                slot = self._acquire_slot()
                record = self._claim()
                self._copy(slot)
                self._announce(slot, record)
                self._finish()
            self._send(Detach())
        except InflightError as error:
            self._fail(error)
        except Exception as error:  # reported by the next publish() or wait_copied()
            self._fail(ProtocolError(f"publishing failed: {error!r}"))

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._pending is not None or self._closing)
            return self._pending is not None

    def _acquire_slot(self) -> int:
        if not self._free and len(self._slots) == 1:
            self._send(SlotRequest())
        deadline = now_ns() + self._timeout_s * 1e9
        while not self._free:
            message = self._receive(_POLL_MS)
            if isinstance(message, SlotFree):
                self._free.append(message.slot)
            elif isinstance(message, Failed):
                raise from_wire(message.kind, message.message)
            self._check_engine()
            if now_ns() > deadline:
                raise EngineDiedError(f"the engine gave no slot free within {self._timeout_s:.0f} s; is it alive?")
        return self._free.pop()

    def _claim(self) -> Published:
        """The newest announced version; a later publish() starts another round."""
        with self._condition:
            assert self._pending is not None
            record, self._pending, self._copying = self._pending, None, True
            return record

    def _copy(self, slot: int) -> None:
        tensors = published_tensors(self._model)
        if self._stream is None:
            fill(self._views[slot], tensors)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written_event)
            fill(self._views[slot], tensors)
            self._events[slot].record(self._stream)
            self._copied_event = self._events[slot]

    def _announce(self, slot: int, record: Published) -> None:
        handle = self._events[slot].ipc_handle() if self._on_gpu else None
        self._send(
            SlotReady(
                slot=slot,
                version=record.version,
                fingerprint=self._layout.fingerprint,
                published_ns=record.called_ns,
                event_handle=handle,
            )
        )

    def _finish(self) -> None:
        with self._condition:
            self._copying = False
            self._condition.notify_all()

    def _fail(self, error: InflightError) -> None:
        with self._condition:
            self._error = error
            self._copying = False
            self._pending = None
            self._condition.notify_all()

    # ---- the socket ---------------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))

    def _receive(self, timeout_ms: int) -> FromEngine | None:
        return decode_from_engine(self._socket.recv()) if self._socket.poll(timeout_ms) else None

    def _ask(self, message: ToEngine, expected: type[Answer]) -> Answer:
        self._send(message)
        answer = self._receive(int(self._timeout_s * 1000))
        if isinstance(answer, Failed):
            raise from_wire(answer.kind, answer.message)
        if answer is None:
            raise EngineDiedError(f"no engine answered within {self._timeout_s:.0f} s")
        if not isinstance(answer, expected):
            raise ProtocolError(f"expected {expected.__name__} from the engine, got {type(answer).__name__}")
        return answer

    def _release(self) -> None:
        self._socket.close()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _attach(descriptor: SlotDescriptor) -> Slot:
    if isinstance(descriptor, CudaIpcDescriptor):
        return CudaSlot.attach(descriptor)
    return SharedMemorySlot.attach(descriptor)


def _lock(path: str) -> int:
    """Take the publisher's lock; the kernel gives it back when this process ends, however it ends."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise PublisherConflictError(
            "another publisher is attached to this engine; close() it first (one engine follows one trainer)"
        ) from error
    return file
