"""Rollouts as bytes, for another process or for a file: arrays as safetensors, other fields as MessagePack."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from inflight.core.arguments import plain_number
from inflight.core.columns import SCORES
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InvalidRequestError, ProtocolError
from inflight.core.rollout import PromptScores, Rollout, SamplingMask, Turn
from inflight.core.sampling import SamplingParams

_LENGTH = struct.Struct("<I")
_ARRAYS = ("prompt_token_ids", "token_ids", "logprobs", "weight_versions", "sampled_at_ns")
_MASK_ARRAYS = ("token_ids", "offsets", "cut_from")
Arrays = dict[str, np.ndarray]
Header = TypeVar("Header", bound=msgspec.Struct)


class RolloutHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a rollout other than its arrays."""

    request_id: int
    group_id: int
    sample: int
    params: SamplingParams
    metadata: dict[str, Any]
    finish_reason: str
    turns: tuple[Turn, ...] = ()
    forked_from: tuple[int, int] | None
    prefix_tokens: int
    prefix_version: int | None
    banned: tuple[tuple[int, int], ...] = ()
    adapter: str | None = None
    prompt: str
    text: str
    reward: float | None
    rewards: dict[str, float] = {}


def header_of(rollout: Rollout) -> RolloutHeader:
    """Return the fields of a rollout other than its arrays."""
    return RolloutHeader(**{name: getattr(rollout, name) for name in RolloutHeader.__struct_fields__})


def arrays_of(rollout: Rollout) -> Arrays:
    """Return the arrays of a rollout by their names."""
    arrays = {name: getattr(rollout, name) for name in (*_ARRAYS, "routed_experts")}
    arrays |= {f"columns/{name}": column for name, column in rollout.columns.items()}
    if rollout.sampling_mask is not None:
        arrays |= {f"mask/{name}": getattr(rollout.sampling_mask, name) for name in _MASK_ARRAYS}
    if rollout.prompt_scores is not None:
        arrays |= {f"scores/{name}": getattr(rollout.prompt_scores, name) for name in SCORES}
    return {name: array for name, array in arrays.items() if array is not None}


def make_rollout(header: RolloutHeader, arrays: Mapping[str, np.ndarray]) -> Rollout:
    """Return the rollout of this header and these arrays. Raises KeyError if an array is missing."""
    mask = {name: arrays.get(f"mask/{name}") for name in _MASK_ARRAYS}
    scores = [arrays[f"scores/{name}"] for name in SCORES] if "scores/logprobs" in arrays else None
    plain: dict[str, Any] = msgspec.structs.asdict(header) | {name: arrays[name] for name in _ARRAYS}
    return Rollout(
        **plain,
        routed_experts=arrays.get("routed_experts"),
        columns={path.removeprefix("columns/"): a for path, a in arrays.items() if path.startswith("columns/")},
        sampling_mask=None if mask["offsets"] is None else SamplingMask(**mask),  # pyright: ignore
        prompt_scores=None if scores is None else PromptScores(*scores),
    )


def encode_header(header: msgspec.Struct) -> bytes:
    """Encode fields without arrays. Numbers of NumPy and PyTorch become plain ones. Raises InvalidRequestError for
    values that cannot be encoded, or not be decoded, such as keys that are not strings."""
    try:
        plain = msgspec.msgpack.encode(header, enc_hook=plain_number)
        msgpack_decoder(type(header)).decode(plain)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(
            f"metadata, text, reward or progress cannot be written down: {error}; they must be JSON-like"
        ) from error
    return plain


def encode(header: msgspec.Struct, arrays: Sequence[Mapping[str, np.ndarray]]) -> bytes:
    """Encode one message: the length of the header, the header, and the arrays, one mapping after another.

    Raises InvalidRequestError, as `encode_header`."""
    plain = encode_header(header)
    named = {f"{i}/{name}": np.ascontiguousarray(a) for i, of_one in enumerate(arrays) for name, a in of_one.items()}
    return b"".join([_LENGTH.pack(len(plain)), plain, save(named)])


def decode(data: bytes, kind: type[Header], count: Callable[[Header], int]) -> tuple[Header, list[Arrays]]:
    """Decode a message of `encode`: a header of this kind, and its mappings of arrays. count: returns the number of
    mappings for a header. Raises ProtocolError for other data."""
    end = _LENGTH.size + (_LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0)
    try:
        header = msgpack_decoder(kind).decode(data[_LENGTH.size : end])
        arrays: dict[str, Arrays] = {str(i): {} for i in range(count(header))}
        for path, array in load(data[end:]).items():
            index, name = path.split("/", 1)
            arrays[index][name] = array
    except (msgspec.DecodeError, SafetensorError, LookupError, ValueError, RecursionError) as error:
        raise ProtocolError(f"rollouts cannot be read: {error!r}") from error
    return header, list(arrays.values())
