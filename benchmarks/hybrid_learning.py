"""Trains a tiny hybrid in flight, with the states of running sequences kept or computed again at each swap.

    python benchmarks/hybrid_learning.py [FILE]

`tiny-hybrid` learns the demo's task from a short supervised phase. Each seed starts both runs from the same weights.
"""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from harness import finish
from transformers.utils.logging import disable_progress_bar

from inflight.core.sampling import SamplingParams
from inflight.fleet.launching import launch
from inflight.tools.demo.run import held_out_accuracy, longest
from inflight.tools.demo.tasks import Task, gym_task
from inflight.tools.demo.trainer import (
    WarmupConfig,
    load_trainer,
    make_optimizer,
    require_tokenizer,
    saved,
    torch_threads,
    warm_up,
)
from inflight.training.grpo import GRPOConfig, grpo

MODEL, TASK, CPU = "tiny-hybrid", "spell_backward", torch.device("cpu")
SEEDS = (0, 1, 2)
WARMUP_STEPS, STEPS, LAST_STEPS = 180, 100, 10


def learn(start: str, task: Task, seed: int, kv_on_swap: str) -> dict[str, Any]:
    """Run GRPO from the model in this directory."""
    torch.manual_seed(seed)
    model = load_trainer(start, CPU)
    optimizer, scheduler = make_optimizer(model.parameters(), 4e-4, ramp=10, steps=STEPS)
    config = GRPOConfig(steps=STEPS, groups_per_step=32, sampling=SamplingParams(n=8, max_tokens=task.max_tokens))
    context = longest(task, require_tokenizer(start))
    with (
        torch_threads(1),
        launch(start, device="cpu", max_sequences=128, max_context=context, threads=1, kv_on_swap=kv_on_swap) as engine,
        engine.publisher(model) as publisher,
    ):
        before = held_out_accuracy(engine, task, task.held_out)
        reports = list(grpo(engine, publisher, model, optimizer, task.shuffled(seed), task.score, config, scheduler))
        engine.wait_for_version(publisher.publish())
        after = held_out_accuracy(engine, task, task.held_out)
    lags = [float(report.staleness.version_lag.mean()) for report in reports if report.staleness]
    run = {
        "seed": seed,
        "kv_on_swap": kv_on_swap,
        "accuracy_before": before,
        "accuracy_after": after,
        "reward_first": fmean(report.reward for report in reports[:LAST_STEPS]),
        "reward_last": fmean(report.reward for report in reports[-LAST_STEPS:]),
        "version_lag": fmean(lags),
    }
    print(run, flush=True)
    return run


def main() -> None:
    disable_progress_bar()
    runs = []
    for seed in SEEDS:
        task = gym_task(TASK, seed=seed)
        torch.manual_seed(seed)
        model, tokenizer = load_trainer(MODEL, CPU), require_tokenizer(MODEL)
        with torch_threads(1):
            for _ in warm_up(model, tokenizer, task.train, WarmupConfig(steps=WARMUP_STEPS, seed=seed)):
                pass
        with tempfile.TemporaryDirectory() as parent, saved(model, tokenizer, Path(parent)) as start:
            runs += [learn(start, task, seed, policy) for policy in ("keep", "recompute")]
    finish("hybrid-learning", {"model": MODEL, "task": TASK, "steps": STEPS, "runs": runs})


if __name__ == "__main__":
    main()
