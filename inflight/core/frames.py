"""Token frames: the output of one forward pass, with a header and one row per sampled token."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from inflight.core.columns import COLUMNS, MASK_OFFSETS, MOST, REQUIRED, TOKENS, find_column
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import FrameError
from inflight.core.sampling import SamplingParams

FINISH_REASONS = ("stop", "length", "cancelled", "error")
MAGIC = b"IFF1"
"""The first bytes of every frame."""
MAX_FRAME_BYTES = 1 << 30
_PREFIX = struct.Struct("<4sI")
_ALIGNMENT = 8
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that fits into the int64 of a rollout's columns."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class GroupStart(msgspec.Struct, frozen=True):
    """A prompt was accepted: `params.n` requests with the ids first_request_id, first_request_id + 1, …"""

    group_id: Count
    first_request_id: Count
    prompt_token_ids: list[TokenId]
    params: SamplingParams
    metadata: dict[str, Any] = {}
    """The submitter's mapping; JSON-like, passed through unread."""
    forked_from: tuple[int, int] | None = None
    """(request id, k): the prompt is that request's prompt and the first k tokens that it sampled."""
    banned: tuple[tuple[Count, Count], ...] = ()
    """Ranges [begin, end) of token ids, in order, that the engine never draws."""
    adapter: str | None = None
    """Name of the LoRA adapter that draws the tokens."""
    pin: Count | None = None
    """The version of the weights that draws all tokens. The tokens can carry a larger version, since their version also
    counts publishes of adapters. None: the live version at each token."""


class TakenOver(msgspec.Struct, frozen=True, array_like=True):
    """The keys and values of a request's first prompt tokens were reused from the prefix cache or from the request that
    it was forked from. `version` is the oldest version that computed some of them."""

    request_id: Count
    num_tokens: Count
    version: Count


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """A request ended. `reason` is one of FINISH_REASONS."""

    request_id: int
    reason: str
    num_tokens: int


class Swap(msgspec.Struct, frozen=True):
    """The engine changed weights just before this frame's forward pass."""

    version: Count
    published_ns: Count
    """When `publish()` was called."""
    stall_ns: Count
    """Time in which the engine had work and ran no forward because of this swap."""
    num_in_flight: Count
    """Requests with tokens of older weights that continue under the new ones."""


class ColumnSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class FrameHeader(msgspec.Struct, frozen=True):
    engine_id: str
    sequence: Count
    """Counts the frames of this engine from 0 without gaps."""
    version: Count
    """Weight version under which every token of the frame was sampled."""
    time_ns: Count
    """CLOCK_MONOTONIC when the tokens were sampled."""
    step: Count
    """Number of earlier forward passes of this engine."""
    num_tokens: Count
    groups: list[GroupStart] = []
    starts: list[int] = []
    """Ids of requests whose prefill ended in this pass."""
    taken_over: list[TakenOver] = []
    """Reused prefixes of requests that joined in this pass, for the first time or again."""
    finishes: list[Finish] = []
    swap: Swap | None = None
    next_group_id: Count = 0
    """Number of groups accepted so far. All smaller ids were announced in this frame or in an earlier one."""
    columns: list[ColumnSpec] = []


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """All tokens sampled in one forward pass.

    request_ids: u64[n]; token_ids: i32[n]; logprobs: f32[n], natural log of the token's probability in the distribution
    that was sampled. `extras` maps the names of other columns (`core/columns.py`) to their values. A column is present
    if a request of the pass asked for it:

    - entropies f32[n], NaN for requests that did not ask;
    - top_token_ids i32[n, k] and top_logprobs f32[n, k], the most likely tokens first, padded by −1 and −inf;
    - the sampling mask (`SamplingMask`): mask_token_ids i32[…], mask_offsets i64[n + 1], and mask_cut_from i32[n] if
      some ids are the removed tokens;
    - routed_experts u8 or u16[m, layers, k] of the m tokens that this pass computed, with routed_request_ids u64[m] and
      routed_positions i32[m];
    - scores of s prompt tokens (`PromptScores`): scored_logprobs f32[s] and so on, with scored_request_ids u64[s] and
      scored_positions i32[s], the positions of the tokens before them;
    - custom columns, [n].
    """

    header: FrameHeader
    request_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return one message: a magic word, the header's length, the header as MessagePack, and the columns,
        little-endian, each at a multiple of 8 bytes."""
        required = [np.ascontiguousarray(getattr(self, name), COLUMNS[name].dtypes[0]) for name in REQUIRED]
        extras = {n: np.ascontiguousarray(column, _wire_dtype(n, column.dtype)) for n, column in self.extras.items()}
        specs = [ColumnSpec(name, column.dtype.str, column.shape) for name, column in extras.items()]
        header = _HEADER_ENCODER.encode(msgspec.structs.replace(self.header, columns=specs) if specs else self.header)
        parts = [_PREFIX.pack(MAGIC, len(header)), header, bytes(-len(header) % _ALIGNMENT)]
        for column in (*required, *extras.values()):
            parts += [column.tobytes(), bytes(-column.nbytes % _ALIGNMENT)]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> "TokenFrame":
        """Check every name, type and size against the header, then view the columns. Raises FrameError."""
        header, at = _header(data)
        required = []
        for name, dtype in _REQUIRED_DTYPES.items():
            end = at + header.num_tokens * dtype.itemsize
            if end > len(data):
                raise FrameError(f"column {name} has {header.num_tokens} values, of which {len(data) - at} bytes came")
            required.append(np.frombuffer(data, dtype, header.num_tokens, at))
            at = end + -end % _ALIGNMENT
        extras, at = _extras(header, data, at) if header.columns else ({}, at)
        if at != len(data):
            raise FrameError(f"the frame has {len(data)} bytes, expected {at}")
        for finish in header.finishes:
            if finish.reason not in FINISH_REASONS:
                raise FrameError(f"request {finish.request_id} has finish reason {finish.reason!r}")
        return cls(header, *required, extras=extras)


def _header(data: bytes) -> tuple[FrameHeader, int]:
    """Return the header of a frame and the offset of its columns."""
    if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise FrameError(f"{len(data)} bytes that do not begin as a frame does")
    end = _PREFIX.size + _PREFIX.unpack_from(data)[1]
    if end > len(data):
        raise FrameError(f"the frame has {len(data)} bytes, and {end} with its header alone")
    try:
        return _HEADER_DECODER.decode(memoryview(data)[_PREFIX.size : end]), end + -end % _ALIGNMENT
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError(f"the frame's header cannot be read: {error}") from error


def _extras(header: FrameHeader, data: bytes, at: int) -> tuple[dict[str, np.ndarray], int]:
    """View the bytes from `at` on as the optional columns. Returns them and the offset of their end."""
    names = [spec.name for spec in header.columns]
    if len(set(names)) < len(names) or not set(names).isdisjoint(REQUIRED):
        raise FrameError(f"the frame has columns {[*REQUIRED, *names]}; it can have each one once")
    sizes = {TOKENS: header.num_tokens, MASK_OFFSETS: header.num_tokens + 1}
    columns: dict[str, np.ndarray] = {}
    for spec in header.columns:
        columns[spec.name] = column = _column(spec, data, at, sizes)
        at += column.nbytes + -column.nbytes % _ALIGNMENT
    for name in columns:
        missing = [other for other in COLUMNS[name].needs if other not in columns] if name in COLUMNS else None
        if missing:
            raise FrameError(f"column {name} comes without {', '.join(missing)}")
    if "mask_offsets" in columns:
        _check_mask(columns["mask_offsets"], columns["mask_token_ids"], columns.get("mask_cut_from"))
    return columns, at


def _wire_dtype(name: str, dtype: np.dtype) -> str:
    column = find_column(name)
    if column is None:
        raise FrameError(f"{name!r} cannot be the name of a column")
    first, *others = column.dtypes
    return dtype.newbyteorder("<").str if others else first


def _column(spec: ColumnSpec, data: bytes, at: int, sizes: dict[str, int]) -> np.ndarray:
    """View the bytes from `at` on as a column. Adds the sizes of new dimensions to `sizes`."""
    column = find_column(spec.name)
    if column is None:
        raise FrameError(f"the frame has an unknown column {spec.name!r}")
    dtype = spec.dtype.replace("|", "<")
    if dtype not in column.dtypes or len(spec.shape) != len(column.dims) or min(spec.shape) < 0:
        raise FrameError(
            f"column {spec.name} has dtype {spec.dtype} and shape {list(spec.shape)}, "
            f"expected {' or '.join(column.dtypes)} in {len(column.dims)} dimensions"
        )
    count = math.prod(spec.shape)
    if at + count * np.dtype(dtype).itemsize > len(data):
        raise FrameError(f"column {spec.name} has shape {list(spec.shape)}, of which {len(data) - at} bytes came")
    for dim, size in zip(column.dims, spec.shape, strict=True):
        if size > MOST.get(dim, MAX_FRAME_BYTES):  # next to a dimension of 0, the number of bytes bounds nothing
            raise FrameError(f"column {spec.name} has shape {list(spec.shape)}, which is too large")
        if size != sizes.setdefault(dim, size):
            raise FrameError(f"column {spec.name} has shape {list(spec.shape)}, expected {sizes[dim]} {dim}")
    return np.frombuffer(data, dtype, count, at).reshape(spec.shape)


def _check_mask(offsets: np.ndarray, token_ids: np.ndarray, cut_from: np.ndarray | None) -> None:
    if offsets[0] != 0 or offsets[-1] != len(token_ids) or (offsets[1:] < offsets[:-1]).any():
        raise FrameError("column mask_offsets does not rise from 0 to the number of mask_token_ids")
    counts = np.diff(offsets)
    if cut_from is not None and ((cut_from < 0) | ((cut_from > 0) & (counts >= cut_from))).any():
        raise FrameError("column mask_cut_from gives vocabularies without a remaining token")


_REQUIRED_DTYPES = {name: np.dtype(COLUMNS[name].dtypes[0]) for name in REQUIRED}
_HEADER_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgpack_decoder(FrameHeader)
