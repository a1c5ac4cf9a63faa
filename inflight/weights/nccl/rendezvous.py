"""The rendezvous of vLLM's protocol: the trainer hosts a TCPStore with the id of the group.

The id is a pickled object of a vLLM class. Since it arrives over a network, it is read without running any code. The
protocol is the one of vLLM 0.24 to 0.33: vllm/distributed/utils.py (StatelessProcessGroup) and
device_communicators/pynccl.py.
"""

import base64
import binascii
import io
import pickle
import pickletools
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from torch.distributed import DistError, TCPStore

from inflight.core.errors import BroadcastError, InvalidRequestError
from inflight.weights.nccl.library import ID_BYTES

_KEY = "broadcast_from/0/0"
_MOST_PICKLED_BYTES = 4096
_CLASS = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
_MAKER = ("_ctypes", "_unpickle")
DEFAULT_BUFFER_BYTES = 1 << 30


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The group that a trainer makes: `init_info` of /init_weight_transfer_engine."""

    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int
    world_size: int
    nccl_unique_id_b64: str | None = None
    """The id, if the trainer hosts no store."""
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES
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
        assert self.master_address is not None
        assert self.master_port is not None
        limit = timedelta(seconds=timeout_s)
        where = f"{self.master_address[:200]}:{self.master_port}"
        try:
            store = TCPStore(
                self.master_address, self.master_port, self.world_size, is_master=False, timeout=limit, use_libuv=False
            )
            store.set_timeout(limit)
            data = bytes(store.get(_KEY))
        except (DistError, RuntimeError, ValueError) as error:
            raise BroadcastError(
                f"the trainer's store at {where} was not met within {timeout_s:.0f} s: {error}"
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
        raise InvalidRequestError(f"what the trainer left as the group's id has {len(data):,} bytes, and is none")
    try:
        unknown = {opcode.name for opcode, _, _ in pickletools.genops(data)} - _OPCODES
        if unknown:
            raise pickle.UnpicklingError(f"it has {', '.join(sorted(unknown))}")
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # Broken pickles raise many kinds of errors.
        raise InvalidRequestError(f"what the trainer left as the group's id is none: {error}") from error
    return _checked(found.data if isinstance(found, _Id) else None)


def _checked(found: object) -> bytes:
    if not isinstance(found, bytes) or len(found) != ID_BYTES:
        raise InvalidRequestError(f"what came as the group's id is none: it has {ID_BYTES} bytes")
    return found
