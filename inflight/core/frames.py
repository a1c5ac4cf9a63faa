"""What one forward pass of the generator sends: a header and one row per sampled token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from inflight.core.columns import COLUMNS, MASK_OFFSETS, REQUIRED, TOKENS, find_column
from inflight.core.errors import FrameError
from inflight.core.sampling import SamplingParams

FINISH_REASONS = ("stop", "length", "cancelled", "error")
MAX_HEADER_BYTES = 1 << 30
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
    """The mapping that the submitter attached; JSON-like, carried through unread."""
    forked_from: tuple[int, int] | None = None
    """(request id, k): the prompt is that request's prompt and the first k tokens that it sampled."""


class TakenOver(msgspec.Struct, frozen=True, array_like=True):
    """The keys and values of a request's first prompt tokens were not computed for it: the prefix cache had them, or
    the request that it is a fork of. `version` is the oldest that computed some of them."""

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
    """Requests that had sampled tokens under older weights and went on under these."""


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
    """Forward passes of this engine before this one."""
    num_tokens: Count
    groups: list[GroupStart] = []
    starts: list[int] = []
    """Ids of requests whose prompt was prefilled in this pass."""
    taken_over: list[TakenOver] = []
    """Prefixes of requests that joined in this pass, for the first time or again."""
    finishes: list[Finish] = []
    swap: Swap | None = None
    next_group_id: Count = 0
    """Groups accepted so far: all with a smaller id were announced in this frame or before it."""
    columns: list[ColumnSpec] = []


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """All tokens sampled in one forward pass.

    request_ids: u64[n]; token_ids: i32[n]; logprobs: f32[n], natural log of the probability that the token had in
    the distribution it was sampled from. `extras` maps names of other columns (`core/columns.py`) to their values; a
    column is there if a request of the pass asked for it:

    entropies f32[n], NaN for tokens that have none; top_token_ids i32[n, k] and top_logprobs f32[n, k], the most likely
    tokens first, −1 and −inf beyond what a request asked for; the sampling mask as mask_token_ids i32[…], mask_offsets
    i64[n + 1] and, where some ids are those that were cut, mask_cut_from i32[n] (`SamplingMask`); routed_experts u8 or
    u16[m, layers, k], the experts of the m tokens that this pass computed, with routed_request_ids u64[m] and
    routed_positions i32[m], their places in their sequences. A user's own columns are [n].
    """

    header: FrameHeader
    request_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def encode(self) -> list[bytes]:
        """Message parts: MessagePack header, then the raw little-endian columns in the header's order."""
        columns = {name: getattr(self, name) for name in REQUIRED} | dict(self.extras)
        arrays = [np.ascontiguousarray(column, _wire_dtype(name, column.dtype)) for name, column in columns.items()]
        specs = [ColumnSpec(name, a.dtype.str, a.shape) for name, a in zip(columns, arrays, strict=True)]
        header = msgspec.structs.replace(self.header, columns=specs)
        return [_HEADER_ENCODER.encode(header), *(array.tobytes() for array in arrays)]

    @classmethod
    def decode(cls, parts: list[bytes]) -> "TokenFrame":
        """Check every name, type and size against the header, then view the columns. Raises FrameError."""
        if not parts or len(parts[0]) > MAX_HEADER_BYTES:
            raise FrameError(f"a frame needs a header of at most {MAX_HEADER_BYTES} bytes")
        try:
            header = _HEADER_DECODER.decode(parts[0])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FrameError(f"the frame's header cannot be read: {error}") from error
        names = [spec.name for spec in header.columns]
        if tuple(names[:3]) != REQUIRED or len(set(names)) != len(names):
            raise FrameError(f"the frame has columns {names}, expected {list(REQUIRED)} and then others, once each")
        if len(parts) != 1 + len(names):
            raise FrameError(f"the frame has {len(parts)} parts, expected {1 + len(names)}")
        sizes = {TOKENS: header.num_tokens, MASK_OFFSETS: header.num_tokens + 1}
        columns = {s.name: _column(s, part, sizes) for s, part in zip(header.columns, parts[1:], strict=True)}
        if len(columns) > len(REQUIRED):
            _check_extras(columns)
        for finish in header.finishes:
            if finish.reason not in FINISH_REASONS:
                raise FrameError(f"request {finish.request_id} has finish reason {finish.reason!r}")
        return cls(header, *[columns.pop(name) for name in REQUIRED], extras=columns)


def _wire_dtype(name: str, dtype: np.dtype) -> str:
    column = find_column(name)
    if column is None:
        raise FrameError(f"{name!r} cannot be the name of a column")
    first, *others = column.dtypes
    return dtype.newbyteorder("<").str if others else first


def _column(spec: ColumnSpec, part: bytes, sizes: dict[str, int]) -> np.ndarray:
    """View the bytes of a column as an array. `sizes` maps names of dimensions to sizes, and learns new ones."""
    column = find_column(spec.name)
    if column is None:
        raise FrameError(f"the frame has an unknown column {spec.name!r}")
    dtype = spec.dtype.replace("|", "<")
    if dtype not in column.dtypes or len(spec.shape) != len(column.dims) or min(spec.shape) < 0:
        raise FrameError(
            f"column {spec.name} has dtype {spec.dtype} and shape {list(spec.shape)}, "
            f"expected {' or '.join(column.dtypes)} in {len(column.dims)} dimensions"
        )
    expected = math.prod(spec.shape) * np.dtype(dtype).itemsize
    if len(part) != expected:
        raise FrameError(f"column {spec.name} has {len(part)} bytes, expected {expected} for shape {list(spec.shape)}")
    for dim, size in zip(column.dims, spec.shape, strict=True):
        if size != sizes.setdefault(dim, size):
            raise FrameError(f"column {spec.name} has shape {list(spec.shape)}, expected {sizes[dim]} {dim}")
    return np.frombuffer(part, dtype).reshape(spec.shape)


def _check_extras(columns: dict[str, np.ndarray]) -> None:
    for name in columns:
        missing = [other for other in COLUMNS[name].needs if other not in columns] if name in COLUMNS else None
        if missing:
            raise FrameError(f"column {name} comes without {', '.join(missing)}")
    if "mask_offsets" in columns:
        _check_mask(columns["mask_offsets"], columns["mask_token_ids"], columns.get("mask_cut_from"))


def _check_mask(offsets: np.ndarray, token_ids: np.ndarray, cut_from: np.ndarray | None) -> None:
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(token_ids) or (counts < 0).any():
        raise FrameError("column mask_offsets does not rise from 0 to the number of mask_token_ids")
    if cut_from is not None and ((cut_from < 0) | ((cut_from > 0) & (counts >= cut_from))).any():
        raise FrameError("column mask_cut_from tells of vocabularies of which nothing was left")


_HEADER_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(FrameHeader)
