"""Runs of `grpo` on two ranks with an engine: learning, evaluations, checkpoints, and a rank that is killed."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from waiting import PATIENCE_S

PROGRAM = Path(__file__).parents[1] / "helpers" / "grpo_ranks_run.py"
pytestmark = pytest.mark.slow


def run_ranks(verb, directory, size=2):
    """Return what each rank printed, None if it was killed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(size), directory / f"store-{verb}-{size}", directory, verb],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert ranks[0].returncode == 0, "\n".join(errors[-2500:] for _, errors in outputs)
    return [json.loads(output.splitlines()[-1]) if output else None for output, _ in outputs]


def test_two_ranks_learn(tmp_path):
    rewards, others = run_ranks("learn 25", tmp_path)
    assert rewards == others
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) > 0.3


def test_a_rank_that_runs_another_loop_and_ends_is_named(tmp_path):
    [(reports, error, _), _] = run_ranks("batches", tmp_path)
    assert reports == []
    assert error.startswith("rank 1 (process ")


@pytest.mark.parametrize("when", ["begin", "collective"])
def test_a_rank_that_is_killed_ends_the_run_by_name_and_a_checkpoint_continues(tmp_path, when):
    [(reports, error, _), killed] = run_ranks(when, tmp_path)
    assert killed is None
    assert [step for step, *_ in reports] == [1, 2, 3]
    assert error.startswith("rank 1 (process ")
    assert error.endswith("has ended")
    first, second = run_ranks("resume", tmp_path)
    assert first == second
    resumed, error, evaluations = first
    assert error == ""
    assert [step for step, *_ in resumed] == [3, 4, 5, 6]
    assert all(progress["step"] == step for step, _, _, progress in resumed)
    examples = [index for _, taken, *_ in reports[:2] + resumed for index in taken]
    assert len(set(examples)) == len(examples) == 18
    assert evaluations[-1][0] == 6
    assert any("probe/total/kl" in numbers for _, _, numbers, _ in resumed)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
