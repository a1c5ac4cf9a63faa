"""Compiles the Triton kernels of sampling and block copies at start. Otherwise the first request that needs one would
compile it, while all other requests wait for a second.

Passes warm up on their own: one is computed in eager mode when the model is checked, and all recorded passes run during
the recording. FlashInfer's kernels are loaded when they are compared with PyTorch's.
"""

from collections.abc import Iterable

import torch
from inflight_kernels import Filters, Penalties, cut_logits, draw, penalize

from inflight.engine.cache.memory import KVMemory


@torch.inference_mode()
def warm_up(dtypes: Iterable[torch.dtype], vocab_size: int, memory: KVMemory) -> None:
    """Draw from logits [1, vocab_size] of each dtype, without and with entropies, filter and penalise logits, and copy
    a block of each group to block 0, the block without a sequence. Do nothing on a CPU."""
    device = memory.device
    if device.type != "cuda":
        return
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for dtype in dtypes:
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
        for entropy in (False, True):
            draw(logits, torch.ones(1, device=device), index, index, entropy=entropy)
    ones = torch.ones(1, device=device)
    logits = torch.zeros(1, vocab_size, device=device)
    penalize(logits, logits > 0, Penalties(index, index, ones))
    cut_logits(logits, Filters(index, ones, index + 1, ones.double(), ones))
    memory.copy_blocks([{0: 1} for _ in memory.pools])
