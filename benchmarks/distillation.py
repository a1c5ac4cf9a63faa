"""Compares learning from a teacher with learning from rewards alone, by the drawn tokens until a reward.

    python benchmarks/distillation.py [FILE]

The task is the demo's, "spell backward", with its tiny model. The teacher has seen many demonstrations, and the student
of each seed few. All runs of a seed start from the same student, see the same prompts in the same order, and take
the same number of rollouts per step. The target is 0.9 of the teacher's reward at temperature 1. Draws differ between
runs. `rl` has rewards and no teacher. The others have a teacher and advantages of 0.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import finish
from transformers import PreTrainedModel

import inflight
from inflight.tools.demo.run import longest
from inflight.tools.demo.tasks import Task, gym_task
from inflight.tools.demo.trainer import (
    WarmupConfig,
    load_trainer,
    make_optimizer,
    require_tokenizer,
    saved,
    split_cores,
    torch_threads,
    warm_up,
)

SEEDS = (0, 1, 2)
GROUPS, GROUP_SIZE = 32, 8
STEPS = {"rl": 150, "taught": 150}
LEARNING_RATES = {"rl": 3e-4, "taught": 1.5e-3}
"""Of `rl` as in `bench learning`: with a larger one this task is not learned from rewards (docs/objectives.md)."""
SMOOTHING = 5
"""The reward of a step is the mean of its last steps."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "rl": {},
    "drawn token": {"teacher_weight": 1.0},
    "top 16, reverse": {"teacher_weight": 1.0, "teacher_top_k": 16},
}
TEACHER = {"steps": 500, "demonstrations": 15_000}
STUDENT = {"steps": 250, "demonstrations": 300}


def nothing(groups: Sequence[Sequence[inflight.Rollout]]) -> list[float]:
    return [0.0 for group in groups for _ in group]


def made(seed: int, task: Task, steps: int, demonstrations: int) -> PreTrainedModel:
    """A model after supervised steps."""
    torch.manual_seed(seed)
    model = load_trainer("tiny", torch.device("cpu"))
    config = WarmupConfig(steps=steps, seed=seed, demonstrations=demonstrations)
    for _ in warm_up(model, require_tokenizer("tiny"), task.train, config):
        pass
    return model


def reward_of(model: PreTrainedModel, task: Task, threads: int) -> float:
    """The mean reward of held-out answers at temperature 1."""
    tokenizer = require_tokenizer("tiny")
    with (
        tempfile.TemporaryDirectory() as parent,
        saved(model, tokenizer, Path(parent) / "model") as directory,
        inflight.launch(directory, threads=threads, max_context=longest(task, tokenizer)) as engine,
    ):
        examples = task.held_out
        params = inflight.SamplingParams(n=4, max_tokens=task.max_tokens)
        groups = engine.generate([e.prompt for e in examples], params, metadata=[e.metadata for e in examples])
    return fmean(task.score(rollout) for group in groups for rollout in group)


def learn(name: str, student: Path, teacher: PreTrainedModel, task: Task, seed: int, target: float) -> dict[str, Any]:
    """One run from the student in a directory."""
    torch.manual_seed(seed)
    model, threads = load_trainer(str(student), torch.device("cpu")), split_cores(torch.device("cpu"))
    kind = "rl" if name == "rl" else "taught"
    steps = STEPS[kind]
    optimizer, scheduler = make_optimizer(model.parameters(), LEARNING_RATES[kind], ramp=10, steps=steps)
    config = inflight.GRPOConfig(
        steps=steps,
        groups_per_step=GROUPS,
        sampling=inflight.SamplingParams(n=GROUP_SIZE, max_tokens=task.max_tokens),
        objective=inflight.Objective(**OBJECTIVES[name]),
        advantages="grpo" if name == "rl" else nothing,
    )
    given = None if name == "rl" else teacher
    rewards: list[float] = []
    kls: list[float] = []
    tokens, reached = 0, None
    with (
        torch_threads(threads.trainer),
        inflight.launch(
            str(student), threads=threads.engine, max_context=longest(task, require_tokenizer("tiny"))
        ) as e,
        e.publisher(model) as publisher,
    ):
        examples = task.shuffled(seed)
        for report in inflight.grpo(
            e, publisher, model, optimizer, examples, task.score, config, scheduler, teacher=given
        ):
            rewards.append(report.reward)
            kls.append(report.as_dict().get("teacher_kl", 0.0))
            tokens += report.num_tokens
            if reached is None and len(rewards) >= SMOOTHING and fmean(rewards[-SMOOTHING:]) >= target:
                reached = {"tokens_to_target": tokens, "steps_to_target": report.step}
    found = {"seed": seed, "tokens_to_target": None, "steps_to_target": None} | (reached or {})
    found |= {"reward_before": rewards[0], "reward_after": fmean(rewards[-10:]), "tokens": tokens, "steps": steps}
    found |= {} if name == "rl" else {"kl_before": kls[0], "kl_after": fmean(kls[-10:])}
    print(name, found, flush=True)
    return found


def main() -> None:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in OBJECTIVES}
    targets: dict[str, dict[str, float]] = {}
    cores = torch.get_num_threads()
    with torch_threads(1):  # as fast as two for these sizes
        teacher = made(100, gym_task("spell_backward", seed=100), **TEACHER)
    for seed in SEEDS:
        task = gym_task("spell_backward", seed=seed)
        with torch_threads(1):
            student = made(seed, task, **STUDENT)
        of_teacher, of_student = (reward_of(model, task, cores) for model in (teacher, student))
        targets[str(seed)] = {"teacher": of_teacher, "student": of_student, "target": 0.9 * of_teacher}
        print(targets[str(seed)], flush=True)
        with (
            tempfile.TemporaryDirectory() as parent,
            saved(student, require_tokenizer("tiny"), Path(parent) / "student") as directory,
        ):
            for name, of_runs in runs.items():
                of_runs.append(learn(name, Path(directory), teacher, task, seed, 0.9 * of_teacher))
        report(targets, runs)


def report(targets: dict[str, dict[str, float]], runs: dict[str, list[dict[str, Any]]]) -> None:
    """Write what is known so far."""
    settings = {"seeds": SEEDS, "steps": STEPS, "rollouts_per_step": GROUPS * GROUP_SIZE}
    settings |= {"learning_rates": LEARNING_RATES, "smoothing_steps": SMOOTHING, "teacher": TEACHER, "student": STUDENT}
    finish("distillation", {"task": "spell_backward", "model": "tiny", **settings, "rewards": targets, "runs": runs})


if __name__ == "__main__":
    main()
