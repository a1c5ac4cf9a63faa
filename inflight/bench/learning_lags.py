"""`inflight bench learning --lags …`: what corrections are worth when tokens are a known number of versions old.

Every run alternates between generating and training, on weights that are `lag` optimizer steps late: all tokens of a
step have the same age, so that nothing but the correction differs between the runs of a lag.
"""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from inflight.bench.learning_run import (
    GROUP_SIZE,
    SMOOTHING_STEPS,
    TASK,
    LearningSettings,
    learn,
    learning_title,
    mean_line,
    reward_line,
    rounded_points,
    warm_start,
)
from inflight.bench.options import Progress
from inflight.bench.plots import new_figure, new_table, save_figure
from inflight.demo.trainer import split_cores
from inflight.engine.device import resolve_device


def measure(settings: LearningSettings, progress: Progress) -> dict[str, Any]:
    """Train once for each lag, correction and seed; modes, objective and target of the settings are not used.

    `ablation` has the outcome of every run, `series` its curve; `final_reward` the means over seeds by correction and
    lag. Raises InflightError or ValueError.
    """
    ablation, series = [], []
    threads = split_cores(resolve_device(settings.device))
    for seed in settings.seeds:
        with warm_start(settings, seed, progress) as start:
            for lag, correction in product(settings.lags, settings.corrections):
                run = learn(
                    replace(settings, objective=correction),
                    start,
                    schedule="sync",
                    threads=threads,
                    lag=lag,
                    label=f"lag {lag}, {correction}",
                    progress=progress,
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
    unused = ("modes", "objective", "target")
    return {
        "bench": "learning",
        "task": TASK,
        **{name: value for name, value in asdict(settings).items() if name not in unused},
        "group_size": GROUP_SIZE,
        "smoothing_steps": SMOOTHING_STEPS,
        "final_reward": {
            correction: {str(lag): _mean(ablation, "final_reward", lag, correction) for lag in settings.lags}
            for correction in settings.corrections
        },
        "ablation": ablation,
        "series": series,
    }


def table(result: dict[str, Any]) -> Table:
    """Show final reward and, after it, held-out accuracy: a row per correction, a column per lag."""
    lags = [f"lag {lag}" for lag in result["lags"]]
    title = f"{learning_title(result)}: final reward, held-out accuracy"
    shown = new_table(title, "correction", *lags, left="correction")
    for correction in result["corrections"]:
        cells = (
            [_mean(result["ablation"], name, lag, correction) for name in ("final_reward", "accuracy_after")]
            for lag in result["lags"]
        )
        shown.add_row(correction, *(f"{reward:.3f}, {accuracy:.3f}" for reward, accuracy in cells))
    return shown


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw final reward by lag, and the curves at the largest lag, means over seeds. `path` is a PNG file."""
    figure, (left, right) = new_figure(2)
    lags = sorted(result["lags"])
    for index, correction in enumerate(result["corrections"]):
        style = {"color": f"C{index}", "label": correction}
        finals = [result["final_reward"][correction][str(lag)] for lag in lags]
        left.plot(range(len(lags)), finals, "o-", **style)
        runs = [run for run in result["series"] if (run["lag"], run["correction"]) == (lags[-1], correction)]
        right.plot(*mean_line([reward_line(run["points"], "step", 1) for run in runs]), **style)
    left.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    left.set_xlabel("age of every token, in versions")
    left.set_ylabel(f"final reward, mean of {result['smoothing_steps']} steps")
    left.set_title(learning_title(result), loc="left", fontsize=10)
    right.set_xlabel("optimizer step")
    right.set_ylabel(f"reward, mean of {result['smoothing_steps']} steps")
    right.set_title(f"lag {lags[-1]}; learning rate {result['learning_rate']:g}", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    save_figure(path, figure)


def _mean(ablation: list[dict[str, Any]], name: str, lag: int, correction: str) -> float:
    return fmean(run[name] for run in ablation if (run["lag"], run["correction"]) == (lag, correction))
