"""A sweep runs each point once, goes on where it was, and outlives points that fail."""

import sys
import time
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.tools.bench import sweep
from inflight.tools.bench.options import SweepOptions
from inflight.tools.cli import app

SCRIPT = """
import json, sys, time
given = dict(each[2:].split("=", 1) for each in sys.argv[1:] if each.startswith("--") and "=" in each)
path = sys.argv[sys.argv.index("--json") + 1]
open(path + ".ran", "a").write("x")
if given["sequences"] == "8":
    time.sleep(60)
if given["model"] == "broken":
    print("something", file=sys.stderr)
    sys.exit("error: cannot load model 'broken'")
whole = {name.replace("-", "_"): int(value) if value.isdigit() else value for name, value in given.items()}
measures = {name: {"p50": 1.0} for name in ("swap_ms", "stall_ms", "weight_lag_ms", "token_age_ms", "version_lag")}
whole |= measures | {"tokens_per_s": 1.0}
json.dump(whole | {"environment": {"commit": "abc", "machine": {}, "versions": {}}}, open(path, "w"))
"""


@pytest.fixture
def points(monkeypatch, tmp_path):
    """In the place of `bench staleness` a script that writes its settings, fails for one model and hangs at 8
    sequences. Returns how often each point was run, by the names of their files."""
    script = tmp_path / "bench.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sweep, "command", lambda _, *arguments: [sys.executable, str(script), *arguments[2:]])

    def runs() -> dict[str, int]:
        return {path.name.removesuffix(".json.ran"): len(path.read_text()) for path in tmp_path.glob("out/*.ran")}

    (tmp_path / "out").mkdir()
    return runs


def options(tmp_path: Path, **more) -> SweepOptions:
    return SweepOptions(out=tmp_path / "out", **({"modes": ("inflight",), "limit_s": 20.0} | more))


def test_every_combination_is_a_point_and_is_run_once(points, tmp_path):
    told = []
    grid = {"models": ("tiny", "small"), "publish_every": (1, 4), "modes": ("inflight", "sync")}
    result = sweep.measure(options(tmp_path, **grid), lambda text, share: told.append((text, share)))
    found = {(one["model"], one["mode"], one["publish_every"]) for one in result["points"]}
    assert found == set(product(grid["models"], grid["modes"], grid["publish_every"]))
    assert len(told) == 8
    assert told[2] == ("point 3 of 8: tiny, 32 sequences, sync, publish every 1, 2 slots", 0.25)
    again = sweep.measure(options(tmp_path, **(grid | {"slots": (2, 1)})))
    assert len(again["points"]) == 16
    assert set(points().values()) == {1}  # those that were there were not run again
    sweep.measure(options(tmp_path, again=True))
    assert points()["tiny-32-inflight-1-2"] == 2


def test_a_point_that_fails_or_hangs_is_told_and_the_others_go_on(points, tmp_path):
    began = time.monotonic()
    result = sweep.measure(options(tmp_path, models=("broken", "tiny"), sequences=(8, 16), limit_s=1.0))
    assert time.monotonic() - began < 30
    assert [(one["model"], one["sequences"]) for one in result["points"]] == [("tiny", 16)]
    reasons = {(one["model"], one["sequences"]): one["reason"] for one in result["failed"]}
    assert reasons == {
        ("broken", 8): "it took longer than 1 s (--limit-s)",
        ("broken", 16): "cannot load model 'broken'",
        ("tiny", 8): "it took longer than 1 s (--limit-s)",
    }
    shown = sweep.table(result | {"points": []})
    assert "cannot load model 'broken'" in str(shown.caption)


def test_files_of_another_sweep_and_broken_ones_are_refused_before_anything_runs(points, tmp_path):
    sweep.measure(options(tmp_path))
    with pytest.raises(ValueError, match=r"was measured with steps 30, not 5: --again measures it anew"):
        sweep.measure(options(tmp_path, models=("small", "tiny"), steps=5))
    assert "small-32-inflight-1-2" not in points()
    (tmp_path / "out" / "tiny-32-inflight-1-2.json").write_text('{"model": "ti')
    with pytest.raises(ValueError, match=r"tiny-32-inflight-1-2\.json cannot be read"):
        sweep.measure(options(tmp_path))
    assert len(sweep.measure(options(tmp_path, again=True))["points"]) == 1


def test_a_grid_of_nothing_is_refused(points, tmp_path):
    with pytest.raises(ValueError, match="unknown schedule 'async'; choose inflight, sync, one_step_off"):
        sweep.measure(options(tmp_path, modes=("async",)))
    with pytest.raises(ValueError, match="no point of the sweep was measured; the first one: cannot load model"):
        sweep.measure(options(tmp_path, models=("broken",)))


@pytest.mark.long
def test_a_point_is_a_run_of_the_benchmark(tmp_path):
    small = {"models": ("tiny",), "sequences": (8,), "tokens": 8, "steps": 5, "device": "cpu", "limit_s": 280.0}
    result = sweep.measure(options(tmp_path, modes=("sync",), publish_every=(2,), **small))
    assert result["failed"] == []
    [point] = result["points"]
    assert (point["mode"], point["publish_every"]) == ("sync", 2)
    assert 2 <= point["num_swaps"] <= 3
    assert point["version_lag"]["max"] == 1  # an optimizer step after the last publish
    assert set(point["environment"]) == {"commit", "machine"}


def test_the_command_ends_with_an_error_if_a_point_failed(points, tmp_path):
    arguments = ["bench", "sweep", "--modes", "inflight", "--out", str(tmp_path / "out")]
    whole = CliRunner().invoke(app, [*arguments, "--models", "tiny"])
    assert whole.exit_code == 0, whole.output
    partial = CliRunner().invoke(app, [*arguments, "--models", "tiny,broken", "--sequences", "16"])
    assert partial.exit_code == 1
    assert "cannot load model 'broken'" in partial.output
