"""`inflight bench learning`: the time to a reward with different schedules.

Each seed has one warmed-up model. All runs of a seed start from it, see the same prompts in the same order, and take
the same number of optimizer steps with the same number of rollouts. Draws differ between runs.

The schedules are in `inflight.training.schedules`. On a CPU, engine and trainer share the cores. `inflight` and
`one_step_off` give half of the cores to each side, because both work all the time. In `sync` one side works at a time
and can use all cores. More threads are not always faster for a small model, so that a few steps of every combination of
half and all are tried, and the fastest combination is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from rich.table import Table

from inflight.engine.model.device import resolve_device
from inflight.tools.bench.learning_run import (
    GROUP_SIZE,
    TASK,
    Point,
    Run,
    Start,
    learn,
    warm_start,
)
from inflight.tools.bench.options import LearningOptions
from inflight.tools.bench.staleness import check_modes
from inflight.tools.demo.trainer import Threads, split_cores
from inflight.tools.plots import SMOOTHING_STEPS, new_table, number
from inflight.tools.progress import Progress, part_of, parts_of, untold
from inflight.training.objective.objective import resolve

TARGET_SHARE = 0.9
TRIAL_STEPS = 10
"""Optimizer steps of a trial of thread counts."""


def measure(settings: LearningOptions, progress: Progress = untold) -> dict[str, Any]:
    """Run every mode from the same start, for each seed, in an order that differs from seed to seed.

    Per mode: seconds_to_target and tokens_to_target (median over seeds; None if a seed did not reach its target),
    final_reward, tokens, seconds, held-out accuracy and gpu_busy (means; 0 … 1, None on a CPU), and `seeds` with all of
    these values and the staleness of each seed.
    ratio: seconds_to_target of sync divided by seconds_to_target of inflight, median over seeds.
    series: the curve of every run.
    """
    check(settings)
    schedules = settings.modes
    runs: dict[str, list[Run]] = {mode: [] for mode in schedules}
    threads: dict[str, Threads] = {}
    parts = parts_of(progress, len(settings.seeds) * (1 + len(schedules)))
    for turn, seed in enumerate(settings.seeds):
        with warm_start(settings, seed, warm_up := next(parts)) as start:
            trials = part_of(warm_up, 1, 1)
            threads = threads or {mode: _threads_of(mode, settings, start, trials) for mode in schedules}
            for mode in rotated(schedules, turn):
                runs[mode].append(learn(settings, start, schedule=mode, threads=threads[mode], progress=next(parts)))
    targets = [_target(settings, [runs[mode][index] for mode in schedules]) for index in range(len(settings.seeds))]
    modes = {mode: _summary(settings, of_mode, targets) for mode, of_mode in runs.items()}
    ratios = _ratios(modes)
    return {
        "bench": "learning",
        "task": TASK,
        **asdict(settings),
        "group_size": GROUP_SIZE,
        "smoothing_steps": SMOOTHING_STEPS,
        "threads": {mode: asdict(of_mode) for mode, of_mode in threads.items()},
        "target": dict(zip(map(str, settings.seeds), targets, strict=True)),
        "target_is": "given" if settings.target is not None else f"{TARGET_SHARE} of the least final reward, per seed",
        **modes,
        "ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "series": [
            {"mode": mode, "seed": seed, "points": rounded_points(run.curve)}
            for mode, of_mode in runs.items()
            for seed, run in zip(settings.seeds, of_mode, strict=True)
        ],
    }


def check(settings: LearningOptions) -> None:
    """Raise ValueError if a run would fail after its warm-up."""
    check_modes(settings.modes)
    if settings.sequences < GROUP_SIZE:
        raise ValueError(f"--sequences must be at least one group of {GROUP_SIZE}, got {settings.sequences}")
    if resolve(settings.objective).proximal == "recomputed":
        raise ValueError(
            f"objective {settings.objective!r} is for several optimizer steps per batch; these runs take one"
        )


def _threads_of(schedule: str, settings: LearningOptions, start: Start, progress: Progress) -> Threads:
    """Return the threads of a schedule on this machine (see the docstring of the module)."""
    half, cores = split_cores(resolve_device(settings.device)), torch.get_num_threads()
    if schedule != "sync" or half.engine in (0, cores):
        return half
    short = replace(settings, steps=TRIAL_STEPS)
    seconds: dict[Threads, float] = {}
    for threads in (Threads(t, e) for t in {half.trainer, cores} for e in {half.engine, cores}):
        label = f"sync with {threads.trainer} and {threads.engine} threads"
        run = learn(short, start, schedule="sync", threads=threads, label=label, progress=progress)
        seconds[threads] = median(after.seconds - before.seconds for before, after in pairwise(run.curve))
    return min(seconds, key=lambda threads: seconds[threads])


def rotated(items: Sequence[Any], turn: int) -> list[Any]:
    """Return the items in another order at each turn, so that a different item is first."""
    turn %= len(items)
    return [*items[turn:], *items[:turn]]


def _target(settings: LearningOptions, runs: Sequence[Run]) -> float | None:
    """Return the target of the runs of a seed. None: the runs started with as much reward, and learned nothing."""
    if settings.target is not None:
        return settings.target
    target = TARGET_SHARE * min(run.final_reward for run in runs)
    return target if target > fmean(run.curve[0].reward for run in runs) else None


def _summary(settings: LearningOptions, runs: list[Run], targets: list[float | None]) -> dict[str, Any]:
    """Summarize one mode. Runs and targets are in the order of the seeds."""
    points = [run.reached(target) if target is not None else None for run, target in zip(runs, targets, strict=True)]
    seeds = [
        {
            "seed": seed,
            "seconds_to_target": point.seconds if point else None,
            "tokens_to_target": point.tokens if point else None,
            "final_reward": run.final_reward,
            "tokens": run.curve[-1].tokens,
            "seconds": run.curve[-1].seconds,
            "accuracy_before": run.accuracy_before,
            "accuracy_after": run.accuracy_after,
            "gpu_busy": run.gpu_busy,
            "engine": run.engine,
            **run.staleness,
        }
        for seed, run, point in zip(settings.seeds, runs, points, strict=True)
    ]
    means = ("final_reward", "tokens", "seconds", "accuracy_before", "accuracy_after")
    busy = [run.gpu_busy for run in runs if run.gpu_busy is not None]
    return {
        "seconds_to_target": _median([of["seconds_to_target"] for of in seeds]),
        "tokens_to_target": _median([of["tokens_to_target"] for of in seeds]),
        **{name: fmean(of[name] for of in seeds) for name in means},
        "gpu_busy": fmean(busy) if busy else None,
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


def table(result: dict[str, Any]) -> Table:
    """Show the result of each mode."""
    on_gpu = any(result[mode]["gpu_busy"] is not None for mode in result["modes"])
    names = ("mode", "seconds to target", "tokens to target", "final reward", "held-out accuracy", "seconds")
    shown = new_table(_title(result), *names, *(["GPU busy"] if on_gpu else []), left="mode")
    shown.caption_justify = "left"
    for mode in result["modes"]:
        of = result[mode]
        shown.add_row(
            mode,
            number(of["seconds_to_target"], ".1f"),
            number(of["tokens_to_target"], ",.0f"),
            f"{of['final_reward']:.3f}",
            f"{of['accuracy_before']:.3f} → {of['accuracy_after']:.3f}",
            f"{of['seconds']:.1f}",
            *([number(of["gpu_busy"], ".0%")] if on_gpu else []),
        )
    if result["ratio"]:
        shown.caption = f"sync / inflight, seconds to target: {result['ratio']:.2f} (median of seeds)"
    return shown


def rounded_points(curve: list[Point]) -> list[dict[str, Any]]:
    """Return the points with five digits, for a JSON file."""
    return [
        {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in asdict(point).items()}
        for point in curve
    ]


def _title(result: dict[str, Any]) -> str:
    return f"{result['task']}, {result['model']} on {result['device']}, {result['sequences']} rollouts per step"
