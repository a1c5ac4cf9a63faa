"""Score functions in processes: they run at the same time and apart from this process, and what hangs or dies costs its
own rollouts alone."""

import math
import os
import sys
from pathlib import Path

import pytest
from made_batches import make_rollouts
from waiting import wait_until

from inflight.core.errors import ScoreError
from inflight.core.rollout import Turn
from inflight.stream.rollout_codec import encode_header, header_of
from inflight.training.data.scoring import Scorer

FUNCTIONS = """
import math, os, subprocess, sys, time

def process_id(rollout):
    assert "torch" not in sys.modules, "a process takes a second and 200 MB more with it"
    print("what is printed does not disturb the answers")
    time.sleep(0.2)
    return os.getpid()

def steps(rollout):
    from inflight.core.rollout import Turn
    rollout.turns = (Turn(0, 1, True, 0.5), Turn(1, len(rollout.token_ids), True, 1.0))
    return 1.5

def steps_of_group(rollouts):
    return [steps(rollouts[0]), 0.5]

def numpy_steps(rollout):
    import numpy as np
    from inflight.core.rollout import Turn
    reward = "good" if rollout.text == "word" else np.mean([1.0, 0.0])
    rollout.turns = (Turn(0, len(rollout.token_ids), True, reward),)
    return np.float32(1.5)

def lengths(rollouts):
    return [len(rollout.token_ids) + rollout.metadata["more"] for rollout in rollouts]

def start_a_program(rollout):
    assert sys.stdin.read() == ""
    program = subprocess.Popen(["sh", "-c", "cat; sleep 60"])
    with open(rollout.metadata["file"], "w") as file:
        file.write(str(program.pid))
    time.sleep(60)

def text_or_trouble(rollout):
    if rollout.text == "let go":
        os.closerange(3, 100)
        time.sleep(60)
    if rollout.text == "hang":
        time.sleep(60)
    if rollout.text == "die":
        os._exit(7)
    if rollout.text == "raise":
        raise KeyError("no such answer")
    return None if rollout.text == "none" else math.inf if rollout.text == "inf" else 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """A module, which the processes find where this one does."""
    path = tmp_path_factory.mktemp("rewards")
    (path / "rewards_of_a_test.py").write_text(FUNCTIONS)
    sys.path.append(str(path))
    import rewards_of_a_test  # type: ignore[import-not-found]

    yield rewards_of_a_test
    sys.path.remove(str(path))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_calls_run_at_the_same_time_in_processes_that_are_kept_and_end_with_the_scorer(functions):
    scorer = Scorer(functions.process_id, processes=2, timeout_s=math.inf)
    first = scorer.start(make_rollouts(4)).result(60)
    second = scorer.start(make_rollouts(2)).result(60)
    assert len(set(first)) == 2
    assert set(second) <= set(first)
    assert os.getpid() not in first
    scorer.close()
    wait_until(lambda: not any(alive(int(pid)) for pid in first))


@pytest.mark.medium
def test_a_group_arrives_whole_and_what_hangs_raises_or_dies_costs_its_own_call(functions):
    rollouts = make_rollouts(3)
    for rollout in rollouts:
        rollout.metadata = {"more": 100}
    batched = Scorer(functions.lengths, batched=True, processes=1)
    assert batched.start(rollouts).result(60) == [100 + len(rollout.token_ids) for rollout in rollouts]
    batched.close()

    scorer = Scorer(functions.text_or_trouble, processes=1, timeout_s=3.0)
    for rollout, text in zip(rollouts, ("fine", "none", "inf"), strict=True):
        rollout.text = text
    assert scorer.start(rollouts).result(60) == [1.0, None, None]
    for text, message in (
        ("raise", "(?s)failed in its process.*no such answer"),
        ("die", "has ended with 7"),
        ("let go", "has ended with -9"),
    ):
        rollouts[0].text = text
        assert scorer.start(rollouts[:1]).result(30) == [None]
        with pytest.raises(ScoreError, match=message):
            raise scorer.last_error
    rollouts[0].text = "hang"
    assert scorer.start(rollouts[:1]).result(60) == [None]
    assert scorer.failures == {"error: ScoreError": 3, "error: TimeoutError": 1}
    rollouts[0].text = "fine"
    assert scorer.start(rollouts[:1]).result(60) == [1.0]
    scorer.close()


def test_turns_that_a_function_sets_arrive(functions):
    rollouts = make_rollouts(2)
    turns = [(Turn(0, 1, True, 0.5), Turn(1, len(rollout.token_ids), True, 1.0)) for rollout in rollouts]
    for function, expected in ((functions.steps_of_group, [turns[0], ()]), (functions.steps, turns)):
        scorer = Scorer(function, processes=1, batched=function is functions.steps_of_group)
        scorer.start(rollouts).result(60)
        scorer.close()
        assert [rollout.turns for rollout in rollouts] == expected


def test_rewards_of_turns_can_be_numbers_of_numpy_and_other_values_cost_their_rollout_alone(functions, caplog):
    rollouts = make_rollouts(3)
    rollouts[1].text = "word"
    scorer = Scorer(functions.numpy_steps, processes=1)
    assert scorer.start(rollouts).result(60) == [1.5, None, 1.5]
    assert [turn.reward for rollout in rollouts for turn in rollout.turns] == [0.5, 0.5]
    assert scorer.failures == {"error: ScoreError": 1}
    assert "Expected `float | null`, got `str`" in caplog.text
    functions.numpy_steps(rollouts[0])
    assert encode_header(header_of(rollouts[0]))
    scorer.close()


@pytest.mark.slow
def test_programs_that_a_function_starts_read_nothing_and_end_with_its_call(functions, tmp_path):
    scorer = Scorer(functions.start_a_program, processes=1, timeout_s=2.0)
    [rollout] = make_rollouts(1)
    rollout.metadata = {"file": str(tmp_path / "pid")}
    assert scorer.start([rollout]).result(60) == [None]
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid) or "zombie" in Path(f"/proc/{pid}/status").read_text())
    scorer.close()
    assert scorer.start([rollout]).result(60) == [None]
    with pytest.raises(ScoreError, match="was closed"):
        raise scorer.last_error


@pytest.mark.parametrize("what", ["lambda", "local", "method"])
def test_a_function_that_no_process_can_import_is_refused_by_name(what):
    def local(rollout):
        return 1.0

    function = {"lambda": lambda rollout: 1.0, "local": local, "method": Scorer.close}[what]
    with pytest.raises(ValueError, match="cannot be called in processes, which import it by its name"):
        Scorer(function, processes=1)
