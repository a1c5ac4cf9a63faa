"""Receives weights by NCCL from a trainer that uses vLLM's protocol (vLLM 0.24 to 0.33).

The trainer, rank 0, hosts a TCPStore with the id of the group (vllm/distributed/utils.py, StatelessProcessGroup; and
device_communicators/pynccl.py), and then broadcasts. The id is a pickled object of a vLLM class. Since it arrives over
a network, it is read without running any code. PyTorch offers NCCL only inside process groups, and the protocol has
none. Here ctypes calls the functions as nccl.h (2.18 and later) declares them.
"""

import base64
import binascii
import ctypes
import io
import os
import pickle
import pickletools
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed import DistError, TCPStore

from inflight.core.errors import BackendError, BroadcastError, InvalidRequestError

VARIABLE = "INFLIGHT_NCCL_LIBRARY"
"""Environment variable with the library's file, if it is not the one that PyTorch has loaded."""
_ID_BYTES = 128
_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip
"""NCCL's numbers of dtypes."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}
_SUM = 0
_TRAINER = 0
_POLL_S = 0.0005
_LEAVING_S = 1.0
"""Bound for a collective to notice that the group is closed, before it is aborted."""
_MORE_S = 2.0
"""Extra time for calls that have the same bound and raise more precise errors."""


# ---- the rendezvous ---------------------------------------------------------------------------------------------

_KEY = "broadcast_from/0/0"
_MOST_PICKLED_BYTES = 4096
_CLASS = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
_MAKER = ("_ctypes", "_unpickle")


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The group that a trainer makes: `init_info` of /init_weight_transfer_engine."""

    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int
    world_size: int
    nccl_unique_id_b64: str | None = None
    """The id, if the trainer hosts no store."""
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    """Ignored: buffers are received one after another."""

    def check(self) -> None:
        """Raise InvalidRequestError for invalid fields."""
        if not 0 < self.rank_offset < self.world_size <= 1 << 16:
            raise InvalidRequestError(
                f"rank_offset {self.rank_offset} is no receiver's rank among {self.world_size}: the trainer has rank 0"
            )
        if not 0 < self.packed_buffer_size_bytes <= 1 << 40:
            raise InvalidRequestError("packed_buffer_size_bytes is to be above 0, and what fits into a GPU")
        if self.nccl_unique_id_b64 is None and not (self.master_address and 0 < (self.master_port or 0) < 1 << 16):
            raise InvalidRequestError("init_info needs master_address and master_port, or nccl_unique_id_b64")

    def unique_id(self, timeout_s: float) -> bytes:
        """Return the id of the group. Raises BroadcastError if there is none in time, and InvalidRequestError if it is
        invalid."""
        if self.nccl_unique_id_b64 is not None:
            try:
                found = base64.b64decode(self.nccl_unique_id_b64, validate=True)
            except (binascii.Error, ValueError) as error:
                raise InvalidRequestError(f"nccl_unique_id_b64 is no base64: {error}") from error
            return _checked(found)
        host, port, limit = self.master_address or "", self.master_port or 0, timedelta(seconds=timeout_s)
        try:
            store = TCPStore(host, port, self.world_size, is_master=False, timeout=limit, use_libuv=False)
            store.set_timeout(limit)
            data = bytes(store.get(_KEY))
        except (DistError, RuntimeError, ValueError) as error:
            raise BroadcastError(
                f"the trainer's store at {host[:200]}:{port} was not met within {timeout_s:.0f} s: {error}"
            ) from error
        return read_unique_id(data)


_VLLMS_CLASS = object()
"""Placeholder for vLLM's class. It cannot be called."""


class _Id(NamedTuple):
    data: object


def _make(kind: object, state: object) -> _Id:
    if kind is not _VLLMS_CLASS or not isinstance(state, tuple) or len(state) != 2 or state[0] != {}:
        raise pickle.UnpicklingError("it is no ncclUniqueId")
    return _Id(state[1])


_OPCODES = {
    "PROTO", "FRAME", "GLOBAL", "STACK_GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "BINPUT", "BINGET", "MEMOIZE",
    "EMPTY_DICT", "BINBYTES", "SHORT_BINBYTES", "MARK", "TUPLE", "TUPLE2", "REDUCE", "STOP",
}  # fmt: skip
"""Opcodes of such an id. Others can make an unpickler allocate without bound."""


