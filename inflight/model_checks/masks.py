"""Notes that replace the masks of Transformers.

Packed attention needs no mask, but it has to know how many earlier tokens a token sees. Some models pass this number as
an argument, others only in the mask.
"""

from collections.abc import Callable
from typing import Any

import torch

from inflight.core.errors import UnsupportedModelError

BOTH_SIDES = -1
"""Note for attention to later tokens."""


def mask_note(
    *,
    mask_function: Callable[..., Any],
    batch_size: int,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return i64[B, 1, Q, K] on the CPU: a single number, expanded to the size of the mask. It is the sliding window, 0
    for none, or BOTH_SIDES. Transformers calls this as its mask function."""
    if kv_length > 1 and bool(mask_function(0, 0, torch.tensor(0), torch.tensor(1))):
        local_size = BOTH_SIDES
    return torch.tensor(local_size or 0, device="cpu").expand(batch_size, 1, q_length, kv_length)


def noted(mask: torch.Tensor | None, caller: str) -> int | None:
    """Return the note of `mask_note`, or None without a mask. Raises UnsupportedModelError for any other mask."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64 or mask.ndim != 4:
        raise UnsupportedModelError(f"{caller} hands a mask of its own to its attention")
    return int(mask[0, 0, 0, 0])
