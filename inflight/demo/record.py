"""The files of a run: a line per step as it happens, a summary and a plot at the end."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from inflight.bench.plots import save_figure


@dataclass(slots=True)
class StepRecord:
    """Describes one optimizer step. Times in milliseconds are means over the step's tokens (token_age_ms,
    weight_lag_ms, version_lag) or the newest swap's (swap_ms)."""

    step: int
    seconds: float
    """Seconds since reinforcement learning began."""
    reward: float
    accuracy: float | None
    """Held-out accuracy, where it was measured after this step."""
    num_tokens: int
    tokens_per_s: float
    """Tokens that arrived per second since the step before."""
    swap_ms: float | None
    weight_lag_ms: float | None
    token_age_ms: float | None
    version_lag: float | None
    ess: float | None
    kl: float | None
    ratio_mean: float | None


def append_step(path: Path, record: StepRecord) -> None:
    """Append one JSON line, so that an interrupted run keeps what it had."""
    with open(path, "a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def plot(path: Path, records: list[StepRecord], *, title: str, accuracy_before: float) -> None:
    """Draw reward and held-out accuracy over seconds, and below them how old the tokens were."""
    from matplotlib.figure import Figure

    seconds = np.array([r.seconds for r in records])
    figure = Figure(figsize=(9, 7))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    rewards = np.array([r.reward for r in records])
    window = max(1, min(9, len(rewards) // 5))
    smooth = np.convolve(np.pad(rewards, window // 2, "edge"), np.ones(window) / window, "valid")[: len(rewards)]
    top.plot(seconds, rewards, color="tab:blue", alpha=0.25, linewidth=1)
    top.plot(seconds, smooth, color="tab:blue", label="training reward (running mean)")
    measured = [(r.seconds, r.accuracy) for r in records if r.accuracy is not None]
    points = [(0.0, accuracy_before), *measured]
    top.plot(*zip(*points, strict=True), "o-", color="tab:orange", label="held-out accuracy (greedy)")
    top.set_ylim(0, 1)
    top.set_ylabel("reward, accuracy")
    top.legend(loc="lower right")
    top.set_title(title, loc="left", fontsize=10)
    for name, color, label in (
        ("token_age_ms", "tab:green", "token_age_ms: drawn → consumed"),
        ("swap_ms", "tab:red", "swap_ms: publish() → first token under it"),
        ("weight_lag_ms", "tab:purple", "weight_lag_ms: newer weights published → drawn"),
    ):
        values = [(r.seconds, getattr(r, name)) for r in records if getattr(r, name)]
        if values:
            bottom.plot(*zip(*values, strict=True), color=color, label=label, linewidth=1.2)
    bottom.set_yscale("log")
    bottom.set_ylabel("milliseconds (mean of the step)")
    bottom.set_xlabel("seconds of reinforcement learning")
    bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8, frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    save_figure(path, figure)
