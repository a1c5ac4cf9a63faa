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
_TENSOR_CORES_FROM = 4
"""Query heads per KV head from which on SGLang and mini-sglang (attention/fi.py) use tensor cores. With fewer, most
rows of a tile would be padding. This has not been measured here yet."""
_CHOICES = {"decode": ("cuda_cores", "tensor_cores"), "prefill": ("fa2", "fa3")}


class Kernels(NamedTuple):
    """Kernels for the layers of one shape."""

    decode: str
    """"cuda_cores" (1, 2, 3, 4 or 8 query heads per KV head in 0.6.14), or "tensor_cores" (FlashAttention 2)."""
    prefill: str
    """"fa2" or "fa3". The latter is made for Hopper, but mini-sglang found it slower there."""


def kernels_for(layer: LayerShape) -> Kernels:
    """Return the kernels for a layer: from the table, or the kernels that INFLIGHT_FLASHINFER names. Raises
    UnsupportedModelError for an unknown name."""
    items = filter(None, os.environ.get(VARIABLE, "").replace(" ", "").split(","))
    asked = {what: kernel for what, _, kernel in (item.partition("=") for item in items)}
    for what, kernel in asked.items():
        if kernel not in _CHOICES.get(what, ()):
            known = " or ".join(f"{name}={'|'.join(kernels)}" for name, kernels in _CHOICES.items())
            raise UnsupportedModelError(f"{VARIABLE} takes {known}, with a comma between them; got {what}={kernel}")
    decode = "cuda_cores" if layer.q_heads // layer.kv_heads < _TENSOR_CORES_FROM else "tensor_cores"
    return Kernels(asked.get("decode", decode), asked.get("prefill", "fa2"))
