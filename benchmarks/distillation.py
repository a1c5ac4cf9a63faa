"""Compares learning from a teacher with learning from rewards alone, by the drawn tokens until a reward.

    python benchmarks/distillation.py [FILE]

Task, teacher and student are those of examples/distillation.py. Runs of a seed start from the same student and take 64
rollouts per step. The target is 0.9 of the teacher's reward. `rl` has rewards and no teacher, `top 16` a teacher and
advantages of 0. A run ends at the target. Draws differ between runs.
"""

import sys
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import finish
from transformers import AutoModelForCausalLM, PreTrainedModel

import inflight
from inflight.engine.model.shapes import shape_config

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import distillation as example

SEEDS, STEPS = (0, 1, 2), 80
SAMPLING = inflight.SamplingParams(n=8, max_tokens=16)


def reward_of(engine: inflight.Engine, teacher: PreTrainedModel) -> float:
    with engine.publisher(teacher) as publisher:
        engine.wait_for_version(publisher.publish())
        groups = engine.generate([f"Number {i}: " for i in range(100, 132)], SAMPLING)
    return fmean(example.reward(rollout) for group in groups for rollout in group)


def learn(engine: inflight.Engine, teacher: PreTrainedModel | None, seed: int, target: float) -> dict[str, Any]:
    torch.manual_seed(seed)
    student = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    taught = {} if teacher is None else {"teacher_weight": 1.0, "teacher_top_k": 16}
    config = inflight.GRPOConfig(
        steps=STEPS,
        groups_per_step=8,
        sampling=SAMPLING,
        objective=inflight.Objective(**taught),
        advantages="grpo" if teacher is None else example.nothing,
    )
    prompts, tokens, before = (f"Number {i % 300 + 100}: " for i in count()), 0, None
    with engine.publisher(student) as publisher:
        for report in inflight.grpo(
            engine, publisher, student, optimizer, prompts, example.reward, config, teacher=teacher
        ):
            tokens, before = tokens + report.num_tokens, report.reward if before is None else before
            if report.reward >= target:
                return {"seed": seed, "tokens_to_target": tokens, "step": report.step, "reward_before": before}
    return {"seed": seed, "tokens_to_target": None, "step": STEPS, "reward_before": before, "tokens": tokens}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs: dict[str, list[dict[str, Any]]] = {"rl": [], "top 16": []}
    with inflight.launch("tiny", threads=1) as engine:
        teacher = example.make_teacher()
        of_teacher = reward_of(engine, teacher)
        for seed in SEEDS:
            for name, of_runs in runs.items():
                of_runs.append(learn(engine, None if name == "rl" else teacher, seed, 0.9 * of_teacher))
                print(name, of_runs[-1], flush=True)
    finish("distillation", {"seeds": SEEDS, "teacher_reward": of_teacher, "target": 0.9 * of_teacher, "runs": runs})


if __name__ == "__main__":
    main()
