"""What a mask of Transformers would show, noted in place of the mask.

Attention that knows which tokens belong together needs no mask, but it has to know how far back a token sees: some
models tell that by an argument, others by the mask alone.
"""

from collections.abc import Callable
from typing import Any

import torch

from inflight.core.errors import UnsupportedModelError

BOTH_SIDES = -1
"""Noted where tokens see later ones."""


def mask_note(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> torch.Tensor:
    """The mask function that Transformers calls: i64[1, 1, 1, 1], the sliding window, 0 for none, or BOTH_SIDES.

    It has the dimensions of a mask, since some models take a slice of theirs, and lies on the CPU."""
    first, second = torch.tensor(0), torch.tensor(1)
    sees_later = bool(mask_function(0, 0, first, second))
    return torch.full((1, 1, 1, 1), BOTH_SIDES if sees_later else local_size or 0, device="cpu")


def noted(mask: torch.Tensor | None, caller: str) -> int | None:
    """What `mask_note` noted, or None where there is no mask. Raises UnsupportedModelError for any other mask."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64 or mask.ndim != 4:
        raise UnsupportedModelError(f"{caller} hands a mask of its own to its attention")
    return int(mask[0, 0, 0, 0])
