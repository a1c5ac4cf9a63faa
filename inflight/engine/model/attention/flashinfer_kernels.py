"""Table of FlashInfer's kernels for attention. An environment variable can override it.

    INFLIGHT_FLASHINFER=decode=tensor_cores,prefill=fa3

Single tokens (`decode`) are computed by CUDA cores or by the tensor cores of FlashAttention 2; the chunks of prompts
(`prefill`) by FlashAttention 2 or 3. `benchmarks/gpu/kernel_bench.py` measures all of them.
"""

import os
from typing import NamedTuple

from inflight.core.errors import UnsupportedModelError
from inflight.engine.cache.kinds import LayerShape

VARIABLE = "INFLIGHT_FLASHINFER"
_TENSOR_CORES_FROM = 2
"""Query heads per KV head from which on tensor cores are used. For 2 and heads of 128 they take 0.92 of the time of
CUDA cores on an H200, for 4 0.66 (benchmarks/results/h200/kernels.json)."""
_HOPPER = 9
"""Major compute capability of the H100 and the H200."""
_CHOICES = {"decode": ("cuda_cores", "tensor_cores"), "prefill": ("fa2", "fa3")}


class Kernels(NamedTuple):
    """Kernels for the layers of one shape."""

    decode: str
    """"cuda_cores" (1, 2, 3, 4 or 8 query heads per KV head in 0.6.14), or "tensor_cores" (FlashAttention 2)."""
    prefill: str
    """"fa2" or "fa3". The latter runs on Hopper only. For heads of 128 it takes 0.63 of the time of "fa2" on an
    H200."""


def kernels_for(layer: LayerShape, capability: int) -> Kernels:
    """Return the kernels for a layer on a GPU of this major compute capability: from the table, or the kernels that
    INFLIGHT_FLASHINFER names. Raises UnsupportedModelError for an unknown name."""
    items = filter(None, os.environ.get(VARIABLE, "").replace(" ", "").split(","))
    asked = {what: kernel for what, _, kernel in (item.partition("=") for item in items)}
    for what, kernel in asked.items():
        if kernel not in _CHOICES.get(what, ()):
            known = " or ".join(f"{name}={'|'.join(kernels)}" for name, kernels in _CHOICES.items())
            raise UnsupportedModelError(f"{VARIABLE} takes {known}, with a comma between them; got {what}={kernel}")
    decode = "cuda_cores" if layer.q_heads // layer.kv_heads < _TENSOR_CORES_FROM else "tensor_cores"
    measured = layer.key_dim == 128 and layer.window is None and not layer.softcap
    prefill = "fa3" if capability == _HOPPER and measured else "fa2"
    return Kernels(asked.get("decode", decode), asked.get("prefill", prefill))
