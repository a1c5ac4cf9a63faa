"""The trainer's side of the weights: `publish()` returns at once, a thread fills an idle slot and announces it.

The thread owns the socket. It waits for a slot, copies the parameters, and sends SlotReady. Until its copy is done the
parameters must not change; a `torch.optim` optimizer that holds some of them waits for that by itself (a step hook),
other code that writes to them calls `wait_copied()` first. When publishing outruns the engine, the latest version wins.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import zmq
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inflight.core.clock import now_ns
from inflight.core.errors import (
    InflightError,
    NonFiniteWeightsError,
    ProtocolError,
    PublisherConflictError,
    from_wire,
)
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
from inflight.weights.sharded import ShardGroup, is_sharded
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
    slots). Of a model that FSDP2 spreads over ranks, rank 0 makes the Publisher and each other rank a ShardSender.
    Raises LayoutMismatchError, naming what differs, or PublisherConflictError if another publisher lives.
    """

    def __init__(
        self,
        endpoint: str,
        model: nn.Module,
        *,
        check_engine: Callable[[], None] = lambda: None,
        on_publish: Callable[[int, int], None] = lambda version, called_ns: None,
        check_finite: bool = False,
        timeout_s: float = 60.0,
    ):
        """`check_finite` refuses versions with NaN or infinite weights, which are read once more for that, behind
        `publish()`; the engine keeps the weights that it has, and the next `publish()`, `wait_copied()` or `check()`
        raises NonFiniteWeightsError, once. `check_engine` raises if the engine is known to be dead; it is called while
        waiting for an answer or a slot. `on_publish(version, called_ns)` is told of every publish. `timeout_s` is for
        the engine's first answers."""
        self._model = model
        self._check_engine = check_engine
        self._on_publish = on_publish
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._pending: Published | None = None
        self._copying = False
        self._closing = False
        self._error: InflightError | None = None
        self._check_finite = check_finite
        self._refused: NonFiniteWeightsError | None = None
        parameter = next(model.parameters())
        self._gpu = parameter.device if parameter.is_cuda else None
        self._written: Any = None  # events on the trainer's and on the copy's stream
        self._copied: Any = None

        self._shards = ShardGroup(model) if is_sharded(model) else None

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
        except BaseException as error:
            self._release()
            if self._shards is not None:
                reason = error if isinstance(error, InflightError) else InflightError(f"rank 0 failed: {error!r}")
                with contextlib.suppress(InflightError):  # which the other ranks raise
                    self._shards.introduce(reason)
            raise
        if self._shards is not None:
            self._shards.introduce((self._layout, attached.version))
        self._views = [slot_views(slot.buffer, self._layout) for slot in self._slots]
        self._free = list(attached.free)
        self.version = attached.version
        """The version that the last `publish()` returned."""
        self.last_copy_s = 0.0
        """Seconds that the last copy into a slot took."""
        self._stream = torch.cuda.Stream(self._slots[0].buffer.device) if self._slots[0].buffer.is_cuda else None
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, name="inflight-publisher", daemon=True)
        self._thread.start()

    def publish(self) -> int:
        """Announce the parameters as they are now as the next version, and return its number at once.

        The engine draws with it from one of its next forward passes on. A version that no slot was free for when this
        one is called is dropped: the latest wins. Raises what made an earlier publish fail, or InflightError if the
        publisher is closed.
        """
        with self._condition:
            self.check()
            if self._closing:
                raise InflightError("this publisher is closed; engine.publisher(model) makes a new one")
            self.version += 1
            record = Published(self.version, now_ns())
            self._on_publish(record.version, record.called_ns)
            if self._gpu is not None:
                self._written = torch.cuda.current_stream(self._gpu).record_event()
            self._pending = record
            self._condition.notify_all()
        return record.version

    def wait_copied(self) -> None:
        """Return when no announced version will read the parameters any more; from then on they may change.

        With a slot free that is the time of a copy; else the engine's next forward boundary frees one. On a GPU the
        caller's stream is made to wait, not the caller. Raises what made the publish fail.
        """
        with self._condition:
            self._condition.wait_for(lambda: (self._pending is None and not self._copying) or self._error is not None)
            self.check()
            copied, self._copied = self._copied, None
        if copied is not None and self._gpu is not None:
            torch.cuda.current_stream(self._gpu).wait_event(copied)

    def check(self) -> None:
        """Raise what made a publish fail, if one did."""
        if self._error is not None:
            raise self._error
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Finish the publish in progress and detach. The engine serves on with the newest whole version."""
        if self._closing:
            return
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        self._hook.remove()
        self._release()
        self._views.clear()
        self._slots.clear()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer is about to change parameters: if they are ours, let the copy read them first."""
        ours = {id(parameter) for parameter in self._model.parameters()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            self.wait_copied()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                slot = self._acquire_slot()
                record = self._claim()
                self._copy(slot, record.version)
                if self._check_finite and (bad := self._non_finite(slot)):
                    self._refuse(slot, record, bad)
                else:
                    self._announce(slot, record)
            self._send(Detach())
        except InflightError as error:
            self._fail(error)
        except Exception as error:  # reported by the next publish(), wait_copied() or check()
            self._fail(InflightError(f"publishing failed: {error!r}"))
        if self._shards is not None:
            with contextlib.suppress(RuntimeError):  # the other ranks are gone
                self._shards.command()

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._pending is not None or self._closing)
            return self._pending is not None

    def _acquire_slot(self) -> int:
        """A slot of ours, or the next that the engine frees, which it does at a forward boundary."""
        if not self._free and len(self._slots) == 1:
            self._send(SlotRequest())
        while not self._free:
            message = self._receive(_POLL_MS)
            if isinstance(message, SlotFree):
                self._free.append(message.slot)
            elif isinstance(message, Failed):
                raise from_wire(message.kind, message.message)
            elif message is None:
                self._check_engine()
        return self._free.pop()

    def _claim(self) -> Published:
        """The newest announced version; a later publish() starts another round."""
        with self._condition:
            assert self._pending is not None
            record, self._pending, self._copying = self._pending, None, True
            return record

    def _copy(self, slot: int, version: int) -> None:
        """Fill the slot. The parameters may change again once the copy is done, or in order on their device."""
        began_ns = now_ns()
        if self._stream is None:
            self._fill(slot, version)
            copied = None
        else:
            with torch.cuda.stream(self._stream):
                if self._written is not None:
                    self._stream.wait_event(self._written)
                self._fill(slot, version)
                copied = self._stream.record_event()
        with self._condition:
            self._copying = False
            self._copied = copied
            self._condition.notify_all()
        if copied is not None:
            copied.synchronize()  # announced means whole: the engine's stream never waits for the trainer's
        self.last_copy_s = (now_ns() - began_ns) / 1e9

    def _fill(self, slot: int, version: int) -> None:
        if self._shards is None:
            fill(self._views[slot], published_tensors(self._model))
        else:
            self._shards.command(version)
            self._shards.receive(self._views[slot])

    def _non_finite(self, slot: int) -> list[str]:
        """Names of the tensors in a slot that hold NaN or infinite values."""
        floats = {name: view for name, view in self._views[slot].items() if view.is_floating_point()}
        finite = torch.stack([view.isfinite().all() for view in floats.values()]).tolist()
        return [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]

    def _refuse(self, slot: int, record: Published, bad: list[str]) -> None:
        """What is in the slot was never announced, so that it may be filled again."""
        self._free.append(slot)
        named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        self._refused = NonFiniteWeightsError(
            f"version {record.version} was not published: {named} of {len(self._views[slot])} tensors "
            "hold NaN or infinite values; the engine keeps the weights that it has"
        )

    def _announce(self, slot: int, record: Published) -> None:
        self._send(
            SlotReady(
                slot=slot,
                version=record.version,
                fingerprint=self._layout.fingerprint,
                published_ns=record.called_ns,
            )
        )

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
        deadline = now_ns() + int(self._timeout_s * 1e9)
        while (answer := self._receive(_POLL_MS)) is None:
            self._check_engine()
            if now_ns() > deadline:
                raise TimeoutError(f"no engine answered within {self._timeout_s:.0f} s")
        if isinstance(answer, Failed):
            raise from_wire(answer.kind, answer.message)
        if not isinstance(answer, expected):
            raise ProtocolError(f"expected {expected.__name__} from the engine, got {type(answer).__name__}")
        return answer

    def _release(self) -> None:
        self._socket.close()
        if self._lock_file is not None:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # also where a forked process holds the file open
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
