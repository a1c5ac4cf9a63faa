"""NCCL without PyTorch's process groups: a communicator whose waits end after a bound.

ProcessGroupNCCL ends the whole process when another rank is lost or late, so that a killed engine would take its
trainer with it. Here the caller receives an error, and the communicator is aborted. ctypes calls the functions as
nccl.h (2.18 and later) declares them.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from typing import Any

import torch

from inflight.core.errors import BackendError, BroadcastError

VARIABLE = "INFLIGHT_NCCL_LIBRARY"
"""Environment variable with the library's file, if it is not the one that PyTorch has loaded."""
ID_BYTES = 128
DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip
"""NCCL's numbers of dtypes."""
_SUM = 0
_ROOT = 0
_POLL_S = 0.0005
_LEAVING_S = 1.0
"""Bound for a collective to notice that the communicator is closed, before it is aborted."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetUniqueId": [POINTER(_UniqueId)],
    "ncclCommInitRank": [POINTER(c_void_p), c_int, _UniqueId, c_int],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclCommAbort": [c_void_p],
}


class Nccl:
    """The library. All calls raise BroadcastError if NCCL returns an error."""

    def __init__(self, path: str):
        """Raise BackendError if the library cannot be loaded, or lacks a function."""
        try:
            self._library = ctypes.CDLL(path)
            self._functions = {name: getattr(self._library, name) for name in _ARGUMENTS}
            self._text_of = self._library.ncclGetErrorString
        except (OSError, AttributeError) as error:
            raise BackendError(f"NCCL cannot be loaded: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            self._functions[name].argtypes, self._functions[name].restype = arguments, c_int
        self._text_of.argtypes, self._text_of.restype = [c_int], ctypes.c_char_p

    def new_id(self) -> bytes:
        """Return the id of a new group. Its rank 0 is in this process."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, rank: int, world_size: int) -> int:
        """Return the address of a communicator once all ranks have joined."""
        comm = c_void_p()
        self._call("ncclCommInitRank", byref(comm), world_size, _UniqueId.from_buffer_copy(unique_id), rank)
        return comm.value or 0

    def sum(self, tensor: torch.Tensor, comm: int, stream: int) -> None:
        """Sum a tensor over all ranks, in place."""
        self._collective("ncclAllReduce", tensor, _SUM, comm, stream)

    def broadcast(self, tensor: torch.Tensor, comm: int, stream: int) -> None:
        """Copy rank 0's tensor into the other ranks' tensors of the same size and dtype."""
        self._collective("ncclBroadcast", tensor, _ROOT, comm, stream)

    def check(self, comm: int) -> None:
        """Raise BroadcastError if a launched collective has failed."""
        found = c_int()
        self._call("ncclCommGetAsyncError", comm, byref(found))
        self._check(found.value, "a collective")

    def abort(self, comm: int) -> None:
        """Abort a communicator, also while another thread's call waits for other ranks."""
        self._functions["ncclCommAbort"](comm)

    def _collective(self, name: str, tensor: torch.Tensor, how: int, comm: int, stream: int) -> None:
        address = tensor.data_ptr()
        self._call(name, address, address, tensor.numel(), DTYPES[tensor.dtype], how, comm, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(self._functions[name](*arguments), name)

    def _check(self, code: int, what: str) -> None:
        if code not in (0, 7):  # 7: in progress
            raise BroadcastError(f"NCCL: {what} failed: {(self._text_of(code) or b'').decode(errors='replace')}")


def why_not(device: str) -> str | None:
    """Return why this process cannot receive for an engine on this device, or None."""
    if os.environ.get(VARIABLE):
        return None
    if torch.device(device).type != "cuda":
        return f"the engine computes on {device}, and NCCL connects GPUs"
    return None if torch.cuda.is_available() else "this process sees no GPU, and NCCL connects GPUs"


def load() -> Nccl:
    """Load PyTorch's library, or the one of the environment variable. Raises BackendError."""
    return Nccl(os.environ.get(VARIABLE) or "libnccl.so.2")


class Communicator:
    """A rank of a group that NCCL connects. Safe to close from other threads."""

    def __init__(self, library: Nccl, device: torch.device, *, timeout_s: float):
        """timeout_s: bound of joining, and of each tensor of a broadcast."""
        self._library, self.device, self._timeout_s = library, device, timeout_s
        self._comm = 0
        """NCCL's communicator; 0 outside the group."""
        self._left = threading.Lock()
        self._in_use = threading.Lock()
        self.closed = False

    def join(self, unique_id: bytes, rank: int, size: int) -> None:
        """Join the group of this id as one of `size` ranks. Raises BroadcastError if not all of them join in time."""

        def join() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # NCCL takes the current device of this thread.
            self._comm = self._library.join(unique_id, rank, size)
            if self.closed:  # The caller's wait has ended.
                self._abort()

        self.bounded(join, "the group was not complete")
        one = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._run(self._library.sum, [one], "nobody answered")

    def broadcast(self, tensors: Sequence[torch.Tensor], failure: str = "a rank took no part in the broadcast") -> None:
        """Copy rank 0's tensors into the tensors of the other ranks, one after another, and wait for the end. Raises
        BroadcastError if a rank is lost, or if `timeout_s` passes from one tensor to the next."""
        self._run(self._library.broadcast, tensors, failure)

    def close(self) -> None:
        """Leave the group, also during a collective. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        seen = self._in_use.acquire(timeout=_LEAVING_S)
        try:
            self._abort()
        finally:
            if seen:
                self._in_use.release()

    def bounded(self, call: Callable[[], object], failure: str, *, more_s: float = 0.0) -> None:
        """Run a call in a separate thread, since NCCL waits for other ranks without a bound. If it takes longer than
        `timeout_s` and `more_s`, leave the group, which ends the wait, and raise BroadcastError."""
        self._bounded(lambda: iter([call()]), failure, self._timeout_s + more_s)

    def _abort(self) -> None:
        """Abort the communicator, once: NCCL frees it."""
        with self._left:
            comm, self._comm = self._comm, 0
        if comm:
            self._library.abort(comm)

    def _run(
        self, collective: Callable[[torch.Tensor, int, int], None], tensors: Sequence[torch.Tensor], failure: str
    ) -> None:
        """Run a collective on each tensor to its end, on the caller's stream."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self._bounded(lambda: self._steps(collective, tensors, stream), failure, self._timeout_s)

    def _steps(
        self,
        collective: Callable[[torch.Tensor, int, int], None],
        tensors: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None,
    ) -> Iterator[None]:
        """Yield after each step that has ended. On a GPU all collectives are queued before the first is waited for."""
        with self._in_use:
            if stream is None:
                for tensor in tensors:
                    self._still_open()
                    collective(tensor, self._comm, 0)
                    yield
                return
            with torch.cuda.stream(stream):
                ends: list[torch.Event] = []
                for tensor in tensors:
                    self._still_open()
                    collective(tensor, self._comm, stream.cuda_stream)
                    ends.append(stream.record_event())
                    yield
                for end in ends:
                    while not end.query():
                        self._still_open()
                        self._library.check(self._comm)
                        time.sleep(_POLL_S)
                    yield

    def _still_open(self) -> None:
        if self.closed:
            raise BroadcastError("the group was closed; join it again")

    def _bounded(self, steps: Callable[[], Iterator[object]], failure: str, timeout_s: float) -> None:
        """Run steps in a separate thread. Leave the group if one of them takes longer than the bound."""
        self._still_open()
        raised: list[BaseException] = []
        last_s = time.monotonic()

        def run() -> None:
            nonlocal last_s
            try:
                for _ in steps():
                    last_s = time.monotonic()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="inflight-nccl", daemon=True)
        thread.start()
        while thread.is_alive() and (left_s := last_s + timeout_s - time.monotonic()) > 0:
            thread.join(left_s)
        if thread.is_alive():
            self.close()
            raise BroadcastError(f"{failure} within {timeout_s:.0f} s")
        if raised:
            self.close()
            raise raised[0]
