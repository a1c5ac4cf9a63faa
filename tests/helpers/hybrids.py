"""Tiny models of families whose layers keep a state per sequence."""

from typing import Any

import torch
from family_configs import Family, all_families
from family_weights import make_model
from transformers import PreTrainedModel

FAMILIES = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "nemotron_h",
    "granitemoehybrid-published",
    "falcon_h1", "bamba", "zamba2", "mamba2", "lfm2", "lfm2_moe",
)  # fmt: skip
OF_EACH_KIND = ("qwen3_5_text", "nemotron_h", "lfm2")
"""Gated DeltaNet, Mamba-2 with limits of time steps, and short convolutions."""


@torch.no_grad()
def model_of(family: str | Family, version: int = 0) -> PreTrainedModel:
    """The family's model, with matrices of a size at which rounding stays below the tolerance."""
    if isinstance(family, str):
        family = next(known for known in all_families() if known.name == family)
    model, name = make_model(family), family.name
    generator = torch.Generator().manual_seed(version)
    decays = {id(parameter) for key, parameter in model.named_parameters() if key.endswith("A_log")}
    head: Any = model.get_output_embeddings()
    scale = 0.05 if "granite" in name else 0.2
    for parameter in model.parameters():
        if id(parameter) in decays:
            parameter.sub_(parameter.mean() + 2)  # so that states last for several tokens
        if parameter.ndim > 1:
            parameter.mul_(
                scale if parameter is head.weight and getattr(model.config, "tie_word_embeddings", False) else 0.6
            )
            if version:
                parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model
