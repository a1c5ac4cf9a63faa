"""Bit-exact difference between two versions of a slot.

A slot is read as 16-bit words. For each changed word a delta holds the distance from the previous one (u8) and the
difference of the two numbers (i8), which for bf16 is the number of representable steps; longer distances and larger
differences take more bytes. Adding the delta to the old version gives exactly the new one.

A step of Adam at 1e-6 changes about 4 % of bf16 weights; a delta then has about 5 % of the bytes.
"""

import torch

from inflight.core.errors import ProtocolError

_WORDS_PER_PART = 1 << 24
_FAR = 255
"""An entry with this distance leads to an unchanged word."""
_ESCAPE = -128
"""Marks a difference that is in the list of large ones, in their order."""


@torch.no_grad()
def encode(old: torch.Tensor, new: torch.Tensor, *, limit: float = 0.5) -> torch.Tensor | None:
    """Return u8[m] that turns `old` into `new`, both u8[n] with n even; None if it has more than limit · n bytes."""
    parts, size = [], 0
    for before, after in zip(
        old.view(torch.int16).split(_WORDS_PER_PART), new.view(torch.int16).split(_WORDS_PER_PART), strict=True
    ):
        parts.append(_encode_part(before, after))
        size += len(parts[-1])
        if size > limit * len(old):
            return None
    return torch.cat(parts)


@torch.no_grad()
def apply(slot: torch.Tensor, delta: torch.Tensor) -> None:
    """Turn the old version in `slot`, u8[n], into the new one. Raises ProtocolError for invalid deltas and leaves the
    slot undefined."""
    for words in slot.view(torch.int16).split(_WORDS_PER_PART):
        if len(delta) < 16:
            raise ProtocolError("the delta ends too early")
        entries, large = (int(number) for number in delta[:16].clone().view(torch.int64))
        end = 16 + 2 * entries + 2 * large
        if entries < 0 or large < 0 or end > len(delta):
            raise ProtocolError(f"the delta has {len(delta)} bytes, expected {end}")
        distances, steps, rest = delta[16:end].split([entries, entries, 2 * large])
        _apply_part(words, distances, steps.view(torch.int8), rest.clone().view(torch.int16))
        delta = delta[end:]
    if len(delta):
        raise ProtocolError(f"{len(delta)} bytes follow the delta's end")


def _encode_part(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return two counts (i64), distances (u8), steps (i8), large differences (i16)."""
    where = (old != new).nonzero()[:, 0]
    difference = new[where] - old[where]  # It wraps around, and so does the addition.
    distance = torch.diff(where, prepend=where.new_tensor([-1]))
    num_far = (distance - 1) // _FAR
    ends = torch.cumsum(num_far + 1, 0) - 1  # Entries that change a word.
    entries = int(ends[-1]) + 1 if len(ends) else 0
    distances = torch.full((entries,), _FAR, dtype=torch.uint8, device=old.device)
    steps = torch.zeros(entries, dtype=torch.int8, device=old.device)
    distances[ends] = (distance - num_far * _FAR).to(torch.uint8)
    is_large = (difference > 127) | (difference < -127)
    steps[ends] = torch.where(is_large, _ESCAPE, difference).to(torch.int8)
    large = difference[is_large]
    counts = torch.tensor([entries, len(large)], device=old.device)
    return torch.cat([counts.view(torch.uint8), distances, steps.view(torch.uint8), large.view(torch.uint8)])


def _apply_part(words: torch.Tensor, distances: torch.Tensor, steps: torch.Tensor, large: torch.Tensor) -> None:
    where = torch.cumsum(distances, 0, dtype=torch.int64) - 1
    is_large = steps == _ESCAPE
    if (len(where) and not (int(where[0]) >= 0 and int(where[-1]) < len(words))) or int(is_large.sum()) != len(large):
        raise ProtocolError("the delta does not fit the slot")
    difference = steps.to(torch.int16)
    difference[is_large] = large
    words[where] += difference
