"""Output, files and errors of `inflight bench learning`."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from inflight.tools.cli import app
from inflight.training.schedules import SCHEDULES


def bench_learning(tmp_path, *arguments):
    """Return the printed result, the written result and the series of a run of toy size."""
    file = tmp_path / "learning.json"
    toy = ("--device", "cpu", "--seeds", "0", "--steps", "3", "--sequences", "16", "--warmup-steps", "2")
    written = ("--json", str(file))
    done = CliRunner().invoke(app, ["bench", "learning", *toy, *arguments, *written], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    series = json.loads(gzip.decompress((tmp_path / "learning-series.json.gz").read_bytes()))
    return json.loads(done.stdout.splitlines()[-1]), json.loads(file.read_text()), series


@pytest.mark.long
def test_bench_learning_compares_the_schedules(tmp_path):
    printed, written, series = bench_learning(tmp_path, "--target", "0")
    for mode in SCHEDULES:
        assert written[mode]["seconds_to_target"] > 0
        assert written[mode]["final_reward"] >= 0
        assert written[mode]["tokens"] == written[mode]["seeds"][0]["tokens"] > 0
        assert {"token_age_ms", "weight_lag_ms", "version_lag"} <= set(written[mode]["seeds"][0])
    seconds = [written[mode]["seconds_to_target"] for mode in ("sync", "inflight")]
    assert written["ratio"] == pytest.approx(seconds[0] / seconds[1])
    assert {curve["mode"] for curve in series} == set(SCHEDULES)
    for points in (curve["points"] for curve in series):
        assert [point["step"] for point in points] == [1, 2, 3]
        assert set(points[0]) == {"step", "seconds", "tokens", "reward", "ess", "version_lag"}
    assert {"command", "commit", "machine", "versions"} <= set(written.pop("environment"))
    assert printed == written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "sync,async"], "unknown schedule 'async'; choose inflight, sync, one_step_off"),
        (["--sequences", "3"], "--sequences must be a multiple of 8, the size of a group, got 3"),
        (["--objective", "hope"], "unknown objective 'hope'"),
        (["--objective", "decoupled_ppo"], "'decoupled_ppo' is for several optimizer steps per batch"),
        (["--seeds", "x"], "--seeds must be one or more numbers such as 1,8,32, got 'x'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments, message):
    done = CliRunner().invoke(app, ["bench", "learning", *arguments], env={"COLUMNS": "160"})
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
