"""The checkpoint that the demo starts from is the one that its recipe makes."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from waiting import PATIENCE_S

import inflight
from inflight.core.errors import ModelLoadError
from inflight.tools.demo.options import DemoOptions
from inflight.tools.demo.run import held_out_accuracy, longest
from inflight.tools.demo.start import (
    ANSWER_TOKENS,
    MODEL,
    PROMPT_TOKENS,
    RECIPE,
    START_FILE,
    TASK,
    load_start,
    starts_from_file,
)
from inflight.tools.demo.tasks import gym_task
from inflight.tools.demo.trainer import _encode, load_trainer, require_tokenizer, saved
from inflight.training.schedules import Example

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_the_file_names_the_recipe_that_makes_it():
    assert json.loads(metadata_of(START_FILE)["recipe"]) == asdict(RECIPE)
    assert START_FILE.stat().st_size < 3_000_000


def test_the_file_has_the_layout_of_the_model():
    expected = {name: (p.shape, p.dtype) for name, p in load_trainer(MODEL, CPU).named_parameters()}
    assert {name: (t.shape, t.dtype) for name, t in load_file(START_FILE).items()} == expected


@pytest.mark.medium
def test_the_file_is_as_accurate_as_it_says(tmp_path):
    task, model, tokenizer = gym_task(TASK, seed=0), load_trainer(MODEL, CPU), require_tokenizer(MODEL)
    load_start(model)
    assert longest(task, tokenizer) == PROMPT_TOKENS + ANSWER_TOKENS
    with (
        saved(model, tokenizer, tmp_path) as start,
        inflight.launch(start, device="cpu", threads=1, max_context=longest(task, tokenizer)) as engine,
    ):
        accuracy = held_out_accuracy(engine, task, task.held_out)
    assert accuracy == pytest.approx(float(metadata_of(START_FILE)["accuracy"]), abs=0.01)
    assert 0.2 < accuracy < 0.5  # something to improve, and much left to learn


@pytest.mark.parametrize("has_end", [True, False])
def test_an_answer_begins_without_special_tokens_and_can_lack_an_end(has_end):
    tokenizer: Any = require_tokenizer(MODEL)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    special = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=special)
    end = [tokenizer.eos_token_id] if has_end else []
    if not has_end:
        tokenizer.eos_token = None
    ids, targets = _encode(tokenizer, Example("ab -> ", {"answer": "ba"}))
    prompt, answer = tokenizer("ab -> ")["input_ids"], tokenizer("ba", add_special_tokens=False)["input_ids"]
    assert prompt[0] == tokenizer.bos_token_id
    assert ids.tolist() == [*prompt, *answer, *end]
    assert targets.tolist() == [*[-100] * len(prompt), *answer, *end]


def test_a_saved_model_replaces_no_files_of_its_directory(tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "notes.txt").write_text("mine")
    with saved(load_trainer(MODEL, CPU), require_tokenizer(MODEL), tmp_path) as start:
        assert (Path(start) / "model.safetensors").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["start", "notes.txt"]


def test_a_file_of_another_model_is_refused_by_its_names(tmp_path):
    save_file({"model.norm.weight": torch.ones(4), "extra": torch.ones(4)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not fit the model.*extra"):
        load_start(load_trainer(MODEL, CPU), tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        {"real": True},
        {"warmup_steps": 10},
        {"warmup_steps": 0},
        {"model": "small"},
        {"task": "chain_sum"},
        {"data": Path("a.jsonl")},
    ],
)
def test_other_models_tasks_and_warm_ups_do_not_start_from_the_file(options):
    assert starts_from_file(DemoOptions())
    assert not starts_from_file(DemoOptions(**options))


@pytest.mark.long
def test_the_command_makes_a_file_that_the_demo_can_start_from(tmp_path):
    made = tmp_path / "start.safetensors"
    command = [sys.executable, "benchmarks/demo_start.py", "--out", str(made), "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(metadata_of(made)["recipe"])["steps"] == 3
    load_start(load_trainer(MODEL, CPU), made)
