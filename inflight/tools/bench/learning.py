"""`inflight bench learning`: schedules against each other, or with `--lags` corrections on tokens of a known age.

For every seed a small model is warmed up once; each run starts from those weights, sees the same prompts in the same
order and takes the same number of optimizer steps on the same number of rollouts. Draws are not repeated: each run has
its own.

Schedules are those of `inflight.training.schedules`. On a CPU, engine and trainer share the cores. `inflight` and
`one_step_off` give half of them to each, because both work all the time. In `sync` one of the two works at a time and
may have all of them; since more threads are not always faster for a small model, every combination of half and all is
tried for a few steps, and the fastest is taken: the best that an alternating trainer can have on the same machine.

With `--lags` every run alternates between generating and training, on weights that are `lag` optimizer steps late: all
tokens of a step have the same age, so that nothing but the correction differs between the runs of a lag.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any

import torch
from rich.table import Table

from inflight.engine.device import resolve_device
from inflight.tools.bench.learning_run import (
    GROUP_SIZE,
    TASK,
    LearningSettings,
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

LAG_DEFAULTS = {"steps": 120, "sequences": 256, "learning_rate": 2e-4}
"""Defaults that replace those of LearningSettings: with lags there are many runs, and each is shorter."""
TARGET_SHARE = 0.9
TRIAL_STEPS = 10
"""Optimizer steps of a trial of numbers of threads."""


def measure(options: LearningOptions, progress: Progress = untold) -> dict[str, Any]:
    """Compare corrections if `lags` are given, else schedules."""
    given = {name: value for name, value in asdict(options).items() if value is not None}
    settings = LearningSettings(**(LAG_DEFAULTS if options.lags else {}) | given)
    check(settings)
    unused = ("modes", "objective", "target") if settings.lags else ("lags", "corrections")
    return {
        "bench": "learning",
        "task": TASK,
        **{name: value for name, value in asdict(settings).items() if name not in unused},
        "group_size": GROUP_SIZE,
        "smoothing_steps": SMOOTHING_STEPS,
        **(_measure_lags if settings.lags else _measure_modes)(settings, progress),
    }


def check(settings: LearningSettings) -> None:
    """Raise ValueError if a run would fail after its warm-up."""
    check_modes(settings.modes)
    if settings.sequences < GROUP_SIZE:
        raise ValueError(f"--sequences must be at least one group of {GROUP_SIZE}, got {settings.sequences}")
    if settings.lags and not settings.corrections:
        raise ValueError("--corrections must name at least one correction, such as none,tis")
    for name in settings.corrections if settings.lags else (settings.objective,):
        if resolve(name).proximal == "recomputed":
            raise ValueError(f"objective {name!r} is for several optimizer steps per batch; these runs take one")


def table(result: dict[str, Any]) -> Table:
    return (_table_of_lags if "lags" in result else _table_of_modes)(result)


def _measure_modes(settings: LearningSettings, progress: Progress) -> dict[str, Any]:
    """Run every mode from the same start, for each seed, in an order that differs from seed to seed.

    Per mode: seconds_to_target and tokens_to_target (median over seeds; None if a seed did not reach its target),
    final_reward, tokens, seconds, held-out accuracy and gpu_busy (means; 0 … 1, None on a CPU), and `seeds` with all of
    it and the staleness of each.
    ratio: sync's seconds_to_target divided by inflight's, median over seeds. series: the curve of every run.
    """
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


def _threads_of(schedule: str, settings: LearningSettings, start: Start, progress: Progress) -> Threads:
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


def rotated(items: Sequence[Any], turn: int) -> list[Any]:
    """Return the items in another order at each turn, so that none of them always comes first."""
    turn %= len(items)
    return [*items[turn:], *items[:turn]]


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


def _table_of_modes(result: dict[str, Any]) -> Table:
    """Show what each mode came to."""
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


def _measure_lags(settings: LearningSettings, progress: Progress) -> dict[str, Any]:
    """Train once for each lag, correction and seed; modes, objective and target of the settings are not used.

    `ablation` has the outcome of every run, `series` its curve; `final_reward` the means over seeds by correction and
    lag.
    """
    ablation, series = [], []
    threads = split_cores(resolve_device(settings.device))
    parts = parts_of(progress, len(settings.seeds) * (1 + len(settings.lags) * len(settings.corrections)))
    for seed in settings.seeds:
        with warm_start(settings, seed, next(parts)) as start:
            for lag, correction in product(settings.lags, settings.corrections):
                run = learn(
                    replace(settings, objective=correction),
                    start,
                    schedule="sync",
                    threads=threads,
                    lag=lag,
                    label=f"lag {lag}, {correction}",
                    progress=next(parts),
                )
                of_run = {"lag": lag, "correction": correction, "seed": seed}
                series.append(of_run | {"points": rounded_points(run.curve)})
                ablation.append(
                    of_run
                    | {
                        "final_reward": run.final_reward,
                        "accuracy_before": run.accuracy_before,
                        "accuracy_after": run.accuracy_after,
                        "ess_min": min((point.ess for point in run.curve if point.ess is not None), default=None),
                        "seconds": run.curve[-1].seconds,
                    }
                )
    return {
        "final_reward": {
            correction: {str(lag): _mean(ablation, "final_reward", lag, correction) for lag in settings.lags}
            for correction in settings.corrections
        },
        "ablation": ablation,
        "series": series,
    }


def _table_of_lags(result: dict[str, Any]) -> Table:
    """Show final reward and, after it, held-out accuracy: a row per correction, a column per lag."""
    lags = [f"lag {lag}" for lag in result["lags"]]
    title = f"{_title(result)}: final reward, held-out accuracy"
    shown = new_table(title, "correction", *lags, left="correction")
    for correction in result["corrections"]:
        cells = (
            [_mean(result["ablation"], name, lag, correction) for name in ("final_reward", "accuracy_after")]
            for lag in result["lags"]
        )
        shown.add_row(correction, *(f"{reward:.3f}, {accuracy:.3f}" for reward, accuracy in cells))
    return shown


def _mean(ablation: list[dict[str, Any]], name: str, lag: int, correction: str) -> float:
    return fmean(run[name] for run in ablation if (run["lag"], run["correction"]) == (lag, correction))


def rounded_points(curve: list[Point]) -> list[dict[str, Any]]:
    """Return the points for a JSON file, in five digits."""
    return [
        {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in asdict(point).items()}
        for point in curve
    ]


def _title(result: dict[str, Any]) -> str:
    return f"{result['task']}, {result['model']} on {result['device']}, {result['sequences']} rollouts per step"
