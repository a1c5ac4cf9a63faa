"""Gated DeltaNet of a fused decoder on a CPU, in six kernels over the slot's own weights.

Qwen 3.5's own module computes the same in about 40 small operations of PyTorch. T tokens, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from inflight_kernels import _cpu
from inflight_kernels.layer_states import Chunks, delta_gates, delta_rule, gated_rms_norm, short_convolution

from inflight.core.decoder import DELTA_NET
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import ForwardBatch
from inflight.engine.model.attention.hook import next_states
from inflight.engine.model.products import Product, product_of

_CHILDREN = {*DELTA_NET, "out_proj", "conv1d", "norm"}


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """One layer. `module` is a Gated DeltaNet as in Qwen 3.5."""

    module: Any
    widths: tuple[int, ...]
    """Columns of each of `DELTA_NET`."""
    inputs: Product
    out: Product

    @classmethod
    def of(cls, module: Any) -> "DeltaNet | None":
        """Return the layer of a module, or None if it has other parts or is not in memory that the kernels take."""
        if {name for name, _ in module.named_children()} != _CHILDREN:
            return None
        inputs, convolution = [getattr(module, name) for name in DELTA_NET], module.conv1d
        weights = [module.A_log, module.dt_bias, module.norm.weight, convolution.weight, module.out_proj.weight]
        if convolution.bias is not None or not _cpu.takes(*weights, *(each.weight for each in inputs)):
            return None
        widths = tuple(each.out_features for each in inputs)
        return cls(module, widths, product_of(*inputs), product_of(module.out_proj))

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
        """Map [T, D] to [T, D]."""
        module, states = self.module, next_states()
        chunks = Chunks(states.index, torch.from_numpy(states.starts))
        qkv, gate, a, b = self.inputs(x).split(self.widths, 1)
        mixed = short_convolution(qkv, module.conv1d.weight[:, 0], None, states.tensors[0], chunks, silu=True)
        query, key, value = mixed.split((module.key_dim, module.key_dim, module.value_dim), 1)
        decay, beta = delta_gates(a, b, module.A_log, module.dt_bias)
        out = delta_rule(
            query.unflatten(1, (-1, module.head_k_dim)),
            key.unflatten(1, (-1, module.head_k_dim)),
            value.unflatten(1, (-1, module.head_v_dim)),
            decay,
            beta,
            states.tensors[1],
            chunks,
            normed=True,
        )
        return self.out(gated_rms_norm(out, gate, module.norm.weight, module.norm.variance_epsilon))
