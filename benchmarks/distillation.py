"""Compares learning from a teacher with learning from rewards alone on the demo's task, by drawn tokens until a reward.

    python benchmarks/distillation.py [FILE] [SETTING …]

The task is to spell words backward. The student starts from the checkpoint of `inflight demo`. It has seen 300
examples. The teacher has the same size and has seen all training examples. A step has 512 rollouts: 8 of each prompt
with rewards, as in the demo, and 1 of each prompt with a teacher, because a teacher needs no groups. A run ends when
the mean reward of the last WINDOW steps is 0.9 of the teacher's, or after the steps of the demo. Its figure is the
number of drawn tokens in the steps until then. The teacher is a module in the trainer ("module"), a pool of two engines
("engines"), or vLLM's own server ("server", of `make peers`). "groups" is "module" with 8 rollouts of each prompt.
"differences" has the largest one between log-probabilities of an outside teacher and of the module. Draws differ
between runs. The result is written after each run, and runs that it has are not repeated.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from demo_task import held_out, options, student
from transformers import PreTrainedModel
from vllm_server import vllm_server, vllm_version

import inflight
from inflight.tools.demo.recipes import SMALL
from inflight.tools.demo.start import ANSWER_TOKENS, MODEL, TASK
from inflight.tools.demo.tasks import Task, gym_task
from inflight.tools.demo.trainer import WarmupConfig, make_optimizer, require_tokenizer, saved, warm_up
from inflight.tools.environment import write_result
from inflight.training.objective.distillation import LOGPROBS
from inflight.training.teacher import TeacherLike

SEEDS, SHARE, WINDOW, ROLLOUTS = (0, 1, 2), 0.9, 5, 8 * SMALL.groups_per_step
TEACHER_STEPS, TOP_K = 500, 16
FILE = Path(__file__).parent / "results" / "cpu" / "distillation.json"


@dataclass(frozen=True, slots=True)
class Setting:
    samples: int = 1
    """Rollouts of a prompt."""
    learning_rate: float = 1e-3
    seeds: tuple[int, ...] = SEEDS


SETTINGS = {
    "rewards": Setting(8, SMALL.learning_rate),
    "module": Setting(),
    "engines": Setting(),
    "server": Setting(),
    "groups": Setting(8, seeds=SEEDS[:1]),
}


def nothing(groups: Sequence[Sequence[inflight.Rollout]]) -> list[float]:
    """Return advantages of 0."""
    return [0.0 for group in groups for _ in group]


def make_teacher(task: Task) -> PreTrainedModel:
    model, tokenizer = student(), require_tokenizer(MODEL)
    recipe = WarmupConfig(steps=TEACHER_STEPS, seed=0, demonstrations=len(task.train))
    for _ in warm_up(model, tokenizer, task.train, recipe):
        pass
    return model


@torch.no_grad()
def difference(teacher: TeacherLike, module: PreTrainedModel, rollouts: list[inflight.Rollout]) -> float:
    """Return the largest difference between log-probabilities of a teacher and of its module, of drawn tokens."""
    with closing(inflight.TeacherScorer(teacher)) as scorer:
        scorer.start(rollouts).result(120)
    largest = 0.0
    for rollout in rollouts:
        prompt, drawn = (torch.from_numpy(ids).long() for ids in (rollout.prompt_token_ids, rollout.token_ids))
        logits = module(input_ids=torch.cat([prompt, drawn])[None]).logits[0, len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
        largest = max(largest, (torch.from_numpy(rollout.columns.pop(LOGPROBS)) - ours).abs().max().item())
    return largest


def learn(
    engine: inflight.Engine, task: Task, setting: Setting, seed: int, target: float, teacher: TeacherLike | None
) -> dict[str, Any]:
    """Train a student until the target, and return the figures of the run. teacher: None trains on rewards."""
    torch.manual_seed(seed)
    model = student()
    optimizer, scheduler = make_optimizer(model.parameters(), setting.learning_rate, ramp=SMALL.ramp, steps=SMALL.steps)
    taught: dict[str, Any] = {"teacher_weight": 1.0, "teacher_top_k": TOP_K, "teacher_kl": "forward"}
    config = inflight.GRPOConfig(
        steps=SMALL.steps,
        groups_per_step=ROLLOUTS // setting.samples,
        sampling=inflight.SamplingParams(n=setting.samples, max_tokens=ANSWER_TOKENS),
        objective=inflight.Objective(**({} if teacher is None else taught)),
        advantages="grpo" if teacher is None else nothing,
    )
    rewards, tokens, reached = list[float](), [0], False
    with engine.publisher(model) as publisher:
        prompts = task.shuffled(seed)
        for report in inflight.grpo(
            engine, publisher, model, optimizer, prompts, task.score, config, scheduler, teacher=teacher
        ):
            rewards.append(report.reward)
            tokens.append(tokens[-1] + report.num_tokens)
            reached = len(rewards) >= WINDOW and fmean(rewards[-WINDOW:]) >= target
            if reached:
                break
    ends = range(WINDOW, len(rewards) + 1, WINDOW)
    return {
        "seed": seed,
        "target": target,
        "tokens_to_target": tokens[-1] if reached else None,
        "steps": len(rewards),
        "held_out_reward": fmean(map(task.score, held_out(engine, task, model))),
        "curve": [[tokens[end], round(fmean(rewards[end - WINDOW : end]), 3)] for end in ends],
    }


def teacher_of(name: str, module: PreTrainedModel, path: str, at_end: ExitStack) -> TeacherLike | None:
    """Return the teacher of a setting. path: of the saved module."""
    if name == "engines":
        return at_end.enter_context(inflight.launch([options(path), options(path)]))
    if name == "server":
        return at_end.enter_context(vllm_server(path, "--max-model-len", "64", threads=1))
    return None if name == "rewards" else module


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    file, names = Path((sys.argv[1:] or [FILE])[0]), sys.argv[2:] or list(SETTINGS)
    task = gym_task(TASK, seed=0)
    module = make_teacher(task)
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"differences": {}, "runs": {}}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as at_end:
        path = at_end.enter_context(saved(module, require_tokenizer(MODEL), Path(directory)))
        engine = at_end.enter_context(inflight.launch(options(path)))
        rollouts = held_out(engine, task, student())
        if "target" not in result:
            of_teacher = fmean(map(task.score, held_out(engine, task, module)))
            result |= {"student_reward": fmean(map(task.score, rollouts)), "teacher_reward": of_teacher}
            result |= {"target": SHARE * of_teacher, "window": WINDOW, "teacher_top_k": TOP_K}
        teachers = {name: teacher_of(name, module, path, at_end) for name in names}
        for name in ("engines", "server"):
            if (outside := teachers.get(name)) is not None:
                result["differences"][name] = difference(outside, module, rollouts[:64])
        if "server" in names:
            result["vllm"] = vllm_version()
        write_result(file, result)
        for seed, name in product(SEEDS, names):
            setting, runs = SETTINGS[name], result["runs"].setdefault(name, [])
            if seed in setting.seeds and not any(run["seed"] == seed for run in runs):
                runs.append(learn(engine, task, setting, seed, result["target"], teachers[name]))
                print(name, runs[-1], flush=True)
                write_result(file, result)


if __name__ == "__main__":
    main()
