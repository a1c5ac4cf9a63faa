"""What one forward pass of the generator sends: a header and one row per token drawn."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from inflight.core.errors import FrameError
from inflight.core.sampling import SamplingParams

FINISH_REASONS = ("stop", "length", "cancelled", "error")
MAX_HEADER_BYTES = 1 << 30

# Columns of a frame: name → little-endian dtype. All are one-dimensional with one row per token.
_COLUMNS = {"request_ids": "<u8", "token_ids": "<i4", "logprobs": "<f4"}


class GroupStart(msgspec.Struct, frozen=True):
    """A prompt was accepted: `params.n` requests with the ids first_request_id, first_request_id + 1, …"""

    group_id: int
    first_request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    metadata: dict[str, Any] = {}
    """What the submitter attached; JSON-like, carried through unread."""


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """A request ended. `reason` is one of FINISH_REASONS."""

    request_id: int
    reason: str
    num_tokens: int


class Switch(msgspec.Struct, frozen=True):
    """The engine changed weights just before this frame's forward pass."""

    version: int
    published_ns: int
    """When `publish()` was called."""
    stall_ns: int
    """Time in which the engine had work and ran no forward because of this swap."""
    num_in_flight: int
    """Requests that had drawn tokens under older weights and went on under these."""


class FrameHeader(msgspec.Struct, frozen=True):
    engine_id: str
    sequence: int
    """Counts the frames of this engine from 0 without gaps."""
    version: int
    """Weight version under which every token of the frame was drawn."""
    time_ns: int
    """CLOCK_MONOTONIC when the tokens were drawn."""
    step: int
    """Forward passes of this engine before this one."""
    num_tokens: int
    groups: list[GroupStart] = []
    starts: list[int] = []
    """Ids of requests whose prompt was prefilled in this pass."""
    finishes: list[Finish] = []
    switch: Switch | None = None
    next_group_id: int = 0
    """Groups accepted so far: all with a smaller id were announced in this frame or before it."""
    columns: list[str] = []


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """All tokens drawn in one forward pass.

    request_ids: u64[n]; token_ids: i32[n]; logprobs: f32[n], natural log of the probability that the token had in
    the distribution it was drawn from.
    """

    header: FrameHeader
    request_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray

    def encode(self) -> list[bytes]:
        """Message parts: MessagePack header, then the raw little-endian columns in the header's order."""
        header = msgspec.structs.replace(self.header, columns=list(_COLUMNS))
        columns = [np.ascontiguousarray(getattr(self, name), dtype).tobytes() for name, dtype in _COLUMNS.items()]
        return [_HEADER_ENCODER.encode(header), *columns]

    @classmethod
    def decode(cls, parts: list[bytes]) -> "TokenFrame":
        """Check every size and name against the header, then view the columns. Raises FrameError."""
        if not parts or len(parts[0]) > MAX_HEADER_BYTES:
            raise FrameError(f"a frame needs a header of at most {MAX_HEADER_BYTES} bytes")
        try:
            header = _HEADER_DECODER.decode(parts[0])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FrameError(f"the frame's header cannot be read: {error}") from error
        if header.columns != list(_COLUMNS):
            raise FrameError(f"the frame has columns {header.columns}, expected {list(_COLUMNS)}")
        if len(parts) != 1 + len(_COLUMNS):
            raise FrameError(f"the frame has {len(parts)} parts, expected {1 + len(_COLUMNS)}")
        arrays = []
        for (name, dtype), part in zip(_COLUMNS.items(), parts[1:], strict=True):
            expected = header.num_tokens * np.dtype(dtype).itemsize
            if len(part) != expected:
                raise FrameError(
                    f"column {name} has {len(part)} bytes, expected {expected} for {header.num_tokens} tokens"
                )
            arrays.append(np.frombuffer(part, dtype))
        for finish in header.finishes:
            if finish.reason not in FINISH_REASONS:
                raise FrameError(f"request {finish.request_id} has finish reason {finish.reason!r}")
        return cls(header, *arrays)


_HEADER_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(FrameHeader)
