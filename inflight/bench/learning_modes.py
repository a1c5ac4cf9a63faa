"""`inflight bench learning`: reward against seconds and tokens, with a generator that never stops and two that do.

The modes are the schedules of `inflight.training.schedules`. For every seed a small model is warmed up once; each mode
starts from those weights, sees the same prompts in the same order and takes the same number of optimizer steps on the
same number of rollouts. Draws are not repeated: each run has its own.

On a CPU, engine and trainer share the cores. `inflight` and `one_step_off` give half of them to each, because both
work all the time. In `sync` one of the two works at a time and may have all of them; since more threads are not always
faster for a small model, every combination of half and all is tried for a few steps, and the fastest is taken: the best
that an alternating trainer can have on the same machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import numpy as np
import torch
from rich.table import Table

from inflight.bench.learning_run import (
    GROUP_SIZE,
    SMOOTHING_STEPS,
    TARGET_SHARE,
    TASK,
    LearningSettings,
    Run,
    Start,
    learn,
    learning_title,
    mean_line,
    reward_line,
    rounded_points,
    warm_start,
)
from inflight.bench.options import Progress
from inflight.bench.plots import new_figure, new_table, save_figure
from inflight.demo.trainer import Threads, split_cores
from inflight.engine.device import resolve_device
from inflight.training.schedules import RolloutSchedule

COLORS = {"inflight": "tab:blue", "one_step_off": "tab:green", "sync": "tab:orange"}
TRIAL_STEPS = 10
"""Optimizer steps of a trial of numbers of threads."""


def measure(settings: LearningSettings, progress: Progress) -> dict[str, Any]:
    """Run every mode from the same start, for each seed, in an order that differs from seed to seed.

    Per mode: seconds_to_target and tokens_to_target (median over seeds; None if a seed did not reach its target),
    final_reward, tokens, seconds, held-out accuracy and gpu_busy (means; 0 … 1, None on a CPU), and `seeds` with all of
    it and the staleness of each.
    ratio: sync's seconds_to_target divided by inflight's, median over seeds. series: the curve of every run.
    Raises InflightError or ValueError.
    """
    schedules = cast(tuple[RolloutSchedule, ...], settings.modes)
    runs: dict[RolloutSchedule, list[Run]] = {mode: [] for mode in schedules}
    threads: dict[RolloutSchedule, Threads] = {}
    for turn, seed in enumerate(settings.seeds):
        with warm_start(settings, seed, progress) as start:
            threads = threads or {mode: _threads_of(mode, settings, start, progress) for mode in schedules}
            for mode in rotated(schedules, turn):
                runs[mode].append(learn(settings, start, schedule=mode, threads=threads[mode], progress=progress))
    targets = [_target(settings, [runs[mode][index] for mode in schedules]) for index in range(len(settings.seeds))]
    modes = {mode: _summary(settings, of_mode, targets) for mode, of_mode in runs.items()}
    ratios = _ratios(modes)
    return {
        "bench": "learning",
        "task": TASK,
        **{name: value for name, value in asdict(settings).items() if name not in ("lags", "corrections")},
        "group_size": GROUP_SIZE,
        "threads": {mode: asdict(of_mode) for mode, of_mode in threads.items()},
        "target": dict(zip(map(str, settings.seeds), targets, strict=True)),
        "target_is": "given" if settings.target is not None else f"{TARGET_SHARE} of the least final reward, per seed",
        "smoothing_steps": SMOOTHING_STEPS,
        **modes,
        "ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "series": [
            {"mode": mode, "seed": seed, "points": rounded_points(run.curve)}
            for mode, of_mode in runs.items()
            for seed, run in zip(settings.seeds, of_mode, strict=True)
        ],
    }


def rotated(items: Sequence[Any], turn: int) -> list[Any]:
    """Return the items in another order at each turn, so that none of them always comes first."""
    turn %= len(items)
    return [*items[turn:], *items[:turn]]


def table(result: dict[str, Any]) -> Table:
    """Show what each mode came to."""
    on_gpu = any(result[mode]["gpu_busy"] is not None for mode in result["modes"])
    names = ("mode", "seconds to target", "tokens to target", "final reward", "held-out accuracy", "seconds")
    shown = new_table(learning_title(result), *names, *(["GPU busy"] if on_gpu else []), left="mode")
    shown.caption_justify = "left"
    for mode in result["modes"]:
        of = result[mode]
        shown.add_row(
            mode,
            _number(of["seconds_to_target"], "{:.1f}"),
            _number(of["tokens_to_target"], "{:,.0f}"),
            f"{of['final_reward']:.3f}",
            f"{of['accuracy_before']:.3f} → {of['accuracy_after']:.3f}",
            f"{of['seconds']:.1f}",
            *([_number(of["gpu_busy"], "{:.0%}")] if on_gpu else []),
        )
    if result["ratio"]:
        shown.caption = f"sync / inflight, seconds to target: {result['ratio']:.2f} (median of seeds)"
    return shown


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw smoothed reward against seconds and against tokens: thin lines are seeds, with a dot where each reached its
    target, thick ones their mean. `path` is a PNG file."""
    figure, panels = new_figure(2)
    for axes, name, unit in zip(panels, ("seconds", "tokens"), (1, 1e6), strict=True):
        for mode in result["modes"]:
            seeds = [curve for curve in result["series"] if curve["mode"] == mode]
            lines = [reward_line(curve["points"], name, unit) for curve in seeds]
            for curve, (x, rewards) in zip(seeds, lines, strict=True):
                axes.plot(x, rewards, color=COLORS[mode], alpha=0.35, linewidth=0.8)
                target = result["target"][str(curve["seed"])]
                reached = np.flatnonzero(rewards >= (np.inf if target is None else target))[:1]
                axes.plot(x[reached], rewards[reached], "o", color=COLORS[mode], markersize=4, zorder=4)
            axes.plot(*mean_line(lines), color=COLORS[mode], linewidth=2.5, label=mode, zorder=3)
        axes.set_ylabel(f"reward, mean of {result['smoothing_steps']} steps")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    panels[0].set_xlabel("seconds of reinforcement learning")
    panels[1].set_xlabel("million tokens trained on")
    panels[0].set_title(learning_title(result), loc="left", fontsize=10)
    ratio = f"; sync / inflight {result['ratio']:.2f} ×" if result["ratio"] else ""
    seeds = len(result["seeds"])
    subtitle = f"{seeds} seed{'s' * (seeds > 1)}, dots: target reached{ratio}"
    panels[1].set_title(subtitle, loc="left", fontsize=10)
    panels[0].legend(loc="lower right")
    save_figure(path, figure)


def _target(settings: LearningSettings, runs: Sequence[Run]) -> float | None:
    """Return the target of a seed's runs; None if they began with as much, so that nothing was learned."""
    if settings.target is not None:
        return settings.target
    target = TARGET_SHARE * min(run.final_reward for run in runs)
    return target if target > fmean(run.curve[0].reward for run in runs) else None


def _summary(settings: LearningSettings, runs: list[Run], targets: list[float | None]) -> dict[str, Any]:
    """Summarise one mode, whose runs and targets come in the order of the seeds."""
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
    """Return sync / inflight in seconds, for the seeds in which both reached the target."""
    if "inflight" not in modes or "sync" not in modes:
        return []
    pairs = zip(modes["sync"]["seeds"], modes["inflight"]["seeds"], strict=True)
    seconds = [(sync["seconds_to_target"], inflight["seconds_to_target"]) for sync, inflight in pairs]
    return [sync / inflight for sync, inflight in seconds if sync and inflight]


def _threads_of(schedule: RolloutSchedule, settings: LearningSettings, start: Start, progress: Progress) -> Threads:
    """Choose the schedule's threads on this machine, as the module's docstring says."""
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


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