class _Unpickler(pickle.Unpickler):
    """Resolves the two names in a pickled id to placeholders."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == _CLASS:
            return _VLLMS_CLASS
        if (module_name, global_name) == _MAKER:
            return _make
        raise pickle.UnpicklingError(f"it names {module_name[:100]}.{global_name[:100]}")


def read_unique_id(data: bytes) -> bytes:
    """Return the 128 bytes of a pickled `ncclUniqueId` of vLLM. Raises InvalidRequestError for anything else. It
    imports and calls nothing that the pickle names."""
    if len(data) > _MOST_PICKLED_BYTES:
        raise InvalidRequestError(f"the trainer's id of the group is invalid: it has {len(data):,} bytes")
    try:
        unknown = {opcode.name for opcode, _, _ in pickletools.genops(data)} - _OPCODES
        if unknown:
            raise pickle.UnpicklingError(f"it has {', '.join(sorted(unknown))}")
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # Broken pickles raise many kinds of errors.
        raise InvalidRequestError(f"the trainer's id of the group is invalid: {error}") from error
    return _checked(found.data if isinstance(found, _Id) else None)


def _checked(found: object) -> bytes:
    if not isinstance(found, bytes) or len(found) != _ID_BYTES:
        raise InvalidRequestError(f"the id of the group is invalid: expected {_ID_BYTES} bytes")
    return found


# ---- the library ------------------------------------------------------------------------------------------------


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


_ARGUMENTS: dict[str, list[Any]] = {
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

    def join(self, unique_id: bytes, rank: int, world_size: int) -> int:
        """Return the address of a communicator once all ranks have joined."""
        comm = c_void_p()
        self._call("ncclCommInitRank", byref(comm), world_size, _UniqueId.from_buffer_copy(unique_id), rank)
        return comm.value or 0

    def sum(self, tensor: torch.Tensor, comm: int, stream: int) -> None:
        """Sum a tensor over all ranks, in place."""
        self._collective("ncclAllReduce", tensor, _SUM, comm, stream)

    def broadcast(self, tensor: torch.Tensor, comm: int, stream: int) -> None:
        """Receive the trainer's tensor of the same size and dtype."""
        self._collective("ncclBroadcast", tensor, _TRAINER, comm, stream)

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
        self._call(name, address, address, tensor.numel(), _TYPES[tensor.dtype], how, comm, stream)

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


# ---- tensors and their group ------------------------------------------------------------------------------------


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
        unknown = next((name for name in self.dtype_names if name.removeprefix("torch.") not in _DTYPES), None)
        if unknown is not None:
            raise InvalidRequestError(f"dtype {unknown[:100]!r} cannot be received; {', '.join(_DTYPES)} can be")
        if any(not 0 <= size <= most_bytes for shape in self.shapes for size in shape):
            raise InvalidRequestError("update_info has a shape with a size below 0, or larger than all weights")
        total = sum(one.num_bytes for one in self.each())
        if total > most_bytes:
            raise InvalidRequestError(f"update_info names {total:,} bytes, and the engine's weights are far smaller")

    def each(self) -> "Iterator[Announced]":
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            yield Announced(name, _DTYPES[dtype.removeprefix("torch.")], shape)


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
        # The store's own limit bounds connecting, not answers.
        self._bounded(lambda: ids.append(meeting.unique_id(timeout_s)), "the trainer's store did not answer", _MORE_S)

        def join() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # NCCL takes the current device of this thread.
            self._comm = library.join(ids[0], meeting.rank_offset, meeting.world_size)
            if self.closed:  # The caller's wait has ended.
                self._abort()

        self._bounded(join, "the group was not complete")
        one = torch.zeros(1, dtype=torch.float32, device=device)
        self._bounded(lambda: self._launch(library.sum, one), "nobody answered")

    def receive(self, tensors: TensorList) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors on the device as they arrive. The caller takes all of them, since the trainer sends
        all in any case. Raises BroadcastError."""
        packed = self._meeting.packed if tensors.packed is None else tensors.packed
        if not packed:
            for one in tensors.each():
                tensor = torch.empty(one.shape, dtype=one.dtype, device=self._device)
                self._receive(tensor)
                yield one.name, tensor
            return
        limit_bytes = tensors.packed_buffer_size_bytes or self._meeting.packed_buffer_size_bytes
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
            lambda: self._launch(self._library.broadcast, tensor), f"{tensor.nbytes:,} announced bytes did not arrive"
        )

    def _launch(self, collective: Callable[[torch.Tensor, int, int], None], tensor: torch.Tensor) -> None:
        """Run a collective to its end."""
        with self._in_use:
            self._still_open()
            if self._device.type != "cuda":
                collective(tensor, self._comm, 0)
                return
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream()
                collective(tensor, self._comm, stream.cuda_stream)
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
