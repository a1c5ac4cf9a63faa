"""Trains with several objectives on tokens of a constant age, to compare them by lag.

    python benchmarks/objective_lags.py [TASK …]

Every run alternately generates, trains and publishes. The engine's weights are `lag` optimizer steps old from step
lag + 1 on: all tokens of a step have the same age, whatever the speed of the machine. The tasks are "reverse" (three
symbols in reverse order) and "sort" (five symbols in ascending order), and models start from random weights. The result
is written after each run, and runs that it already has are not repeated: delete the file to repeat them. Both tasks
take about 40 minutes on one core.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from harness import small_llama
from torch import nn
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import inflight
from inflight.tools.environment import write_result
from inflight.training.objective.surrogates import lag_clip
from inflight.weights.tensors import fill, published_tensors

OBJECTIVES: dict[str, str | inflight.Objective] = {
    name: name
    for name in ("tis", "ppo_clip", "lag_clip", "loglinear_ppo", "gmpo", "dppo_kl", "dppo_binary_kl", "kpop", "dro")
}
VARIANTS: dict[str, inflight.Objective] = {
    f"lag_clip, growth {growth:g}": inflight.Objective(surrogate=partial(lag_clip, growth=growth))
    for growth in (1.0, -0.5)
}
"""Other rates at which the bounds of `lag_clip` change with the lag, at VARIANT_LAGS alone."""
VARIANT_LAGS = (4, 16)
LAGS = (0, 1, 2, 4, 8, 16)
SEEDS = (0, 1, 2)
RESULTS = Path(__file__).parent / "results" / "cpu"
GROUPS, SAMPLES, WINDOW = 16, 8, 10
"""Prompts of a step, rollouts of a prompt, and the last steps whose mean reward is one figure."""


@dataclass(frozen=True, slots=True)
class Task:
    """Answers of `length` symbols out of `symbols`. answer: the right one for a prompt."""

    symbols: int
    length: int
    answer: Callable[[list[int]], list[int]]
    learning_rate: float
    steps: int

    def prompts(self, seed: int) -> Iterator[list[int]]:
        generator = np.random.default_rng(1000 + seed)
        while True:
            yield [self.symbols, *generator.integers(0, self.symbols, self.length).tolist(), self.symbols + 1]

    def score(self, rollout: inflight.Rollout) -> float:
        """Return the share of the symbols that are right."""
        right = self.answer(rollout.prompt_token_ids.tolist()[1 : 1 + self.length])
        return fmean(float(a == b) for a, b in zip(rollout.token_ids.tolist(), right, strict=True))

    def model(self, seed: int) -> LlamaForCausalLM:
        return small_llama(self.symbols + 2, seed)


TASKS = {
    "reverse": Task(6, 3, lambda drawn: drawn[::-1], learning_rate=3e-3, steps=120),
    "sort": Task(8, 5, sorted, learning_rate=1e-3, steps=120),
}


class LaggedPublisher:
    """Publishes the weights of `lag` calls ago, under the version that they had then. Stores lag + 2 copies."""

    def __init__(self, engine: inflight.Engine, model: nn.Module, *, lag: int):
        self._lag, self._meter = lag, engine.staleness
        self._current, lagged = published_tensors(model), deepcopy(model)
        self._lagged, self._publisher = published_tensors(lagged), engine.publisher(lagged)
        self._kept: deque[dict[str, torch.Tensor]] = deque()
        self._has_sent = False

    @property
    def version(self) -> int:
        return self._publisher.version

    def publish(self) -> int:
        """Keep the present weights, and send the oldest ones that are `lag` calls old."""
        self._kept.append({name: tensor.detach().clone() for name, tensor in self._current.items()})
        if len(self._kept) > self._lag or not self._has_sent:
            self._has_sent = True
            self._publisher.wait_copied()
            fill(self._lagged, self._kept.popleft())
            self._publisher.publish()
        self._meter.trainer_version = self.version + len(self._kept)
        return self.version

    def close(self) -> None:
        self._publisher.close()


def train(
    engine: inflight.Engine, task: Task, objective: str | inflight.Objective, lag: int, seed: int
) -> dict[str, Any]:
    """Train once, and return the figures of the run."""
    began = time.process_time()
    model = task.model(seed).train()
    with engine.publisher(model) as first:
        engine.wait_for_version(first.publish())
    config = inflight.GRPOConfig(
        steps=task.steps,
        groups_per_step=GROUPS,
        sampling=inflight.SamplingParams(n=SAMPLES, max_tokens=task.length, ignore_eos=True),
        objective=objective,
        schedule="sync",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    with closing(LaggedPublisher(engine, model, lag=lag)) as publisher:
        prompts = task.prompts(seed)
        reports = list(inflight.grpo(engine, publisher, model, optimizer, prompts, task.score, config))
    rewards = [report.reward for report in reports]
    stats = [report.stats for report in reports if report.stats]
    return {
        "final_reward": fmean(rewards[-WINDOW:]),
        "curve": [round(fmean(rewards[i : i + WINDOW]), 4) for i in range(0, len(rewards), WINDOW)],
        "version_lag": fmean(float(report.staleness.version_lag.mean()) for report in reports if report.staleness),
        "ess_min": min(of.ess for of in stats),
        "clipped": fmean(of.clipped or 0.0 for of in stats),
        "trainer_cpu_s": round(time.process_time() - began, 2),
    }


def markdown(runs: list[dict[str, Any]]) -> str:
    """Return a table: mean final reward of the seeds, and in parentheses the least and the most."""
    lines = ["| | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |", "|---|" + "---|" * len(LAGS)]
    for objective in OBJECTIVES | VARIANTS:
        cells = []
        for lag in LAGS:
            finals = [run["final_reward"] for run in runs if (run["objective"], run["lag"]) == (objective, lag)]
            cells.append(f"{fmean(finals):.2f} ({min(finals):.2f}–{max(finals):.2f})" if finals else "")
        lines.append(f"| `{objective}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TASKS:
        compare(name)


def compare(name: str) -> None:
    """Do the runs of a task that its result lacks, and print its table."""
    task, path = TASKS[name], RESULTS / f"objective-lags-{name}.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {(run["seed"], run["objective"], run["lag"]) for run in runs}
    for seed in SEEDS:
        missing = [(label, lag) for label, lag in settings() if (seed, label, lag) not in done]
        if not missing:
            continue
        with TemporaryDirectory() as directory:
            task.model(seed).save_pretrained(directory)
            with inflight.launch(
                directory, device="cpu", dtype="float32", max_sequences=128, max_context=16, threads=1
            ) as engine:
                for label, lag in missing:
                    run = train(engine, task, (OBJECTIVES | VARIANTS)[label], lag, seed)
                    runs.append({"seed": seed, "objective": label, "lag": lag} | run)
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                    write_result(path, {"bench": "objective_lags", "task": name, "window": WINDOW, "runs": runs})
    print(markdown(runs))


def settings() -> list[tuple[str, int]]:
    """Return the objectives of each lag."""
    return [(label, lag) for lag in LAGS for label in (OBJECTIVES | VARIANTS if lag in VARIANT_LAGS else OBJECTIVES)]


if __name__ == "__main__":
    main()
