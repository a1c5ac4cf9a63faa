"""Engine and trainer on a GPU compute models of each kind as Transformers does on the CPU."""

import pytest
from family_check import FUSED, RIGHT, UNFUSED, check_engine, check_trainer
from family_configs import all_families
from transformers.utils.logging import disable_progress_bar

from inflight.model_checks.mixers import is_older, newer_transformers

pytestmark = pytest.mark.gpu

HYBRIDS = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "kimi_linear", "olmo_hybrid", "lfm2", "nemotron_h", "falcon_h1",
    "granitemoehybrid",
)  # fmt: skip
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash")
OTHERS = ("gpt_oss", "gemma3_text", "gemma4_text", "llama4_text", "qwen3_moe", "qwen3_vl", "gpt2", "cohere2")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
NEED_NEWER = [
    pytest.mark.skipif(is_older(version), reason=newer_transformers(subject, version))
    for subject, version in (("layers with a state", "5.24"), ("layers with sparse attention", "5.18"))
]


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [mark for mark, names in zip(NEED_NEWER, (HYBRIDS, SPARSE), strict=True) if name in names]


FAMILIES = [
    pytest.param(f, id=f.name, marks=marks(f.name)) for f in all_families() if f.name in (*HYBRIDS, *LATENT, *OTHERS)
]


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    disable_progress_bar()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_is_right_on_the_gpu(family):
    outcome = check_engine(family, "cuda")
    print(f"{family.name}: {outcome.kind} {outcome.reason}")
    assert outcome.kind in (FUSED, UNFUSED)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_is_right_on_the_gpu(family):
    outcome = check_trainer(family, "cuda")
    print(f"{family.name}: {outcome.kind} {outcome.reason}")
    assert outcome.kind == RIGHT
