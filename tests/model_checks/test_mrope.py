"""Models whose positions have several axes (M-RoPE) have a twin, and are trained packed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_configs import auto_class
from family_overrides import OVERRIDES
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig

from inflight.model_checks.shrink import shrink
from inflight.model_checks.twin import twin_of
from inflight.training.model import forward
from inflight.training.model import forward_mode as ways


def _rope(section: list[int] | None, **others: Any) -> dict[str, Any]:
    """section: None leaves it to the model's code."""
    own = {} if section is None else {"mrope_section": section}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **own, **others}}


_HALF = {"partial_rotary_factor": 0.5}
_QUARTER = {"partial_rotary_factor": 0.25, "mrope_interleaved": True}
_COMPASS = _rope([24, 20, 20])["rope_parameters"]
_QWEN2_VL = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
TEXT: dict[str, dict[str, Any]] = {
    "cohere_compass": {"rope_parameters": {"full_attention": _COMPASS, "sliding_attention": _COMPASS}},
    "cosmos3_edge": _rope([24, 20, 20]),
    "ernie4_5_vl_moe": _rope([22, 22, 20]),
    "glm4v": _rope([8, 12, 12], **_HALF),
    "glm4v_moe": {"head_dim": 128, **_rope([8, 12, 12], **_HALF)},
    "glm_ocr": _rope([8, 12, 12]),
    "hunyuan_vl": {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        **_rope([16, 16, 16, 16]),
    },
    "hy_v4_vl": _rope([12, 10, 10]),
    "paddleocr_vl": _rope([16, 24, 24]),
    "qwen2_vl": {**_QWEN2_VL, **_rope([16, 24, 24])},
    "qwen2_5_vl": {**_QWEN2_VL, **_rope([16, 24, 24])},
    "qwen2_5_omni_thinker": _rope([16, 24, 24]),
    "qwen3_omni_moe_thinker": {"head_dim": 128, "num_attention_heads": 32, **_rope([24, 20, 20])},
    "qwen3_vl": _rope([24, 20, 20], mrope_interleaved=True),
    "qwen3_vl_moe": _rope([24, 20, 20], mrope_interleaved=True),
    "qwen3_5": _rope([11, 11, 10], **_QUARTER),
    "qwen3_5_moe": _rope([11, 11, 10], **_QUARTER),
    "qwen4_exp": {**OVERRIDES["qwen4_exp_text"], "indexer_head_dim": 128, **_rope([11, 11, 10], **_QUARTER)},
}
"""Text configurations as published, in full size: the fields that decide about heads and rotation."""
PACKED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm_ocr", "paddleocr_vl")
NO_DECODERS = {"glm_image": "draws images", "neomme": "a masked language model"}


def large_model(name: str, text: dict[str, Any]) -> Any:
    """On the meta device."""
    kind: Any = CONFIG_MAPPING[name]
    config = kind(text_config=text)
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def sections(config: PretrainedConfig) -> list[list[int]]:
    rope: Any = config.get_text_config().rope_parameters
    return [
        part["mrope_section"] for part in (rope, *rope.values()) if isinstance(part, dict) and "mrope_section" in part
    ]


def test_every_type_with_sections_is_tried():
    models = Path(transformers.__file__).parent / "models"
    files = [path for path in models.glob("*/modeling_*.py") if re.search(r"\bmrope_section\b", path.read_text())]
    tried = {name.removesuffix("_thinker") for name in TEXT}
    assert {path.parent.name for path in files} - set(NO_DECODERS) == tried


@pytest.mark.parametrize(
    "name", [name if name in ("qwen2_5_vl", "qwen3_5") else pytest.param(name, marks=pytest.mark.slow) for name in TEXT]
)
def test_a_model_with_sections_has_a_twin(name):
    model = large_model(name, TEXT[name])
    found = twin_of(model)
    small, large = sections(found.plain.config), sections(model.config)
    assert len(small) == len(large) > 0
    for few, many in zip(small, large, strict=True):
        assert len(few) == len(many)
        assert sum(many) % sum(few) == 0
        assert sum(many) > sum(few)
    if found.is_causal and name in PACKED:
        assert ways._find(model, forward.try_way) in ("fused", "packed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "paddleocr_vl", "ernie4_5_vl_moe"])
def test_sections_that_only_the_code_names_are_made_small(name):
    text = {key: value for key, value in TEXT[name].items() if key != "rope_parameters"}
    model = large_model(name, text | _rope(None))
    assert sections(model.config) == []
    assert sections(twin_of(model).plain.config) != []
    assert sections(model.config) == []


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("head_dim", "section", "expected"),
    [
        (128, [16, 24, 24], [2, 1, 1]),
        (128, [22, 22, 20], [1, 1, 2]),
        (128, [16, 16, 16, 16], [1, 1, 1, 1]),
        (256, [11, 11, 10], [1, 1, 0]),
        (96, [16, 16, 16], [2, 2, 2]),
        (80, [20, 10, 10], [3, 1, 1]),
        (64, [12, 10, 10], [2, 1, 1]),
    ],
)
def test_sections_add_up_to_the_rotated_pairs_of_the_small_head(field, head_dim, section, expected):
    """Equal sections stay equal: some models interleave two axes."""
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim)
    vars(config)[field] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    small = shrink(config)
    assert vars(small)[field]["mrope_section"] == expected
    assert head_dim // small.head_dim == sum(section) // sum(expected)
