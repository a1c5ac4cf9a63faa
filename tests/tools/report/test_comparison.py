"""Files of a kind are held against the first of them: by how much they differ, and whether that says anything."""

from pathlib import Path

import made_results
import pytest
from made_results import ENVIRONMENT, staleness, write

from inflight.tools.report.comparison import Comparison, Number, Row, comparisons_of
from inflight.tools.report.results import read


def compared(tmp_path: Path, *data) -> list[Comparison]:
    return comparisons_of([read(write(tmp_path / f"{index}.json", each)) for index, each in enumerate(data)])


def rows_of(comparison: Comparison) -> dict[str, Row]:
    return {row.measure: row for row in comparison.rows}


def test_a_difference_is_beyond_the_spread_if_no_values_of_one_lie_among_those_of_the_other():
    five, above, among = [1.0, 2, 3, 4, 5], [6.0, 7, 8, 9, 10], [5.0, 6, 7, 8, 9]
    row = Row("", "", Number(3, five), Number(8, above))
    assert (row.verdict, row.chance, row.ratio) == ("beyond the spread", 126, 8 / 3)
    assert Row("", "", Number(8, above), Number(3, five)).verdict == "beyond the spread"
    assert Row("", "", Number(3, five), Number(7, among)).verdict == "within the spread"
    unknown = Row("", "", Number(0), Number(8, above))
    assert (unknown.verdict, unknown.chance, unknown.ratio) == ("spread unknown", None, None)
    assert Row("", "", Number(1, five[:2]), Number(8, above)).verdict == "spread unknown"


def test_runs_of_the_same_settings_are_compared_measure_by_measure(tmp_path):
    slow, equal = compared(tmp_path, staleness(), staleness(1.5), staleness(1.001))
    rows = rows_of(slow)
    assert rows["swap_ms.p50"].ratio == pytest.approx(1.5)
    assert rows["swap_ms.p50"].verdict == rows["tokens_per_s"].verdict == "beyond the spread"
    assert rows["version_lag.p50"].verdict == "within the spread"
    assert rows["weight_lag_ms.p99"].ratio is None  # 0 against 0
    assert rows_of(equal)["swap_ms.p50"].verdict == "within the spread"
    assert slow.differing == []
    assert slow.summary == "6 of 8 numbers differ by more than the spread"


def test_single_runs_of_different_settings_are_compared_and_it_is_said(tmp_path):
    [comparison] = compared(tmp_path, staleness(), staleness(2.0, mode="sync", slots=1))
    assert comparison.differing == ["mode inflight and sync", "slots 2 and 1"]
    assert rows_of(comparison)["token_age_ms.p50"].ratio == pytest.approx(2.0)


def test_settings_that_differ_are_named_in_sweeps_and_servers_too(tmp_path):
    sweep, servers = made_results.sweep(), made_results.servers()
    for point in sweep["points"]:
        point |= {"dtype": "bfloat16", "steps": 60}
    next(iter(servers["servers"].values()))["prompt_tokens"] = 8
    of_sweeps, of_servers = compared(tmp_path, made_results.sweep(), made_results.servers(), sweep, servers)
    assert of_sweeps.differing == ["steps 30 and 60", "dtype auto and bfloat16"]
    assert of_servers.differing == [f"prompt_tokens 32 and 8 (1 of {len(servers['servers'])})"]


def test_points_and_servers_are_compared_by_their_settings_and_the_rest_is_named(tmp_path):
    fewer = made_results.sweep()
    fewer["points"] = fewer["points"][:4]
    servers = made_results.servers()
    del servers["servers"]["vLLM, pause keep"]
    of_sweeps, of_servers = compared(tmp_path, made_results.sweep(), made_results.servers(), fewer, servers)
    assert len({row.system for row in of_sweeps.rows}) == 4
    assert len(of_sweeps.unmatched) == 14
    assert of_servers.unmatched == ["vLLM, pause keep"]
    assert {row.ratio for row in of_servers.rows} <= {1.0, None}


def test_other_kinds_are_compared_too(tmp_path):
    """And a file of learning with lags is of another kind than one with schedules."""
    made = [made_results.swap(), made_results.throughput(), made_results.learning(), made_results.lags()]
    assert len(compared(tmp_path, *made)) == 0
    swaps, speeds, modes, lags = compared(tmp_path, *made, *made)
    assert rows_of(swaps)["gap_ratio"].ratio == 1.0
    assert {row.verdict for row in speeds.rows if row.measure == "tokens_per_s"} == {"within the spread"}
    assert rows_of(modes)["seconds_to_target"].verdict == "within the spread"
    assert len(lags.rows) == 6


def test_files_without_a_spread_are_compared_all_the_same(tmp_path):
    old = {"parts": {}, "distributions": {}, "environment": ENVIRONMENT}
    [comparison] = compared(tmp_path, staleness(**old), staleness(3.0, **old))
    assert {row.verdict for row in comparison.rows} == {"spread unknown"}
    assert comparison.summary == "8 numbers, whose spread is not known"
