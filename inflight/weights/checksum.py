"""A checksum that CPUs and GPUs compute alike, at the speed of memory."""

from functools import lru_cache

import torch
import torch.nn.functional as F

_WORDS = 1 << 18
_ODD = 0x9E3779B97F4A7C15


@torch.no_grad()
def checksum(buffer: torch.Tensor) -> int:
    """Of u8[n]: 64 bits, the sum of its words times odd weights that differ from place to place.

    Any change of one word, and nearly any of several, changes it; it is no protection against forgery.
    """
    buffer = F.pad(buffer, (0, -len(buffer) % 8)) if len(buffer) % 8 else buffer
    words, weights = buffer.view(torch.int64), _weights(buffer.device)
    total = torch.tensor(len(words), device=buffer.device)
    for chunk in words.split(_WORDS):
        total = total * _signed(_ODD) + (chunk * weights[: len(chunk)]).sum()
    return int(total) % 2**64


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    return (torch.arange(1, _WORDS + 1, device=device) * _signed(_ODD)) | 1


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
