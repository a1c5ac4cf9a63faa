"""Every family of models that Transformers knows is right or refused by name, in the engine and in the trainer."""

from pathlib import Path

import models_page
import pytest
import transformers
from family_check import FUSED, GOOD, NOT_BUILT, REFUSED, RIGHT, UNFUSED, check_family
from family_configs import Family, all_families, causal_families, multimodal_families
from family_overrides import CANNOT_BE_BUILT
from family_published import LIKE_A_ROW, OF_ANOTHER_KIND, SOURCES, rows_of_checkpoints
from family_table import row, rows_of
from transformers.utils.logging import disable_progress_bar

MOST_USED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_vl", "mistral3",
)  # fmt: skip
IN_CI = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_vl")
OF_MANY_KINDS = (
    "bert", "bloom", "cohere2", "dbrx", "falcon", "glm4", "gptj", "granitemoe", "lfm2", "llama4_text", "mamba", "mpt",
    "nemotron", "olmo2", "opt", "phi3", "qwen3_next", "t5", "whisper",
)  # fmt: skip
"""Positions, norms, activations, experts and states of most kinds, and models that are refused. `make test-long` runs
the other families."""
TABLE = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
DOCUMENTED = {result.family: result for result in rows_of(TABLE)}


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    disable_progress_bar()


def _families(causal: bool):
    for family in all_families():
        if (family.model_type in causal_families()) == causal:
            mark = pytest.mark.slow if family.name in OF_MANY_KINDS + MOST_USED else pytest.mark.long
            yield pytest.param(family, id=family.name, marks=() if family.name in IN_CI else mark)


@pytest.mark.medium
@pytest.mark.parametrize("family", list(_families(causal=True)))
def test_a_family_is_right_or_refused_by_name(family: Family):
    result = check_family(family)
    assert result.engine.kind in GOOD or family.name in CANNOT_BE_BUILT, result.engine.reason
    assert result.trainer.kind in GOOD or family.name in CANNOT_BE_BUILT, result.trainer.reason
    if family.name in MOST_USED:
        assert result.engine.kind in (FUSED, UNFUSED)
        assert result.trainer.kind == RIGHT
    if f"Transformers {transformers.__version__} " in TABLE:
        documented = DOCUMENTED[family.name]
        assert result.engine.kind == documented.engine.kind, "docs/families.md says otherwise"
        assert result.trainer.kind == documented.trainer.kind, "docs/families.md says otherwise"


@pytest.mark.parametrize("family", list(_families(causal=False)))
def test_a_multimodal_model_is_right_or_refused_and_encoders_are_refused(family: Family):
    result = check_family(family)
    is_multimodal = family.model_type in multimodal_families()
    assert result.engine.kind in ((*GOOD, NOT_BUILT) if is_multimodal else (REFUSED,)), result.engine.reason
    assert result.trainer.kind in (*GOOD, NOT_BUILT), result.trainer.reason
    if f"Transformers {transformers.__version__} " in TABLE:
        assert result.engine.kind == DOCUMENTED[family.name].engine.kind, "docs/families.md says otherwise"


def test_the_page_lists_each_checkpoint_with_a_row_that_exists():
    """The row's outcome is next to the checkpoint, and the table of families has the row."""
    for checkpoint, name in rows_of_checkpoints().items():
        assert f"| {checkpoint} | {name} | {DOCUMENTED[name].engine.kind} |" in TABLE
    sources = {published.source for published in OF_ANOTHER_KIND} | {source for _, source in LIKE_A_ROW.values()}
    assert sources == SOURCES.keys()


def test_the_first_page_lists_checkpoints_as_the_rows_say():
    """`python tests/helpers/models_page.py` writes the table."""
    assert models_page.table() in models_page.PAGE.read_text()
    assert len(models_page.table().splitlines()) > 40


def test_rows_that_are_kept_do_not_change():
    """`family_table.py --keep` reads the rows of the page and writes them again."""
    lines = TABLE.splitlines()
    assert len(DOCUMENTED) > 400
    assert all(row(result) in lines for result in DOCUMENTED.values())
