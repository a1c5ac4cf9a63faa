"""Tiny models with weights large enough that a part which is left out, or taken for another, shows."""

import copy

import torch
from family_configs import Family, auto_class
from transformers import PreTrainedModel

GAIN = 1.5
"""Standard deviation of what a linear map gives for an input of standard deviation 1. Attention is sharp then, and
distributions over tokens are peaked."""

MAX_PARAMETERS = 130_000_000

SCALED = {"dory"}
"""Their vectors begin small and are multiplied by up to 56 (nGPT): far from where they begin rounding decides."""


def make_model(family: Family, *, large: bool = True) -> PreTrainedModel:
    """The family's model in fp32, in eval mode, with eager attention. large: with weights as described above, in place
    of those that Transformers begins with."""
    torch.manual_seed(0)
    config = family.config()
    with torch.device("meta"):
        size = sum(
            parameter.numel() for parameter in auto_class(config).from_config(copy.deepcopy(config)).parameters()
        )
    if size > MAX_PARAMETERS:
        raise ValueError(f"its configuration, made small, still has {size / 1e6:,.0f} million parameters")
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if large:
        randomize(model)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Matrices at random; vectors (norms, biases, sinks, scales) moved well away from the values they begin with."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, tensor in model.named_parameters():
        if id(tensor) in embeddings:
            tensor.normal_()
        elif any(part in name for part in ("A_log", "dt_bias", "time_", "slstm", "conv")):
            tensor.add_(torch.randn_like(tensor) * 0.1)  # of recurrences, which are unstable far from where they begin
        elif tensor.ndim >= 2:
            tensor.normal_(std=GAIN * tensor.shape[-1] ** -0.5)
        else:
            step = torch.randn_like(tensor).clamp_(-2, 2) * 0.3
            tensor.add_(step * tensor if model.config.model_type in SCALED else step)
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point() and name in model.state_dict():
            buffer.normal_(std=0.1)  # of routers
