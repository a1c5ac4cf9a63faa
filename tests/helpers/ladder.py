"""Kinds of models by the state that their layers keep. Each kind climbs the ladder of `engine/test_ladder.py`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hybrids
from family_configs import Family
from family_overrides import VARIANTS
from toy_recurrent import make_toy
from transformers import PreTrainedModel

from inflight.engine.loop.engine import Engine

WIDE = Family(
    "deepseek_v3-wide",
    "deepseek_v3",
    {**VARIANTS["deepseek_v3"]["yarn"], "qk_rope_head_dim": 16, "first_k_dense_replace": 4},
)
"""Its latents have a length that the C kernel supports. PyTorch computes the other tiny models."""
_CHANGED = {
    WIDE.name: WIDE,
    # Its distributions have more than one token then.
    "minicpm3": Family("minicpm3", "minicpm3", {"dim_model_base": 16}),
    # All experts are chosen: the scores of two of them differ by 6e-8 for one of the drawn tokens.
    "glm4_moe_lite": Family("glm4_moe_lite", "glm4_moe_lite", {"num_experts_per_tok": 4}),
    # Its prompts contain no image.
    "mistral_large4": Family("mistral_large4", "mistral_large4", {"image_token_id": 198}),
}
FUSED_LATENT = (
    WIDE.name, "deepseek_v3-yarn", "deepseek_v3", "deepseek_v3-uninterleaved",
    "deepseek_v3-published-moonlight", "deepseek_v2",
    "deepseek_v2-published-lite", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "kimi_k25",
    "deepseek_v32", "deepseek_v32-published", "glm_moe_dsa", "glm_moe_dsa-shared", "kimi_linear",
)  # fmt: skip
UNFUSED_LATENT = ("longcat_flash", "bailing_hybrid", "axk2", "mistral_large4")
"""Two attention layers in a layer; layers with a state; a gate after attention; the last two have sparse attention."""
TOYS = {
    "hybrid": ("linear_attention", "full_attention", "linear_attention"),
    "recurrent": ("linear_attention", "linear_attention"),
}
TOY_KIND = "toy_recurrent:KIND"


@dataclass(frozen=True)
class Kind:
    """Models whose layers keep the same kind of state."""

    name: str
    names: tuple[str, ...]
    of_each_kind: tuple[str, ...]
    """The models that differ most."""
    model_of: Callable[[str, int], PreTrainedModel]
    """Makes the model of a name. Other versions have other weights."""
    is_as_expected: Callable[[Engine, str], bool]
    """Returns True if the engine keeps this kind of state for the model."""
    tolerance: float = 1e-4
    """Nats. Largest difference of a token's log-probability."""
    kept_error: float = 0.001
    """Nats. Least mean error of tokens whose state is of older weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of engines."""


def _latent(name: str, version: int = 0) -> PreTrainedModel:
    return hybrids.model_of(_CHANGED.get(name, name), version)


def _toy(name: str, version: int = 0) -> PreTrainedModel:
    model = make_toy(TOYS[name], version)
    model.set_attn_implementation("eager")
    return model


def _keeps_latents(engine: Engine, name: str) -> bool:
    is_fused = engine.runner.unfused_reason is None
    return is_fused == (name in FUSED_LATENT) and all(layer.latent for layer in engine.memory._layers)


LATENT = Kind(
    "latent",
    FUSED_LATENT + UNFUSED_LATENT,
    (WIDE.name, "deepseek_v2", "minicpm3", "glm_moe_dsa-shared"),
    _latent,
    _keeps_latents,
)
STATES = Kind(
    "states",
    hybrids.FAMILIES,
    hybrids.OF_EACH_KIND,
    hybrids.model_of,
    lambda engine, name: bool(engine.memory.states),
)
TOY = Kind(
    "toy",
    tuple(TOYS),
    ("hybrid",),
    _toy,
    lambda engine, name: engine.runner.unfused_reason is not None,
    tolerance=5e-5,
    kept_error=0.01,
    options={"layer_kinds": (TOY_KIND,)},
)
