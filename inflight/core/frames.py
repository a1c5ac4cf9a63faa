"""What one forward pass of the generator sends: a header and one row per token drawn."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from inflight.core.errors import FrameError
from inflight.core.sampling import SamplingParams

FINISH_REASONS = ("stop", "length", "cancelled", "error")
MAX_HEADER_BYTES = 1 << 30
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""What fits into the int64 of a rollout's columns."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

# Columns of a frame: name → (little-endian dtypes, number of dimensions). The first three are always there.
_COLUMNS = {
    "request_ids": (("<u8",), 1),
    "token_ids": (("<i4",), 1),
    "logprobs": (("<f4",), 1),
    "entropies": (("<f4",), 1),
    "top_token_ids": (("<i4",), 2),
    "top_logprobs": (("<f4",), 2),
    "mask_offsets": (("<i8",), 1),
    "mask_token_ids": (("<i4",), 1),
    "mask_cut_from": (("<i4",), 1),
    "routed_request_ids": (("<u8",), 1),
    "routed_positions": (("<i4",), 1),
    "routed_experts": (("<u1", "<u2"), 3),
}
_REQUIRED = tuple(_COLUMNS)[:3]
_TOGETHER = (
    ("top_token_ids", "top_logprobs"),
    ("mask_offsets", "mask_token_ids"),
    ("routed_request_ids", "routed_positions", "routed_experts"),
)


class GroupStart(msgspec.Struct, frozen=True):
    """A prompt was accepted: `params.n` requests with the ids first_request_id, first_request_id + 1, …"""

    group_id: Count
    first_request_id: Count
    prompt_token_ids: list[TokenId]
    params: SamplingParams
    metadata: dict[str, Any] = {}
    """What the submitter attached; JSON-like, carried through unread."""
    forked_from: tuple[int, int] | None = None
    """(request id, k): the prompt is that request's prompt and the first k tokens that it drew."""


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
    """Requests that had drawn tokens under older weights and went on under these."""


class ColumnSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class FrameHeader(msgspec.Struct, frozen=True):
    engine_id: str
    sequence: Count
    """Counts the frames of this engine from 0 without gaps."""
    version: Count
    """Weight version under which every token of the frame was drawn."""
    time_ns: Count
    """CLOCK_MONOTONIC when the tokens were drawn."""
    step: Count
    """Forward passes of this engine before this one."""
    num_tokens: Count
    groups: list[GroupStart] = []
    starts: list[int] = []
    """Ids of requests whose prompt was prefilled in this pass."""
    taken_over: list[TakenOver] = []
    """Of requests that joined in this pass, for the first time or again."""
    finishes: list[Finish] = []
    swap: Swap | None = None
    next_group_id: Count = 0
    """Groups accepted so far: all with a smaller id were announced in this frame or before it."""
    columns: list[ColumnSpec] = []


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """All tokens drawn in one forward pass.

    request_ids: u64[n]; token_ids: i32[n]; logprobs: f32[n], natural log of the probability that the token had in
    the distribution it was drawn from. `extras` holds what requests asked for, and only then:

    entropies f32[n], NaN where not asked for; top_token_ids i32[n, k] and top_logprobs f32[n, k], the most likely
    tokens first, −1 and −inf beyond what a request asked for; mask_offsets i64[n + 1] and mask_token_ids i32[…], the
    tokens that the filters kept for row i being those from offset i to i + 1, none where nothing was filtered or asked
    for; mask_cut_from i32[n], 0, or the size of a vocabulary where these ids are those that were cut from it;
    routed_experts u8 or u16[m, layers, k], the experts of the m tokens that this pass computed, with routed_request_ids
    u64[m] and routed_positions i32[m], their places in their sequences.
    """

    header: FrameHeader
    request_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def encode(self) -> list[bytes]:
        """Message parts: MessagePack header, then the raw little-endian columns in the header's order."""
        columns = {name: getattr(self, name) for name in _REQUIRED} | dict(self.extras)
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
        if tuple(names[:3]) != _REQUIRED or len(set(names)) != len(names):
            raise FrameError(f"the frame has columns {names}, expected {list(_REQUIRED)} and then others, once each")
        if len(parts) != 1 + len(names):
            raise FrameError(f"the frame has {len(parts)} parts, expected {1 + len(names)}")
        columns = {s.name: _column(s, part) for s, part in zip(header.columns, parts[1:], strict=True)}
        _check_shapes(columns, header.num_tokens)
        for finish in header.finishes:
            if finish.reason not in FINISH_REASONS:
                raise FrameError(f"request {finish.request_id} has finish reason {finish.reason!r}")
        required = [columns.pop(name) for name in _REQUIRED]
        return cls(header, *required, extras=columns)


def _wire_dtype(name: str, dtype: np.dtype) -> str:
    allowed = _COLUMNS[name][0]
    return dtype.newbyteorder("<").str if len(allowed) > 1 else allowed[0]


def _column(spec: ColumnSpec, part: bytes) -> np.ndarray:
    if spec.name not in _COLUMNS:
        raise FrameError(f"the frame has an unknown column {spec.name!r}")
    dtypes, dimensions = _COLUMNS[spec.name]
    dtype = spec.dtype.replace("|", "<")
    if dtype not in dtypes or len(spec.shape) != dimensions or min(spec.shape) < 0:
        raise FrameError(
            f"column {spec.name} has dtype {spec.dtype} and shape {list(spec.shape)}, "
            f"expected {' or '.join(dtypes)} in {dimensions} dimensions"
        )
    expected = math.prod(spec.shape) * np.dtype(dtype).itemsize
    if len(part) != expected:
        raise FrameError(f"column {spec.name} has {len(part)} bytes, expected {expected} for shape {list(spec.shape)}")
    return np.frombuffer(part, dtype).reshape(spec.shape)


def _check_shapes(columns: dict[str, np.ndarray], num_tokens: int) -> None:
    for family in _TOGETHER:
        there = [name for name in family if name in columns]
        if there and len(there) < len(family):
            raise FrameError(f"column {there[0]} comes without {', '.join(sorted(set(family) - set(there)))}")
    rows = {"mask_offsets": num_tokens + 1, "mask_cut_from": num_tokens}
    for name, column in columns.items():
        expected = rows.get(name, None if name.startswith(("routed", "mask")) else num_tokens)
        if expected is not None and len(column) != expected:
            raise FrameError(f"column {name} has {len(column)} rows, expected {expected} for {num_tokens} tokens")
    if "top_token_ids" in columns and columns["top_token_ids"].shape != columns["top_logprobs"].shape:
        raise FrameError("columns top_token_ids and top_logprobs differ in shape")
    if "routed_experts" in columns and len({len(columns[name]) for name in _TOGETHER[2]}) > 1:
        raise FrameError("the columns of the routing differ in length")
    if "mask_offsets" in columns:
        offsets = columns["mask_offsets"]
        if offsets[0] != 0 or offsets[-1] != len(columns["mask_token_ids"]) or (np.diff(offsets) < 0).any():
            raise FrameError("column mask_offsets does not rise from 0 to the number of kept tokens")
    if "mask_cut_from" in columns:
        if "mask_offsets" not in columns:
            raise FrameError("column mask_cut_from comes without mask_offsets")
        of, counts = columns["mask_cut_from"], np.diff(columns["mask_offsets"])
        if ((of < 0) | ((of > 0) & (counts >= of))).any():
            raise FrameError("column mask_cut_from tells of vocabularies of which nothing was kept")


_HEADER_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(FrameHeader)
