"""What benchmarks wrote is read, and what they did not write is refused by file and key."""

import json
from pathlib import Path

import made_results
import pytest
from made_results import staleness, write

from inflight.tools.report import results
from inflight.tools.report.results import ReportError, read

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def test_files_in_the_repository_are_read():
    names = (
        "staleness-small-slots2",
        "swap-small-float32",
        "swap-vllm-small-float32",
        "throughput-small-bfloat16-sweep",
    )
    for name in (*names, "learning", "learning-lags"):
        result = read(RESULTS / f"{name}.json")
        assert result.environment.machine.cores == 2
    assert len(read(RESULTS / "learning.json").found.curves) == 9
    assert read(RESULTS / "learning.json").found.of_modes["sync"].final_reward > 0.7


def test_every_kind_is_read(tmp_path):
    kinds = [read(path).kind for path in made_results.write_all(tmp_path)]
    assert set(kinds) == {"staleness", "served_staleness", "sweep", "swap", "throughput", "learning"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"swap_ms": {"p50": "12"}}, r"Expected `float \| null`, got `str` - at `swap_ms.p50`"),
        ({"parts": {"swap_ms.p50": [1, "x"]}}, r"Expected `float`, got `str` - at `parts\[...\]\[1\]`"),
        ({"tokens_per_s": None}, r"Expected `float`, got `null` - at `tokens_per_s`"),
        ({"distributions": {"percentiles": [1.0], "swap_ms": [1.0, 2.0]}}, r"distributions\.swap_ms has 2 values"),
        ({"environment": {"commit": 3}}, r"Expected `str \| null`, got `int` - at `environment.commit`"),
        ({"bench": "loss"}, r"its key 'bench' is 'loss', which must be one of staleness, "),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named_with_its_file(tmp_path, change, said):
    path = write(tmp_path / "bad.json", staleness() | change)
    with pytest.raises(ReportError, match=rf"bad\.json .*{said}"):
        read(path)


def test_a_missing_key_is_named(tmp_path):
    data = staleness()
    del data["token_age_ms"]
    with pytest.raises(ReportError, match=r"missing required field `token_age_ms`"):
        read(write(tmp_path / "bad.json", data))
    learning = made_results.learning()
    del learning["sync"]
    with pytest.raises(ReportError, match=r"got `null` - at `of_modes\[...\]`"):
        read(write(tmp_path / "bad.json", learning))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not the JSON of a benchmark"),
        (b"[1, 2]", "is not the JSON of a benchmark: Expected `object`, got `array`"),
        (b'{"bench": "staleness", "tokens_per_s": NaN}', "is not the JSON of a benchmark"),
        (b'{"a":' * 100_000, "is not the JSON of a benchmark"),
        (b"\xff\xfe", "is not the JSON of a benchmark"),
        (b"{}", "there is no key 'bench'"),
        (b"x" * 2000, "is longer than 0 MiB"),
    ],
)
def test_what_is_no_benchmark_is_refused(tmp_path, monkeypatch, content, said):
    monkeypatch.setattr(results, "_MOST_BYTES", 1000 if len(content) == 2000 else 1 << 20)
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ReportError, match=said):
        read(tmp_path / "bad.json")


def test_broken_curves_beside_a_result_are_named(tmp_path):
    made_results.write_all(tmp_path)
    (tmp_path / "learning-series.json.gz").write_bytes(b"not gzip")
    with pytest.raises(ReportError, match=r"learning-series\.json\.gz cannot be read"):
        read(tmp_path / "learning.json")
    with pytest.raises(ReportError, match=r"no\.json cannot be read: No such file"):
        read(tmp_path / "no.json")


def test_numbers_without_bounds_are_refused(tmp_path):
    (tmp_path / "bad.json").write_text(json.dumps(staleness()).replace("3000.0", "1e999", 1))
    with pytest.raises(ReportError, match=r"bad\.json is not the JSON of a benchmark: Number out of range"):
        read(tmp_path / "bad.json")
