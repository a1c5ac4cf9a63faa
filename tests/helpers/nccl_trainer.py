"""A trainer that sends weights as vLLM's clients do, written anew from vLLM's sources, over a stand-in for NCCL.

Run as a program, `nccl_trainer.py LIBRARY FD` meets a receiver at a listening socket, says so, and sends nothing.
"""

import ctypes
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import TCPStore

SOURCE = Path(__file__).with_name("stand_in_nccl.c")
_NUMBERS = {torch.uint8: 1, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


def build(directory: Path) -> str:
    """The stand-in as a shared library."""
    library = directory / "libstandin.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", str(SOURCE), "-o", str(library)], check=True)
    return str(library)


def listening_socket() -> socket.socket:
    """On a port of its own, which nobody takes before the store is there."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.set_inheritable(True)
    return listening


def free_port() -> int:
    """Where nobody listens for now."""
    with listening_socket() as found:
        return found.getsockname()[1]


class _Pickled(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def pickled_id(unique_id: bytes, protocol: int | None = None) -> bytes:
    """The id as vLLM's StatelessProcessGroup leaves it in the store: an object of its class, by that class's name."""
    _Pickled.__module__, _Pickled.__qualname__, _Pickled.__name__ = _MODULE, "ncclUniqueId", "ncclUniqueId"
    names = [_MODULE.rsplit(".", k)[0] for k in range(_MODULE.count("."), -1, -1)]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[_MODULE].ncclUniqueId = _Pickled  # type: ignore[attr-defined]
    try:
        return pickle.dumps(_Pickled.from_buffer_copy(unique_id), protocol)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class NcclTrainer:
    """Rank 0 of a group of two."""

    def __init__(self, library: str, listening: socket.socket | None = None):
        self._library = ctypes.CDLL(library)
        self._library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _Pickled, ctypes.c_int]
        self._listening = listening or listening_socket()
        self.port = self._listening.getsockname()[1]
        self._id = _Pickled()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(self._id)))
        self._comm = ctypes.c_void_p()
        self._store: TCPStore | None = None

    @property
    def unique_id(self) -> bytes:
        return bytes(self._id)

    def leave_id(self, data: bytes | None = None) -> None:
        """Host the store, with the id in it. Returns once the receiver is there."""
        limit = timedelta(seconds=30)
        self._store = TCPStore(
            "127.0.0.1", self.port, 2, is_master=True, timeout=limit, use_libuv=False,
            master_listen_fd=self._listening.detach(),
        )  # fmt: skip
        self._store.set("broadcast_from/0/0", pickled_id(self.unique_id) if data is None else data)

    def join(self) -> None:
        self._check(self._library.ncclCommInitRank(ctypes.byref(self._comm), 2, self._id, 0))
        one = torch.ones(1)
        self._check(self._library.ncclAllReduce(*self._both(one), _NUMBERS[one.dtype], 0, self._comm, None))
        assert one.item() == 1.0, "the receiver takes part with 0, as vLLM does"

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], packed_bytes: int | None) -> None:
        """packed_bytes: buffers are closed once they hold more; None: tensor by tensor."""
        if packed_bytes is None:
            for _, tensor in tensors:
                self.broadcast(tensor.contiguous())
        else:
            for buffer in packed(tensors, packed_bytes):
                self.broadcast(buffer)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._check(self._library.ncclBroadcast(*self._both(tensor), _NUMBERS[tensor.dtype], 0, self._comm, None))

    def close(self) -> None:
        if self._comm:
            self._library.ncclCommAbort(self._comm)
        self._listening.close()
        self._store = None

    @staticmethod
    def _both(tensor: torch.Tensor) -> tuple[Any, ...]:
        address = ctypes.c_void_p(tensor.data_ptr())
        return address, address, ctypes.c_size_t(tensor.numel())

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"the stand-in failed with {code}")


def packed(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[torch.Tensor]:
    """u8 buffers; the tensor that brings one above the limit is its last."""
    parts: list[torch.Tensor] = []
    for _, tensor in tensors:
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(part.numel() for part in parts) > limit:
            yield torch.cat(parts)
            parts = []
    if parts:
        yield torch.cat(parts)


def announced(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[Any]]:
    """`update_info` of these tensors."""
    tensors = list(tensors)
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).split(".")[-1] for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


def main(library: str, number: str) -> None:
    trainer = NcclTrainer(library, socket.socket(fileno=int(number)))
    trainer.leave_id()
    trainer.join()
    print("met", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
