"""The plots of `inflight bench learning`."""

from pathlib import Path
from typing import Any

import numpy as np

from inflight.bench.learning_run import learning_title, smoothed
from inflight.bench.plots import new_figure, save_figure

COLORS = {"inflight": "tab:blue", "one_step_off": "tab:green", "sync": "tab:orange"}


def plot_modes(path: Path, result: dict[str, Any]) -> None:
    """Draw smoothed reward against seconds and against tokens: thin lines are seeds, with a dot where each reached its
    target, thick ones their mean. `path` is a PNG file."""
    figure, panels = new_figure(2)
    for axes, name, unit in zip(panels, ("seconds", "tokens"), (1, 1e6), strict=True):
        for mode in result["modes"]:
            seeds = [curve for curve in result["series"] if curve["mode"] == mode]
            lines = [_line(curve["points"], name, unit) for curve in seeds]
            for curve, (x, rewards) in zip(seeds, lines, strict=True):
                axes.plot(x, rewards, color=COLORS[mode], alpha=0.35, linewidth=0.8)
                target = result["target"][str(curve["seed"])]
                reached = np.flatnonzero(rewards >= (np.inf if target is None else target))[:1]
                axes.plot(x[reached], rewards[reached], "o", color=COLORS[mode], markersize=4, zorder=4)
            axes.plot(*_mean_line(lines), color=COLORS[mode], linewidth=2.5, label=mode, zorder=3)
        axes.set_ylabel(f"reward, mean of {result['smoothing_steps']} steps")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    panels[0].set_xlabel("seconds of reinforcement learning")
    panels[1].set_xlabel("million tokens trained on")
    panels[0].set_title(learning_title(result), loc="left", fontsize=10)
    panels[1].set_title(_subtitle(result), loc="left", fontsize=10)
    panels[0].legend(loc="lower right")
    save_figure(path, figure)


def plot_lags(path: Path, result: dict[str, Any]) -> None:
    """Draw final reward by lag, and the curves at the largest lag, means over seeds. `path` is a PNG file."""
    figure, (left, right) = new_figure(2)
    lags = sorted(result["lags"])
    for index, correction in enumerate(result["corrections"]):
        style = {"color": f"C{index}", "label": correction}
        finals = [result["final_reward"][correction][str(lag)] for lag in lags]
        left.plot(range(len(lags)), finals, "o-", **style)
        runs = [run for run in result["series"] if (run["lag"], run["correction"]) == (lags[-1], correction)]
        right.plot(*_mean_line([_line(run["points"], "step", 1) for run in runs]), **style)
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


def _line(points: list[dict[str, Any]], name: str, unit: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([point[name] / unit for point in points]), smoothed([point["reward"] for point in points])


def _mean_line(lines: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over lines where all of them are known."""
    grid = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), 200)
    return grid, np.mean([np.interp(grid, x, rewards) for x, rewards in lines], axis=0)


def _subtitle(result: dict[str, Any]) -> str:
    ratio = f"; sync / inflight {result['ratio']:.2f} ×" if result["ratio"] else ""
    seeds = len(result["seeds"])
    return f"{seeds} seed{'s' * (seeds > 1)}, dots: target reached{ratio}"
