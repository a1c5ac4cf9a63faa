"""Trains with several objectives, learning rates and version lags, to choose the default objective by.

    python benchmarks/objective_table.py [FILE]

Every run alternately generates, trains and publishes, and the engine's weights are `lag` publishes late: all tokens of
a step have the same age, whatever the speed of the machine. "reverse" is a small model without a warm-up that reverses
three symbols; "spell_backward" is the task of `inflight bench learning`. The file is written after every run, and runs
that it contains are not repeated. Seed follows seed, so that a file that is not finished has fewer seeds.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import inflight
from inflight.tools.bench.learning_run import LaggedPublisher, Start, warm_start
from inflight.tools.bench.options import LearningOptions
from inflight.tools.demo.run import longest
from inflight.tools.demo.trainer import load_trainer, ramp_and_decay, require_tokenizer
from inflight.tools.environment import write_result
from inflight.tools.progress import untold

OBJECTIVES = ("tis", "ppo_clip", "dppo_kl", "gspo")
LAGS = (1, 4, 16)
SEEDS = (0, 1, 2)
WINDOW = 10
"""Steps whose mean reward is one figure."""
SYMBOLS, LENGTH = 6, 3


@dataclass(frozen=True, slots=True)
class Settings:
    """The sizes of a task's runs."""

    learning_rates: tuple[float, ...]
    steps: int
    groups: int
    samples: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """An engine and the start of all runs of one seed."""

    engine: inflight.Engine
    make_model: Callable[[], torch.nn.Module]
    examples: Callable[[], Iterator[Any]]
    score: Callable[[inflight.Rollout], float]
    decays: bool


SETTINGS = {
    "spell_backward": Settings((2e-4, 6e-4), steps=60, groups=16, samples=8, max_tokens=12),
    "reverse": Settings((3e-3, 1e-3), steps=120, groups=16, samples=8, max_tokens=LENGTH),
}


@contextmanager
def reverse(seed: int) -> Iterator[Prepared]:
    config = LlamaConfig(
        vocab_size=SYMBOLS + 2,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )

    def make_model() -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)

    def examples() -> Iterator[list[int]]:
        generator = np.random.default_rng(1000 + seed)
        while True:
            yield [SYMBOLS, *generator.integers(0, SYMBOLS, LENGTH).tolist(), SYMBOLS + 1]

    def score(rollout: inflight.Rollout) -> float:
        right = rollout.prompt_token_ids.tolist()[1 : 1 + LENGTH][::-1]
        return fmean(float(a == b) for a, b in zip(rollout.token_ids.tolist(), right, strict=True))

    with TemporaryDirectory() as directory:
        make_model().save_pretrained(directory)
        with inflight.launch(
            directory, device="cpu", dtype="float32", max_sequences=128, max_context=16, threads=1
        ) as engine:
            yield Prepared(engine, make_model, examples, score, decays=False)


_warmed_up: dict[int, Start] = {}
_kept = ExitStack()
"""Keeps the directories of warmed-up models until the program ends."""


@contextmanager
def spell_backward(seed: int) -> Iterator[Prepared]:
    if seed not in _warmed_up:
        _warmed_up[seed] = _kept.enter_context(warm_start(LearningOptions(device="cpu"), seed, untold))
    start = _warmed_up[seed]
    context = longest(start.task, require_tokenizer(start.directory))
    with inflight.launch(
        start.directory, device="cpu", dtype="float32", max_sequences=128, max_context=context, threads=1
    ) as engine:
        yield Prepared(
            engine,
            lambda: load_trainer(start.directory, torch.device("cpu")),
            lambda: start.task.shuffled(seed),
            start.task.score,
            decays=True,
        )


TASKS = {"spell_backward": spell_backward, "reverse": reverse}


def train(prepared: Prepared, settings: Settings, objective: str, rate: float, lag: int, seed: int) -> dict[str, Any]:
    """Train once, and return the figures of the run."""
    began = time.process_time()
    model, engine = prepared.make_model().train(), prepared.engine
    torch.manual_seed(seed)
    with engine.publisher(model) as first:
        engine.wait_for_version(first.publish())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = ramp_and_decay(optimizer, ramp=10, steps=settings.steps, floor=0.1) if prepared.decays else None
    config = inflight.GRPOConfig(
        steps=settings.steps,
        groups_per_step=settings.groups,
        sampling=inflight.SamplingParams(
            n=settings.samples, max_tokens=settings.max_tokens, ignore_eos=not prepared.decays
        ),
        objective=objective,
        schedule="sync",
    )
    with closing(LaggedPublisher(engine, model, lag=lag)) as publisher:
        reports = list(
            inflight.grpo(engine, publisher, model, optimizer, prepared.examples(), prepared.score, config, scheduler)
        )
    rewards = [report.reward for report in reports]
    stats = [report.stats for report in reports if report.stats]
    return {
        "final_reward": fmean(rewards[-WINDOW:]),
        "mean_reward": fmean(rewards),
        "curve": [round(fmean(rewards[i : i + WINDOW]), 4) for i in range(0, len(rewards), WINDOW)],
        "version_lag": fmean(float(report.staleness.version_lag.mean()) for report in reports if report.staleness),
        "ess_min": min(of.ess for of in stats),
        "clipped": fmean(of.clipped or 0.0 for of in stats),
        "skipped": reports[-1].num_skipped,
        "trainer_cpu_s": round(time.process_time() - began, 2),
    }


def markdown(runs: list[dict[str, Any]]) -> str:
    """Return a table per task: mean final reward of the seeds, and in parentheses the least and the most."""
    lines: list[str] = []
    for task, settings in SETTINGS.items():
        columns = list(product(sorted(settings.learning_rates), LAGS))
        lines += [f"\n| {task} | " + " | ".join(f"{rate:g}, lag {lag}" for rate, lag in columns) + " |"]
        lines += ["|---|" + "---|" * len(columns)]
        for objective in OBJECTIVES:
            cells = []
            for rate, lag in columns:
                wanted = {"task": task, "objective": objective, "learning_rate": rate, "lag": lag}
                finals = [run["final_reward"] for run in runs if wanted.items() <= run.items()]
                cells.append(f"{fmean(finals):.2f} ({min(finals):.2f}–{max(finals):.2f})" if finals else "")
            lines.append(f"| `{objective}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    disable_progress_bar()
    torch.set_num_threads(1)
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/cpu/objectives_default.json")
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    for seed, index, task in product(SEEDS, range(2), TASKS):
        settings = SETTINGS[task]
        rate = settings.learning_rates[index]
        keys = [
            {"task": task, "objective": objective, "learning_rate": rate, "lag": lag, "seed": seed}
            for lag, objective in product(LAGS, OBJECTIVES)
        ]
        todo = [key for key in keys if not any(key.items() <= run.items() for run in runs)]
        if not todo:
            continue
        with TASKS[task](seed) as prepared:
            for key in todo:
                run = train(prepared, settings, key["objective"], rate, key["lag"], seed)
                runs.append(key | run)
                print(json.dumps(key | run), file=sys.stderr, flush=True)
                of_tasks = {name: asdict(of) for name, of in SETTINGS.items()}
                write_result(path, {"bench": "objectives_default", "window": WINDOW, "tasks": of_tasks, "runs": runs})
    print(markdown(runs))
    _kept.close()


if __name__ == "__main__":
    main()
