"""Dequantises fp8 weights whose shape is not a multiple of the block size, such as DeepSeek V3's `kv_a_proj_with_mqa`.

Transformers divides a tensor into as many equal blocks as it has scales: it refuses 576 rows with 5 scales for blocks
of 128, and gives 200 rows with 2 scales blocks of 100.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

_changing = threading.Lock()


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Within the block, let Transformers dequantise by the size of blocks that the config of a checkpoint has."""
    original: Any = Fp8Dequantize._dequantize_one

    def dequantize(
        self: Any, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rows, columns = quantized.shape[-2:]
        sizes = getattr(self.hf_quantizer.quantization_config, "weight_block_size", None)
        if sizes is None or quantized.itemsize != 1 or not quantized.is_floating_point():
            return original(self, quantized, scales, output_dtype)
        blocks = [-(-count // size) for count, size in zip((rows, columns), sizes, strict=True)]
        whole = [count * size for count, size in zip(blocks, sizes, strict=True)]
        if list(scales.shape[-2:]) != blocks or whole == [rows, columns]:
            return original(self, quantized, scales, output_dtype)
        padded = quantized.new_zeros((*quantized.shape[:-2], *whole))
        padded[..., :rows, :columns] = quantized
        return original(self, padded, scales, output_dtype)[..., :rows, :columns].contiguous()

    with _changing:
        Fp8Dequantize._dequantize_one = dequantize
        try:
            yield
        finally:
            Fp8Dequantize._dequantize_one = original
