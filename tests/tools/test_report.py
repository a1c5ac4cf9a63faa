"""A report shows every number of every file, draws every series, and is a page without scripts."""

import gzip
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.observability.events import RunError
from inflight.tools import report
from inflight.tools.cli import app
from inflight.tools.report import ReportError, page_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ENVIRONMENT = {"command": "inflight bench …", "commit": "0123456789ab", "machine": {"cpu": "a processor", "cores": 2}}
NASTY = '<img src=x onerror="document.title=1">&"\'$x$\x00'


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def cells_of(page: str, heading: str) -> list[str]:
    """The cells of the row with this heading."""
    [row] = re.findall(rf"<tr><th>{re.escape(heading)}</th>(.*?)</tr>", page)
    return re.findall(r"<td>(.*?)</td>", row)


def plots_of(page: str) -> dict[str, int]:
    """Maps the title of each plot to its number of lines."""
    figures = re.findall(r"<figcaption>(.*?)</figcaption>(.*?)</figure>", page)
    return {title: rest.count("<polyline") for title, rest in figures}


def test_files_of_a_benchmark_share_a_table_with_ratios_to_the_first(tmp_path):
    first = {"bench": "swap", "swap_ms": {"p50": 12.0, "p99": 0.0}, "slots": 2, "environment": ENVIRONMENT}
    second = {"bench": "swap", "swap_ms": {"p50": 24.0, "p99": 3.0}, "slots": 2, "peer": None}
    page = page_of([write(tmp_path / "a.json", first), write(tmp_path / "b.json", second)], "two runs")
    assert "<h1>two runs</h1>" in page
    assert cells_of(page, "swap_ms.p50") == ["12", "24 <small>× 2</small>"]
    assert cells_of(page, "swap_ms.p99") == ["0", "3"]
    assert cells_of(page, "slots") == ["2", "2"]
    assert cells_of(page, "peer") == ["", "–"]
    assert cells_of(page, "environment.commit") == ["0123456789ab", ""]
    assert cells_of(page, "environment.machine.cores") == ["2", ""]


def test_files_with_the_same_name_have_the_directories_that_distinguish_them(tmp_path):
    names = ("before/swap.json", "after/swap.json", "after/loss.json", "run/summary.json")
    data = {"bench": "swap", "ms": {"p50": 1.0}, "points": [{"size": n, "ms": 2 * n} for n in range(4)]}
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, data)
    page = page_of([tmp_path / name for name in names], "same")
    assert re.findall(r"<h3>(.*?): points</h3>", page) == ["before/swap", "after/swap", "loss", "run"]
    assert plots_of(page) == {"points: ms": 4}


def test_shares_are_percentages(tmp_path):
    points = [{"sequences": 1, "hit_share": 0.25}]
    result = {"bench": "a", "trainer_wait_share": {"p50": 0.055}, "cpu_share": [0.5, 1.0], "kinds": {"shared": 0.5}}
    page = page_of([write(tmp_path / "a.json", result | {"points": points, "mps_share": "100"})], "shares")
    assert cells_of(page, "trainer_wait_share.p50") == ["5.5%"]
    assert cells_of(page, "cpu_share") == ["50.0%, 100.0%"]
    assert cells_of(page, "kinds.shared") == ["0.5"]
    assert cells_of(page, "mps_share") == ["100"]
    assert cells_of(page, "1") == ["25.0%"]


def test_points_percentiles_and_curves_are_drawn(tmp_path):
    points = [{"sequences": n, "tokens_per_s": 100.0 * n, "peers": {"vllm": {"ratio": n / 2}}} for n in (1, 8, 32)]
    percentiles = {"percentiles": [1.0, 50.0, 99.0], "swap_ms": [1.0, 2.0, 3.0], "short": [1.0]}
    data = {"bench": "a", "points": points, "distributions": percentiles}
    rewards = [{"step": t, "seconds": 2 * t, "reward": t / 9} for t in range(9)]
    curves = [{"mode": mode, "points": rewards} for mode in ("x", "y")]
    (tmp_path / "a-series.json.gz").write_bytes(gzip.compress(json.dumps(curves).encode()))
    page = page_of([write(tmp_path / "a.json", data), write(tmp_path / "b.json", data)], "series")
    lines = {"points: tokens_per_s": 2, "distributions: swap_ms": 2, "series: step": 2, "series: reward": 2}
    assert plots_of(page) == lines
    assert page.count('text-anchor="end">seconds<') == 2
    assert page.count("<tr><th>32</th><td>3,200</td><td>16</td></tr>") == 2  # a table of points for each file


def test_points_that_do_not_rise_are_only_listed(tmp_path):
    ablation = [{"lag": lag, "reward": 0.5} for lag in (1, 4, 4)]
    page = page_of([write(tmp_path / "a.json", {"ablation": ablation})], "lags")
    assert plots_of(page) == {}
    assert page.count("<tr><th>4</th><td>0.5</td></tr>") == 2


def test_records_without_numbers_are_shown(tmp_path):
    page = page_of([write(tmp_path / "a.json", {"runs": [{"curve": [1, 2, 3, 4, 5]}], "empty": [{}]})], "curves")
    assert "<h3>a: runs</h3>" in page


