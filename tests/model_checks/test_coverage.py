"""The benchmark of coverage counts what runs, and no family of a sample has a third outcome."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from coverage_of_models import main, measure, summary
from family_check import FUSED, GOOD, NOT_BUILT, REFUSED, UNFUSED, WRONG

SAMPLE = {
    "llama": (FUSED, "packed without logits"),
    "granite": (FUSED, "packed without logits"),
    "deepseek_v3": (FUSED, "packed without logits"),
    "hunyuan_v1_dense": (UNFUSED, "packed without logits"),
    "qwen3_vl": (FUSED, "packed without logits"),
    "mistral3": (FUSED, "packed without logits"),
    "mamba": (REFUSED, "rows"),
    "qwen4_exp": (REFUSED, "rows"),
    "bart": (REFUSED, "rows"),
    "t5gemma2": (REFUSED, ""),
    "fast_vlm": (NOT_BUILT, ""),
}


@pytest.fixture(scope="module")
def types():
    return {name: measure(name) for name in SAMPLE}


@pytest.mark.medium
def test_no_family_has_a_third_outcome(types):
    for name, (engine, way) in SAMPLE.items():
        assert (types[name]["engine"], types[name]["trainer_way"]) == (engine, way), types[name]
        assert types[name]["trainer"] in (*GOOD, NOT_BUILT), types[name]
        assert types[name]["engine_reason"] or engine == FUSED


@pytest.mark.medium
def test_shares_are_over_the_types_with_a_tiny_model(types):
    counts = summary(types)
    assert (counts["model_types"], counts["built"]) == (11, 10)
    assert (counts["runs"], counts["runs_fused"], counts["trains_packed_without_logits"]) == (6, 5, 6)
    assert counts["shares"]["runs"] == 0.6


def test_a_third_outcome_ends_with_status_1(monkeypatch, tmp_path):
    row = {"engine": WRONG, "engine_reason": "off", "trainer": "right", "trainer_reason": "", "trainer_way": "rows"}
    monkeypatch.setattr("coverage_of_models.measure", lambda name: row)
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setattr(sys, "argv", ["coverage", str(tmp_path / "coverage.json")])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert '"neither_right_nor_refused"' in (tmp_path / "coverage.json").read_text()
