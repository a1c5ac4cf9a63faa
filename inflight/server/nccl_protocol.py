"""Receives weights by NCCL from a trainer that uses vLLM's protocol (vLLM 0.24 to 0.33).

The trainer, rank 0, hosts a TCPStore with the id of the group (vllm/distributed/utils.py, StatelessProcessGroup; and
device_communicators/pynccl.py), and then broadcasts. The id is a pickled object of a vLLM class. Since it arrives over
a network, it is read without running any code.
"""

import base64
import binascii
import io
import pickle
import pickletools
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed import DistError, TCPStore

from inflight.core.errors import BroadcastError, InvalidRequestError
from inflight.weights.nccl import DTYPES, ID_BYTES, Communicator, Nccl

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_MORE_S = 2.0
"""Extra time for calls that have the same bound and raise more precise errors."""


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
    """The id of the communicator. None: it is read from the store at the trainer's address."""
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
    if not isinstance(found, bytes) or len(found) != ID_BYTES:
        raise InvalidRequestError(f"the id of the group is invalid: expected {ID_BYTES} bytes")
    return found


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


class NcclGroup(Communicator):
    """Receives tensors, in the order in which the trainer announces them."""

    def __init__(self, library: Nccl, meeting: Rendezvous, device: torch.device, *, timeout_s: float):
        """Join the trainer's group. timeout_s: bound for that, and later for every buffer. Raises BroadcastError if the
        trainer does not join, and InvalidRequestError for an invalid rendezvous."""
        super().__init__(library, device, timeout_s=timeout_s)
        self._meeting = meeting
        meeting.check()
        ids: list[bytes] = []
        # The store's own limit bounds connecting, not answers.
        get_id = lambda: ids.append(meeting.unique_id(timeout_s))  # noqa: E731
        self.bounded(get_id, "the trainer's store did not answer", more_s=_MORE_S)
        self.join(ids[0], meeting.rank_offset, meeting.world_size)

    def receive(self, tensors: TensorList) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors on the device as they arrive. The caller takes all of them, since the trainer sends
        all in any case. Raises BroadcastError."""
        packed = self._meeting.packed if tensors.packed is None else tensors.packed
        if not packed:
            for one in tensors.each():
                tensor = torch.empty(one.shape, dtype=one.dtype, device=self.device)
                self._receive(tensor)
                yield one.name, tensor
            return
        limit_bytes = tensors.packed_buffer_size_bytes or self._meeting.packed_buffer_size_bytes
        for together in buffers(tensors, limit_bytes):
            sizes = [one.num_bytes for one in together]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self._receive(buffer)
            for one, part in zip(together, buffer.split(sizes), strict=True):
                aligned = part if part.storage_offset() % one.dtype.itemsize == 0 else part.clone()
                yield one.name, aligned.view(one.dtype).view(one.shape)

    def _receive(self, tensor: torch.Tensor) -> None:
        self.broadcast([tensor], f"{tensor.nbytes:,} announced bytes did not arrive")
