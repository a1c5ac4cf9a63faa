"""An unmodified TRL GRPOTrainer trains against the engine."""

import itertools
import math
import os

import pytest

from inflight.engine.shapes import EOS_TOKEN_ID

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", reason="the trl extra is not installed")

from trl import GRPOTrainer
from trl_trainers import CHAT, TEXT, make_trainer, train

from inflight.integrations.trl import behavior_ratio


@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
def test_each_prompt_gets_its_completions_and_weights_move(path, tmp_path, prompts):
    run = train(path, tmp_path, prompts=prompts)
    assert len(run.calls) == 3
    for asked, output in run.calls:
        assert {len(column) for column in output.values()} == {len(asked)} == {8}
        for prompt, ids in zip(asked, output["prompt_ids"], strict=True):
            text = prompt if isinstance(prompt, str) else f"<user>{prompt[0]['content']}>"
            assert run.trainer.processing_class.decode(ids) == text
        for ids, logprobs, reason in zip(
            output["completion_ids"], output["logprobs"], output["finish_reason"], strict=True
        ):
            assert 1 <= len(ids) == len(logprobs) <= 6
            assert (reason == "stop") == (ids[-1] == EOS_TOKEN_ID)
    assert run.version == 4  # when training began, and after each of 3 steps
    assert len(run.trainer.state.log_history) >= 3
    assert all(math.isfinite(entry["grad_norm"]) for entry in run.trainer.state.log_history if "grad_norm" in entry)
    newest = [max(itertools.chain(*output["weight_versions"])) for _, output in run.calls]
    assert newest[-1] > newest[0]


def test_ahead_keeps_the_next_batch_in_flight_and_wastes_nothing(path, tmp_path):
    run = train(path, tmp_path, ahead=1, trainer_class=behavior_ratio(GRPOTrainer), max_steps=6)
    assert [asked[::4] for asked, _ in run.calls] == [TEXT[start : start + 2] for start in (0, 2, 4, 6, 0, 2)]
    assert run.outstanding == []


def test_recorded_logprobs_become_the_denominator(path, tmp_path):
    """A recorded log-probability that is s too high makes the ratio, and so the gradient, e^−s as large."""
    drawn = train(path, tmp_path, max_steps=1).calls[0][1]

    def gradient_norm(trainer_class, shift):
        logprobs = [[logprob + shift for logprob in row] for row in drawn["logprobs"]]
        trainer = make_trainer(
            path, tmp_path, lambda prompts, trainer: drawn | {"logprobs": logprobs}, trainer_class, max_steps=1
        )
        trainer.train()
        return trainer.state.log_history[0]["grad_norm"]

    corrected = behavior_ratio(GRPOTrainer)
    base = gradient_norm(corrected, 0.0)
    assert gradient_norm(corrected, 0.1) == pytest.approx(base * math.exp(-0.1), rel=1e-3)
    assert gradient_norm(GRPOTrainer, 0.1) == pytest.approx(base, rel=1e-3)  # TRL by itself
