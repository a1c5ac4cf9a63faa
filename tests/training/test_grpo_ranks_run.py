"""Runs of `grpo` on two ranks with an engine: learning, evaluations, checkpoints, and a rank that is killed."""

import json
from statistics import fmean

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow


def two_ranks(verb, directory, killed=()):
    """Return what each of two ranks printed, None if it was killed."""
    outputs = run_ranks("grpo_ranks_run.py", 2, directory / f"store-{verb}", directory, verb, killed=killed)
    return [json.loads(output.splitlines()[-1]) if output else None for output in outputs]


@pytest.mark.parametrize("what", ["learn", "episodes"])
def test_two_ranks_learn(tmp_path, what):
    rewards, others = two_ranks(f"{what} 25", tmp_path)
    assert rewards == others
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) > 0.3


def test_a_rank_that_runs_another_loop_and_ends_is_named(tmp_path):
    [(reports, error, _), _] = two_ranks("batches", tmp_path, killed=(1,))
    assert reports == []
    assert error.startswith("rank 1 (process ")


@pytest.mark.parametrize("when", ["begin", "collective"])
def test_a_rank_that_is_killed_ends_the_run_by_name_and_a_checkpoint_continues(tmp_path, when):
    [(reports, error, _), killed] = two_ranks(when, tmp_path, killed=(1,))
    assert killed is None
    assert [step for step, *_ in reports] == [1, 2, 3]
    assert error.startswith("rank 1 (process ")
    assert error.endswith("has ended")
    first, second = two_ranks("resume", tmp_path)
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
