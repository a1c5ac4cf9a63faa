"""Compares learning from a teacher with learning from rewards alone on the demo's task, by the tokens until a reward.

    python benchmarks/distillation.py [FILE]

The task is to spell words backward. The student starts from the checkpoint of `inflight demo`, which has seen 300
examples. The teacher has the same size and has seen the examples of all words. All runs have the optimizer, the steps
and the sampling of the demo, and runs of a seed have the same prompts. A run ends when the mean reward of the last
WINDOW steps is 0.9 of the teacher's. Its figure is the number of drawn tokens in the steps until then. Draws differ
between runs. vLLM's server needs `make peers`.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import finish
from transformers import PreTrainedModel
from vllm_server import vllm_server, vllm_version

import inflight
from inflight.tools.demo.recipes import SMALL
from inflight.tools.demo.start import ANSWER_TOKENS, MODEL, PROMPT_TOKENS, TASK, load_start
from inflight.tools.demo.tasks import Task, gym_task
from inflight.tools.demo.trainer import WarmupConfig, load_trainer, make_optimizer, require_tokenizer, saved, warm_up
from inflight.training.data.batch import pack
from inflight.training.objective.distillation import LOGPROBS
from inflight.training.teacher import TeacherLike

SEEDS, STEPS, SHARE, WINDOW, TOP_K = (0, 1, 2), SMALL.steps, 0.9, 5, 16
TEACHER_STEPS = 1000
SAMPLING = inflight.SamplingParams(n=8, max_tokens=ANSWER_TOKENS)


def nothing(groups: Sequence[Sequence[inflight.Rollout]]) -> list[float]:
    """Return advantages of 0."""
    return [0.0 for group in groups for _ in group]


def student() -> PreTrainedModel:
    model = load_trainer(MODEL, torch.device("cpu"))
    load_start(model)
    return model


def make_teacher(task: Task) -> PreTrainedModel:
    model, tokenizer = student(), require_tokenizer(MODEL)
    recipe = WarmupConfig(steps=TEACHER_STEPS, seed=0, demonstrations=len(task.train))
    for _ in warm_up(model, tokenizer, task.train, recipe):
        pass
    return model


def options(model: str) -> inflight.EngineOptions:
    """Return the options of an engine of students or teachers. A teacher draws one token that is not used."""
    length = PROMPT_TOKENS + ANSWER_TOKENS + 1
    return inflight.EngineOptions(model, device="cpu", threads=1, max_sequences=SMALL.max_sequences, max_context=length)


def held_out(engine: inflight.Engine, task: Task, model: PreTrainedModel) -> list[inflight.Rollout]:
    """Return rollouts of a model for the held-out prompts, sampled as in training."""
    with engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
        metadata = [example.metadata for example in task.held_out]
        groups = engine.generate([example.prompt for example in task.held_out], SAMPLING, metadata=metadata)
    return [rollout for group in groups for rollout in group]


def reward_of(engine: inflight.Engine, task: Task, model: PreTrainedModel) -> float:
    return fmean(map(task.score, held_out(engine, task, model)))


def difference(teacher: TeacherLike, module: PreTrainedModel, rollouts: list[inflight.Rollout]) -> float:
    """Return the largest difference between log-probabilities of a teacher and of its module, of drawn tokens."""
    zeros = [0.0] * len(rollouts)
    with closing(inflight.TeacherScorer(teacher, top_k=TOP_K)) as scorer:
        scorer.start(rollouts).result(120)
    batch = pack(rollouts, zeros)
    ours = inflight.with_teacher(module, batch, top_k=TOP_K).columns[LOGPROBS]
    return (batch.columns[LOGPROBS] - ours)[batch.drawn].abs().max().item()


def learn(
    engine: inflight.Engine, task: Task, seed: int, target: float, teacher: TeacherLike | None, *, rewards: bool
) -> dict[str, Any]:
    """Train a student until the target, and return the figures of the run. rewards: train on rewards."""
    torch.manual_seed(seed)
    model = student()
    optimizer, scheduler = make_optimizer(model.parameters(), SMALL.learning_rate, ramp=SMALL.ramp, steps=STEPS)
    taught = {} if teacher is None else {"teacher_weight": 1.0, "teacher_top_k": TOP_K}
    config = inflight.GRPOConfig(
        steps=STEPS,
        groups_per_step=SMALL.groups_per_step,
        sampling=SAMPLING,
        objective=inflight.Objective(**taught),
        advantages="grpo" if rewards else nothing,
    )
    found, tokens = list[float](), 0
    with engine.publisher(model) as publisher:
        reports = inflight.grpo(
            engine, publisher, model, optimizer, task.shuffled(seed), task.score, config, scheduler, teacher=teacher
        )
        with closing(reports):
            for report in reports:
                found.append(report.reward)
                tokens += report.num_tokens
                if len(found) >= WINDOW and fmean(found[-WINDOW:]) >= target:
                    break
    is_there = fmean(found[-WINDOW:]) >= target
    return {
        "seed": seed,
        "tokens_to_target": tokens if is_there else None,
        "tokens": tokens,
        "steps": len(found),
        "held_out_reward": reward_of(engine, task, model),
        "curve": [round(fmean(found[i : i + WINDOW]), 3) for i in range(0, len(found), WINDOW)],
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = gym_task(TASK, seed=0)
    module = make_teacher(task)
    with ExitStack() as at_end:
        directory = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        path = at_end.enter_context(saved(module, require_tokenizer(MODEL), directory / "teacher"))
        engine = at_end.enter_context(inflight.launch(options(path)))
        pool = at_end.enter_context(inflight.launch([options(path), options(path)]))
        url = at_end.enter_context(vllm_server(path, "--max-model-len", "64", threads=1))
        rollouts, of_teacher = held_out(engine, task, student()), reward_of(engine, task, module)
        outside: dict[str, TeacherLike] = {"two engines": pool, "vLLM's server": url}
        result: dict[str, Any] = {
            "learning_rate": SMALL.learning_rate,
            "window": WINDOW,
            "vllm": vllm_version(),
            "teacher_reward": of_teacher,
            "target": SHARE * of_teacher,
            "student_reward": fmean(map(task.score, rollouts)),
            "differences": {name: difference(teacher, module, rollouts) for name, teacher in outside.items()},
            "runs": {},
        }
        print(result, flush=True)
        settings = {"rewards": (None, True), "module": (module, False), "module and rewards": (module, True)}
        for name, (teacher, rewards) in (settings | {name: (each, False) for name, each in outside.items()}).items():
            for seed in SEEDS:
                run = learn(engine, task, seed, result["target"], teacher, rewards=rewards)
                result["runs"].setdefault(name, []).append(run)
                print(name, run, flush=True)
            finish("distillation", result)


if __name__ == "__main__":
    main()
