"""`inflight bench learning`: the time to a reward with different schedules.

All runs of a seed start from one warmed-up model, see the same prompts in the same order, and take the same number of
optimizer steps with the same number of rollouts. Draws differ between runs. On a CPU each side has half of the cores.
In `sync`, where one side works at a time, a few steps with every combination of half and all of the cores are tried.
More threads are not always faster for a small model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from inflight.core.clock import now_ns
from inflight.core.garbage import without_full_collections
from inflight.core.sampling import SamplingParams
from inflight.engine.model.device import resolve_device
from inflight.engine.model.shapes import SHAPES
from inflight.fleet.launching import launch
from inflight.tools.bench.options import LearningOptions
from inflight.tools.demo.run import held_out_accuracy, longest
from inflight.tools.demo.tasks import Task, gym_task
from inflight.tools.demo.trainer import (
    Threads,
    WarmupConfig,
    load_trainer,
    make_optimizer,
    require_tokenizer,
    saved,
    split_cores,
    torch_threads,
    warm_up,
)
from inflight.tools.progress import Progress, part_of, parts_of, untold
from inflight.tools.recorded_run import SMOOTHING_STEPS, smoothed
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.objective.objective import resolve
from inflight.training.schedules import resolve_schedule

TASK = "spell_backward"
GROUP_SIZE = 8
ENGINE_SEQUENCES = 128
"""Maximum number of sequences that the engine decodes together."""
TARGET_SHARE = 0.9
TRIAL_STEPS = 10
"""Optimizer steps of a trial of thread counts."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start of all runs of a seed."""

    task: Task
    seed: int
    directory: str
    """Warmed-up model and its tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    curve: list[dict[str, Any]]
    """For each optimizer step: `step`; `seconds` since reinforcement learning began, generation included; `tokens`
    trained on so far; and the means `reward` over its rollouts, `ess` and `version_lag` over its tokens."""
    accuracy_before: float
    """Share of held-out prompts with a correct greedy answer."""
    accuracy_after: float
    staleness: dict[str, Any]
    engine: dict[str, Any]
    """Execution of the passes in the engine."""

    @property
    def rewards(self) -> list[float]:
        """Return the smoothed reward of each step."""
        return smoothed([point["reward"] for point in self.curve]).tolist()

    def summary(self, seed: int, target: float | None) -> dict[str, Any]:
        """Return the values of the run, with the time and the tokens until the smoothed reward was the target."""
        least = float("inf") if target is None else target
        reached = [point for point, reward in zip(self.curve, self.rewards, strict=True) if reward >= least]
        return {
            "seed": seed,
            "seconds_to_target": reached[0]["seconds"] if reached else None,
            "tokens_to_target": reached[0]["tokens"] if reached else None,
            "final_reward": self.rewards[-1],
            "tokens": self.curve[-1]["tokens"],
            "seconds": self.curve[-1]["seconds"],
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "engine": self.engine,
            **self.staleness,
        }


def measure(settings: LearningOptions, progress: Progress = untold) -> dict[str, Any]:
    """Run every mode from the same start, for each seed, in an order that differs from seed to seed.

    Per mode: seconds_to_target and tokens_to_target (median over seeds; None if a seed did not reach its target),
    final_reward, tokens, seconds and held-out accuracy (means), and `seeds` with all of these values and the staleness
    of each seed.
    ratio: seconds_to_target of sync divided by seconds_to_target of inflight, median over seeds.
    series: the curve of every run.
    """
    check(settings)
    runs: dict[str, list[Run]] = {mode: [] for mode in settings.modes}
    threads: dict[str, Threads] = {}
    parts = parts_of(progress, len(settings.seeds) * (1 + len(settings.modes)))
    for turn, seed in enumerate(settings.seeds):
        with _warm_start(settings, seed, warm_up := next(parts)) as start:
            trials = part_of(warm_up, 1, 1)
            threads = threads or {mode: _threads_of(mode, settings, start, trials) for mode in settings.modes}
            first = turn % len(settings.modes)
            for mode in (*settings.modes[first:], *settings.modes[:first]):
                runs[mode].append(_learn(settings, start, mode, threads[mode], mode, next(parts)))
    targets = [_target(settings, of_seed) for of_seed in zip(*runs.values(), strict=True)]
    modes = {mode: _summary(settings, of_mode, targets) for mode, of_mode in runs.items()}
    ratios = _ratios(modes)
    return {
        "task": TASK,
        "group_size": GROUP_SIZE,
        "smoothing_steps": SMOOTHING_STEPS,
        "threads": {mode: asdict(of_mode) for mode, of_mode in threads.items()},
        "target": dict(zip(map(str, settings.seeds), targets, strict=True)),
        "target_is": "given" if settings.target is not None else f"{TARGET_SHARE} of the least final reward, per seed",
        **modes,
        "ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "series": [
            {"mode": mode, "seed": seed, "points": [_rounded(point) for point in run.curve]}
            for mode, of_mode in runs.items()
            for seed, run in zip(settings.seeds, of_mode, strict=True)
        ],
    }


def check(settings: LearningOptions) -> None:
    """Raise ValueError if a run would fail after its warm-up."""
    if not settings.modes:
        raise ValueError("--modes must name at least one schedule, such as inflight,sync")
    for mode in settings.modes:
        resolve_schedule(mode)
    if settings.sequences % GROUP_SIZE:
        raise ValueError(
            f"--sequences must be a multiple of {GROUP_SIZE}, the size of a group, got {settings.sequences}"
        )
    if resolve(settings.objective).proximal == "recomputed":
        raise ValueError(
            f"objective {settings.objective!r} is for several optimizer steps per batch; these runs take one"
        )


@contextmanager
def _warm_start(settings: LearningOptions, seed: int, progress: Progress) -> Iterator[Start]:
    """Warm a model up and save it, so that all runs of this seed begin alike."""
    disable_progress_bar()  # of Transformers
    task = gym_task(TASK, seed=seed, max_tokens=settings.tokens or None)
    torch.manual_seed(seed)
    model, tokenizer = load_trainer(settings.model, resolve_device(settings.device)), require_tokenizer(settings.model)
    if settings.warmup_steps and settings.model in SHAPES:
        config = WarmupConfig(
            steps=settings.warmup_steps,
            demonstrations=settings.demonstrations,
            learning_rate=settings.warmup_learning_rate,
            seed=seed,
        )
        for step, loss in enumerate(warm_up(model, tokenizer, task.train, config), start=1):
            progress(f"seed {seed}, warm-up, step {step}: loss {loss:.3f}", step / settings.warmup_steps)
    with (
        TemporaryDirectory(prefix="inflight-start-") as parent,
        saved(model, tokenizer, Path(parent)) as directory,
    ):
        yield Start(task, seed, directory)


def _threads_of(schedule: str, settings: LearningOptions, start: Start, progress: Progress) -> Threads:
    """Return the threads of a schedule: half of the cores for each side, and the fastest combination for `sync`."""
    half, cores = split_cores(resolve_device(settings.device)), torch.get_num_threads()
    if schedule != "sync" or half.engine in (0, cores):
        return half
    short = replace(settings, steps=TRIAL_STEPS)
    seconds: dict[Threads, float] = {}
    for threads in (Threads(t, e) for t in {half.trainer, cores} for e in {half.engine, cores}):
        label = f"sync with {threads.trainer} and {threads.engine} threads"
        run = _learn(short, start, "sync", threads, label, progress)
        seconds[threads] = median(after["seconds"] - before["seconds"] for before, after in pairwise(run.curve))
    return min(seconds, key=lambda threads: seconds[threads])


def _learn(
    settings: LearningOptions, start: Start, schedule: str, threads: Threads, label: str, progress: Progress
) -> Run:
    """Run GRPO once. label: name of the run in the progress."""
    torch.manual_seed(start.seed)
    task = start.task
    model = load_trainer(start.directory, resolve_device(settings.device))
    optimizer, scheduler = make_optimizer(model.parameters(), settings.learning_rate, ramp=10, steps=settings.steps)
    config = GRPOConfig(
        steps=settings.steps,
        groups_per_step=settings.sequences // GROUP_SIZE,
        sampling=SamplingParams(n=GROUP_SIZE, max_tokens=task.max_tokens),
        objective=settings.objective,
        schedule=schedule,
    )
    with (
        torch_threads(threads.trainer),
        launch(
            start.directory,
            device=settings.device,
            dtype=settings.dtype,
            max_sequences=min(ENGINE_SEQUENCES, settings.sequences),
            max_context=longest(task, require_tokenizer(start.directory)),
            threads=threads.engine,
        ) as engine,
        without_full_collections(),
    ):
        before = held_out_accuracy(engine, task, task.held_out)
        curve: list[dict[str, Any]] = []
        with engine.publisher(model) as publisher:
            began_ns, num_tokens = now_ns(), 0
            examples = task.shuffled(start.seed)
            for report in grpo(engine, publisher, model, optimizer, examples, task.score, config, scheduler):
                num_tokens += report.num_tokens
                curve.append(
                    {
                        "step": report.step,
                        "seconds": (report.finished_ns - began_ns) / 1e9,
                        "tokens": num_tokens,
                        "reward": report.reward,
                        "ess": report.stats.ess if report.stats else None,
                        "version_lag": float(report.staleness.version_lag.mean()) if report.staleness else None,
                    }
                )
                text = f"seed {start.seed}, {label}, step {report.step}: reward {report.reward:.3f}"
                progress(text, report.step / settings.steps)
            engine.wait_for_version(publisher.publish())
        return Run(
            curve=curve,
            accuracy_before=before,
            accuracy_after=held_out_accuracy(engine, task, task.held_out),
            staleness=engine.staleness.summary(),
            engine=engine.info.execution(),
        )


def _target(settings: LearningOptions, runs: Sequence[Run]) -> float | None:
    """Return the target of the runs of a seed. None: the runs started with as much reward, and learned nothing."""
    if settings.target is not None:
        return settings.target
    target = TARGET_SHARE * min(run.rewards[-1] for run in runs)
    return target if target > fmean(run.curve[0]["reward"] for run in runs) else None


def _summary(settings: LearningOptions, runs: list[Run], targets: list[float | None]) -> dict[str, Any]:
    """Summarize one mode. Runs and targets are in the order of the seeds."""
    seeds = [run.summary(seed, target) for seed, run, target in zip(settings.seeds, runs, targets, strict=True)]
    means = ("final_reward", "tokens", "seconds", "accuracy_before", "accuracy_after")
    return {
        "seconds_to_target": _median([of["seconds_to_target"] for of in seeds]),
        "tokens_to_target": _median([of["tokens_to_target"] for of in seeds]),
        **{name: fmean(of[name] for of in seeds) for name in means},
        "seeds": seeds,
    }


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _ratios(modes: Mapping[str, dict[str, Any]]) -> list[float]:
    """Return seconds of sync / seconds of inflight for each seed in which both reached the target."""
    if "inflight" not in modes or "sync" not in modes:
        return []
    pairs = zip(modes["sync"]["seeds"], modes["inflight"]["seeds"], strict=True)
    seconds = [(sync["seconds_to_target"], inflight["seconds_to_target"]) for sync, inflight in pairs]
    return [sync / inflight for sync, inflight in seconds if sync and inflight]


def _rounded(point: dict[str, Any]) -> dict[str, Any]:
    """Return a point with five digits, for a JSON file."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in point.items()}
