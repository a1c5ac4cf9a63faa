"""What Triton would compile at a first request for it, while all others wait for a second, is compiled at start.

Passes warm themselves up: one is computed in eager mode when the model is checked, and all that are recorded as graphs.
FlashInfer's kernels are loaded when they are compared with PyTorch's.
"""

from collections.abc import Iterable

import torch
from inflight_kernels import draw

from inflight.engine.cache.memory import KVMemory


@torch.inference_mode()
def warm_up(dtypes: Iterable[torch.dtype], vocab_size: int, memory: KVMemory) -> None:
    """Draw from logits [1, vocab_size] of each dtype, without entropies and with them, and copy a block of each group
    to block 0, which belongs to nobody. On a CPU there is nothing to compile, and nothing is done."""
    device = memory.device
    if device.type != "cuda":
        return
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for dtype in dtypes:
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
        for entropy in (False, True):
            draw(logits, torch.ones(1, device=device), index, index, entropy=entropy)
    memory.copy_blocks([{0: 1} for _ in memory.pools])
