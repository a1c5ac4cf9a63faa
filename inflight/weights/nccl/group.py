"""A group with a trainer, rank 0, that broadcasts, and this process, that receives."""

import threading
import time
from collections.abc import Callable, Iterator
from math import prod

import msgspec
import torch

from inflight.core.errors import BroadcastError, InvalidRequestError
from inflight.weights.nccl.library import DTYPES, Nccl
from inflight.weights.nccl.rendezvous import Rendezvous

_POLL_S = 0.0005
_LEAVING_S = 1.0
"""Bound for a collective to notice that the group is closed, before it is aborted."""
_MORE_S = 2.0
"""Extra time for calls that have the same bound and raise more precise errors."""
_TRAINER = 0


class TensorList(msgspec.Struct, frozen=True):
    """Tensors that a trainer will send: `update_info` of /update_weights."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    """Trainers for vLLM before 0.28 set this here and not in the rendezvous."""
    packed_buffer_size_bytes: int | None = None

    def check(self, most_bytes: int) -> None:
        """Raise InvalidRequestError for tensors that cannot be received."""
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise InvalidRequestError(
                f"update_info has {len(self.names)} names, {len(self.dtype_names)} dtype_names and {len(self.shapes)} "
                "shapes; it needs one of each for every tensor"
            )
        unknown = next((name for name in self.dtype_names if name.removeprefix("torch.") not in DTYPES), None)
        if unknown is not None:
            raise InvalidRequestError(f"dtype {unknown[:100]!r} cannot be received; {', '.join(DTYPES)} can be")
        if any(not 0 <= size <= most_bytes for shape in self.shapes for size in shape):
            raise InvalidRequestError("update_info has a shape with a size below 0, or larger than all weights")
        total = sum(one.num_bytes for one in self.each())
        if total > most_bytes:
            raise InvalidRequestError(f"update_info names {total:,} bytes, and the engine's weights are far smaller")

    def each(self) -> "Iterator[Announced]":
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            yield Announced(name, DTYPES[dtype.removeprefix("torch.")], shape)


class Announced(msgspec.Struct, frozen=True):
    """A tensor that will arrive."""

    name: str
    dtype: torch.dtype
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def buffers(tensors: TensorList, limit_bytes: int) -> Iterator[list[Announced]]:
    """Yield the tensors of each packed buffer. The trainer closes a buffer once it exceeds `limit_bytes`."""
    together: list[Announced] = []
    held = 0
    for tensor in tensors.each():
        together.append(tensor)
        held += tensor.num_bytes
        if held > limit_bytes:
            yield together
            together, held = [], 0
    if together:
        yield together


class NcclGroup:
    """Receives tensors, in the order in which the trainer announces them."""

    def __init__(self, library: Nccl, meeting: Rendezvous, device: torch.device, *, timeout_s: float):
        """Join the trainer's group. timeout_s: bound for that, and later for every buffer. Raises BroadcastError if the
        trainer does not join, and InvalidRequestError for an invalid rendezvous."""
        self._library, self._meeting, self._device, self._timeout_s = library, meeting, device, timeout_s
        self._comm = 0
        """NCCL's communicator; 0 outside the group."""
        self._left = threading.Lock()
        self._in_use = threading.Lock()
        self.closed = False
        meeting.check()
        ids: list[bytes] = []
        self._bounded(
            lambda: ids.append(meeting.unique_id(timeout_s)), "the trainer's store did not answer", _MORE_S
        )  # It bounds connecting, and not answers.

        def join() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # NCCL takes the current device of this thread.
            self._comm = library.join(ids[0], meeting.rank_offset, meeting.world_size)
            if self.closed:  # The caller's wait has ended.
                self._abort()

        self._bounded(join, "the group was not complete")
        one = torch.zeros(1, dtype=torch.float32, device=device)
        self._bounded(lambda: self._launch(lambda stream: library.sum(one, self._comm, stream)), "nobody answered")

    def receive(self, tensors: TensorList) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors on the device as they arrive. The caller takes all of them, since the trainer sends
        all in any case. Raises BroadcastError."""
        packed = self._meeting.packed if tensors.packed is None else tensors.packed
        if not packed:
            return self._one_by_one(tensors)
        return self._packed(tensors, tensors.packed_buffer_size_bytes or self._meeting.packed_buffer_size_bytes)

    def _one_by_one(self, tensors: TensorList) -> Iterator[tuple[str, torch.Tensor]]:
        for one in tensors.each():
            tensor = torch.empty(one.shape, dtype=one.dtype, device=self._device)
            self._receive(tensor)
            yield one.name, tensor

    def _packed(self, tensors: TensorList, limit_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        for together in buffers(tensors, limit_bytes):
            sizes = [one.num_bytes for one in together]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            self._receive(buffer)
            for one, part in zip(together, buffer.split(sizes), strict=True):
                aligned = part if part.storage_offset() % one.dtype.itemsize == 0 else part.clone()
                yield one.name, aligned.view(one.dtype).view(one.shape)

    def close(self) -> None:
        """Leave the group, also during a transfer. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        seen = self._in_use.acquire(timeout=_LEAVING_S)
        try:
            self._abort()
        finally:
            if seen:
                self._in_use.release()

    def _abort(self) -> None:
        """Abort the communicator, once: NCCL frees it."""
        with self._left:
            comm, self._comm = self._comm, 0
        if comm:
            self._library.abort(comm)

    def _receive(self, tensor: torch.Tensor) -> None:
        self._bounded(
            lambda: self._launch(lambda stream: self._library.broadcast(tensor, _TRAINER, self._comm, stream)),
            f"{tensor.nbytes:,} announced bytes did not arrive",
        )

    def _launch(self, call: Callable[[int], None]) -> None:
        """Run a collective to its end."""
        with self._in_use:
            self._still_open()
            if self._device.type != "cuda":
                call(0)
                return
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream()
                call(stream.cuda_stream)
                done = stream.record_event()
                while not done.query():
                    self._still_open()
                    self._library.check(self._comm)
                    time.sleep(_POLL_S)

    def _still_open(self) -> None:
        if self.closed:
            raise BroadcastError("the trainer's group was closed; join it again")

    def _bounded(self, call: Callable[[], None], failure: str, more_s: float = 0.0) -> None:
        """Run a call in a separate thread, since NCCL waits for other ranks without a bound. After the bound, leave the
        group. This ends such a wait."""
        self._still_open()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="inflight-nccl", daemon=True)
        thread.start()
        thread.join(self._timeout_s + more_s)
        if thread.is_alive():
            self.close()
            raise BroadcastError(f"{failure} within {self._timeout_s + more_s:.0f} s")
        if raised:
            self.close()
            raise raised[0]
