"""NCCL by ctypes: the functions for receiving broadcasts, as nccl.h (2.18 and later) declares them.

PyTorch offers them only inside process groups. vLLM's protocol does not use process groups.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from typing import Any

import torch

from inflight.core.errors import BackendError, BroadcastError

VARIABLE = "INFLIGHT_NCCL_LIBRARY"
"""Environment variable with the library's file, if it is not the one that PyTorch has loaded."""
ID_BYTES = 128
_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip
"""NCCL's numbers of dtypes."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}
"""Maps names to dtypes that can be received."""
_SUM = 0


class UniqueId(ctypes.Structure):
    """The id of a group."""

    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


_ARGUMENTS: dict[str, list[Any]] = {
    "ncclCommInitRank": [POINTER(c_void_p), c_int, UniqueId, c_int],
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

    def join(self, unique_id: bytes, rank: int, world_size: int) -> int:
        """Return the address of a communicator once all ranks have joined."""
        comm = c_void_p()
        self._call("ncclCommInitRank", byref(comm), world_size, UniqueId.from_buffer_copy(unique_id), rank)
        return comm.value or 0

    def sum(self, tensor: torch.Tensor, comm: int, stream: int) -> None:
        """Sum a tensor over all ranks, in place."""
        address = tensor.data_ptr()
        self._call("ncclAllReduce", address, address, tensor.numel(), _TYPES[tensor.dtype], _SUM, comm, stream)

    def broadcast(self, tensor: torch.Tensor, root: int, comm: int, stream: int) -> None:
        """Receive the root's tensor of the same size and dtype."""
        address = tensor.data_ptr()
        self._call("ncclBroadcast", address, address, tensor.numel(), _TYPES[tensor.dtype], root, comm, stream)

    def check(self, comm: int) -> None:
        """Raise BroadcastError if a launched collective has failed."""
        found = c_int()
        self._call("ncclCommGetAsyncError", comm, byref(found))
        self._check(found.value, "a collective")

    def abort(self, comm: int) -> None:
        """Abort a communicator, also while another thread's call waits for other ranks."""
        self._functions["ncclCommAbort"](comm)

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
