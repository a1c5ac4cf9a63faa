"""Trains the model of `inflight demo` by one rank and by two, and compares what they learn.

    python benchmarks/demo_ranks.py [FILE]

It uses the demo's task, checkpoint, steps and learning rate. Two ranks over gloo share one engine and its stream, and
each trains on half of the rollouts of a step. `rewards` are means over WINDOW steps, and `held_out` is the mean
reward of held-out prompts at the end. Draws differ between runs. Three seeds take about eight minutes.
"""

import json
import os
import subprocess
import sys
from itertools import product
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from demo_task import held_out, options, student
from harness import finish

import inflight
from inflight.tools.demo.recipes import SMALL
from inflight.tools.demo.start import ANSWER_TOKENS, MODEL, TASK
from inflight.tools.demo.tasks import gym_task
from inflight.tools.demo.trainer import make_optimizer

SEEDS, SIZES, WINDOW, LIMIT_S = (0, 1, 2), (1, 2), 20, 900


def learn(seed: int) -> dict[str, Any]:
    """Train in this rank, and return the figures of the run."""
    task, model = gym_task(TASK, seed=0), student()
    torch.manual_seed(seed)
    optimizer, scheduler = make_optimizer(model.parameters(), SMALL.learning_rate, ramp=SMALL.ramp, steps=SMALL.steps)
    config = inflight.GRPOConfig(
        steps=SMALL.steps,
        groups_per_step=SMALL.groups_per_step,
        sampling=inflight.SamplingParams(n=8, max_tokens=ANSWER_TOKENS),
    )
    with inflight.launch(options(MODEL)) as engine:
        with engine.publisher(model) as publisher:
            reports = inflight.grpo(
                engine, publisher, model, optimizer, task.shuffled(seed), task.score, config, scheduler
            )
            rewards = [report.reward for report in reports]
        found: dict[str, Any] = {
            "seed": seed,
            "rewards": [round(fmean(rewards[end - WINDOW : end]), 3) for end in range(WINDOW, SMALL.steps + 1, WINDOW)],
        }
        if not dist.is_initialized():
            found["held_out"] = fmean(map(task.score, held_out(engine, task, model)))
    if dist.is_initialized():  # One rank evaluates, with another engine.
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank == 0:
            with inflight.launch(options(MODEL)) as engine:
                found["held_out"] = fmean(map(task.score, held_out(engine, task, model)))
    return found


def run(seed: int, size: int) -> dict[str, Any]:
    """Start the ranks of a run, and return the figures of rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", __file__]
    environment = os.environ | {"DEMO_RANKS_SEED": str(seed)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"seed {seed}, {size} ranks: {done.stderr[-3000:]}")
    return next(json.loads(line) for line in reversed(done.stdout.splitlines()) if line.startswith("{"))


def main() -> None:
    runs: dict[str, list[dict[str, Any]]] = {str(size): [] for size in SIZES}
    for seed, size in product(SEEDS, SIZES):
        runs[str(size)].append(run(seed, size))
        print(size, runs[str(size)][-1], flush=True)
    finish("demo-ranks", {"window": WINDOW, "runs_by_ranks": runs})


def worker(seed: int) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    found = learn(seed)
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(int(os.environ["DEMO_RANKS_SEED"]))
    else:
        main()