def test_every_result_of_the_repository_is_shown():
    paths = sorted(RESULTS.rglob("*.json"))
    page, names = page_of(paths, "all"), report.names_of(paths)
    assert len(set(names.values())) == len(paths)
    for path in paths:
        assert f"<th>{names[path]}</th>" in page
    assert plots_of(page)["series: reward"] > 9
    assert "<th>stall_ms.p50</th>" in page
    assert "more rows" not in page


def test_the_first_table_compares_measured_loops(tmp_path):
    loops = {"auto": {"steps_per_s": 8.0, "token_age_ms": {"p50": 150.0}}, "sync": {"steps_per_s": 6.0}}
    first = write(tmp_path / "lead.json", {"balanced": {"medians": loops}, "other": {"medians": loops}})
    staleness = {"bench": "staleness", "stall_ms": {"p50": 0.1, "p99": 1.0}, "final_reward": 0.5}
    second = [write(tmp_path / f"{name}.json", staleness | {"steps_per_s": s}) for name, s in (("a", 2.0), ("b", 3.0))]
    page = page_of([first, *second], "")
    table, _ = page.split("<h2>", 1)
    assert re.findall("<th>(.*?)</th>", table)[:5] == ["", "steps/s", "token age p50, ms", "stall p50, ms", "reward"]
    assert cells_of(table, "lead balanced.medians.auto") == ["8", "150", "", ""]
    assert cells_of(table, "lead other.medians.sync") == ["6 <small>× 0.75</small>", "", "", ""]
    assert cells_of(table, "b") == ["3 <small>× 1.5</small>", "", "0.1", "0.5"]


def test_a_directory_without_a_record_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"has no record of a run \(events\.jsonl\); inflight\.RunRecorder writes it"):
        page_of([tmp_path], "")


def test_paths_can_be_text(tmp_path):
    files = [write(tmp_path / f"{name}.json", {"bench": "loss", "time_ratio": 2.0}) for name in "ab"]
    assert page_of([str(file) for file in files], "") == page_of(files, "")
    with pytest.raises(RunError, match="has no record of a run"):
        page_of([str(tmp_path)], "")


def test_text_of_a_file_is_escaped(tmp_path):
    nasty = {NASTY: NASTY, "points": [{NASTY: i, "b": 1.0} for i in range(4)], "environment": {"commit": NASTY}}
    page = page_of([write(tmp_path / "<b>.json", nasty | {"bench": NASTY})], NASTY)
    assert "<img" not in page
    assert "<b>." not in page
    assert not re.search(r"<script|javascript:|https?://", page)


def test_numbers_at_the_edge_are_drawn(tmp_path):
    wild = {"a": [-1e300, 0.0, 1e300], "b": [1e-300, 0.0, 5.0], "c": [0, 0, 0], "d": [10**400, 1, 2]}
    first, second = {"x": 1e-300, "lists": wild}, {"x": 1e300, "lists": wild}
    page = page_of([write(tmp_path / name, one) for name, one in (("a.json", first), ("b.json", second))], "wild")
    assert set(plots_of(page)) == {"lists: b", "lists: c"}
    assert "nan" not in page
    assert "inf" not in page


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not the JSON of a benchmark"),
        (b"[1, 2]", "is not the JSON of a benchmark: Expected `object`, got `array`"),
        (b'{"tokens_per_s": NaN}', "is not the JSON of a benchmark"),
        (b'{"tokens_per_s": 1e999}', "is not the JSON of a benchmark: Number out of range"),
        (b'{"a":' * 100_000, "is not the JSON of a benchmark"),
        (b"\xff\xfe", "is not the JSON of a benchmark"),
        (b"x" * 2000, "is longer than 0 MiB"),
    ],
)
def test_other_files_are_refused(tmp_path, monkeypatch, content, said):
    monkeypatch.setattr(report, "MAX_BYTES", 1000 if len(content) == 2000 else 1 << 20)
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ReportError, match=rf"bad\.json {said}"):
        page_of([tmp_path / "bad.json"], "")


def test_broken_curves_and_missing_files_are_named(tmp_path):
    write(tmp_path / "learning.json", {"bench": "learning"})
    (tmp_path / "learning-series.json.gz").write_bytes(b"not gzip")
    with pytest.raises(ReportError, match=r"learning-series\.json\.gz cannot be read"):
        page_of([tmp_path / "learning.json"], "")
    with pytest.raises(ReportError, match=r"no\.json cannot be read: No such file"):
        page_of([tmp_path / "no.json"], "")


def test_the_command_writes_the_page_and_refuses_other_files(tmp_path):
    path = write(tmp_path / "a.json", {"bench": "host", "host_ms": {"p50": 0.25}})
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "page.html")])
    assert (done.exit_code, "page.html" in done.stdout) == (0, True)
    assert cells_of((tmp_path / "page.html").read_text(), "host_ms.p50") == ["0.25"]
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "page.html")])
    assert refused.exit_code == 2
    assert "page.html is not the JSON of a benchmark" in refused.stderr
