"""`inflight doctor --model`: the memory of engine and trainer of a model on one GPU."""

import math
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from inflight.engine.cache.transformers_states import TRANSFORMERS_STATES
from inflight.engine.model.attention.latent import LatentHeads
from inflight.engine.model.checkpoints import auto_class
from inflight.engine.model.loading import load_config
from inflight.weights.towers import drop_towers

GIB = 1 << 30
FIXED_BYTES = int(1.5 * GIB)
"""CUDA context, workspaces and graphs of an engine: an estimate."""
BF16_BYTES = 2
_WITHOUT_KEYS = ("linear_attention", "conv", "mlp", "moe")
"""Names in the config's `layer_types` of layers without keys and values."""
TRAINERS = {
    "on another GPU": 0,
    "fp32, AdamW": 4 + 4 + 8,
    "bf16, AdamW": 2 + 2 + 4,
    "bf16, 8-bit AdamW": 2 + 2 + 2,
    "LoRA, base in bf16": 2,
}
"""Bytes of weights, gradients and optimizer per parameter of the model. The adapters of LoRA are neglected."""


class Budget(NamedTuple):
    """Memory in bytes."""

    num_parameters: int
    weight_bytes: int
    """One slot, in bf16. It has no towers for images and sound."""
    kv_bytes: int
    """Keys and values of all sequences in bf16, without regard to sliding windows. Latent attention keeps latents."""
    state_bytes: int
    """States of layers that keep one per sequence, with as many for the prefix cache."""

    def engine_bytes(self, slots: int) -> int:
        return slots * self.weight_bytes + self.kv_bytes + self.state_bytes + FIXED_BYTES

    def left_bytes(self, gpu_bytes: int, trainer: str, slots: int) -> int:
        """Return the memory that is left for the activations of a trainer of TRAINERS; negative if there is too
        little."""
        return gpu_bytes - self.engine_bytes(slots) - TRAINERS[trainer] * self.num_parameters


def budget_of(model: str, *, sequences: int, context: int) -> Budget:
    """Compute the budget from the model's configuration. model: built-in shape, directory or hub id. Raises
    ModelLoadError or UnsupportedModelError."""
    config = load_config(model)
    with torch.device("meta"):
        made = auto_class(config).from_config(config, dtype=torch.bfloat16)
    num_parameters = made.num_parameters()
    drop_towers(made)
    return Budget(
        num_parameters,
        made.num_parameters() * BF16_BYTES,
        sequences * context * sum(cached_dims(made)) * BF16_BYTES,
        (2 * sequences + 1) * _state_bytes(made),
    )


def cached_dims(model: PreTrainedModel) -> list[int]:
    """Return the numbers that each attention layer keeps of a token. They come from the sizes of its projections of
    keys and values if every layer has both or the configuration has no common size, else from the configuration."""
    parts: list[Any] = [*model.modules()]
    if latent := [one.kv_lora_rank + one.qk_rope_head_dim for one in parts if LatentHeads.of(one) is not None]:
        return latent
    keys = [one for one in parts if isinstance(getattr(one, "k_proj", None), nn.Linear)]
    keys = [one for one in keys if not TRANSFORMERS_STATES.detect(one)]
    values = [getattr(one, "v_proj", None) or one.k_proj for one in keys]  # Some layers have no own values.
    projected = [one.k_proj.out_features + value.out_features for one, value in zip(keys, values, strict=True)]
    text: Any = model.config.get_text_config()
    try:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except Exception:  # Transformers' own if sizes differ by layer (Gemma 4), AttributeError without heads (Mamba)
        return projected
    layer_types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    num_attention = sum(layer_type not in _WITHOUT_KEYS for layer_type in layer_types)
    return projected if len(projected) == num_attention else [2 * heads * head_dim] * num_attention


def _state_bytes(model: nn.Module) -> int:
    """Return the bytes of the states of one sequence."""
    kind = TRANSFORMERS_STATES
    tensors = [tensor for module in model.modules() if kind.detect(module) for tensor in kind.tensors(module)]
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def print_budget(model: str, *, sequences: int, context: int, gpu_gib: float, console: Console) -> None:
    """Print what fits on a GPU with this memory. Raises the errors of `budget_of`."""
    budget, gpu_bytes = budget_of(model, sequences=sequences, context=context), int(gpu_gib * GIB)
    console.print(
        f"{model}: {budget.num_parameters / 1e9:.2f} B parameters, {sequences} sequences of {context:,} tokens, "
        f"{gpu_gib:.0f} GiB on one GPU\n"
        f"engine: {_gib(budget.weight_bytes)} per slot, {_gib(budget.kv_bytes)} for all keys and values (with less, "
        f"sequences wait), {_gib(budget.state_bytes)} for states of layers, about {_gib(FIXED_BYTES)} for CUDA"
    )
    table = Table("trainer", "its memory", "2 slots leave", "slots=1 leaves")
    for name, bytes_of_each in TRAINERS.items():
        left = [budget.left_bytes(gpu_bytes, name, slots) for slots in (2, 1)]
        table.add_row(name, _gib(bytes_of_each * budget.num_parameters), *map(_left, left))
    console.print(table, soft_wrap=False)
    console.print("What is left is for the trainer's activations. Publishing adapters needs one slot.")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _left(num_bytes: int) -> str:
    return _gib(num_bytes) if num_bytes > 0 else f"lacks {_gib(-num_bytes)}"
