"""`inflight bench learning --lags …`: what corrections are worth when tokens are a known number of versions old.

Every run alternates between generating and training, on weights that are `lag` optimizer steps late: all tokens of a
step have the same age, so that nothing but the correction differs between the runs of a lag.
"""

from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rich.table import Table

from inflight.bench.learning_run import (
    GROUP_SIZE,
    SMOOTHING_STEPS,
    TASK,
    LearningBench,
    Progress,
    check_correction,
    learn,
    learning_title,
    split_cores,
    trainer_device,
    warm_start,
    written,
)

DEFAULTS: dict[str, Any] = {"steps": 120, "sequences": 256, "learning_rate": 2e-4}
"""In place of those of LearningBench: shorter runs, of which there are many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagBench:
    lags: tuple[int, ...]
    corrections: tuple[str, ...]
    learning: LearningBench
    """Modes, correction and target are not used."""

    def __post_init__(self) -> None:
        if not self.corrections:
            raise ValueError("--corrections must name at least one correction, such as none,tis")
        for name in self.corrections:
            check_correction(name)


def measure_lags(settings: LagBench, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Final reward and reward curve for each lag, correction and seed, as `ablation`; means over seeds as
    `final_reward`, by correction and lag. Raises InflightError or ValueError."""
    ablation = []
    threads = split_cores(trainer_device(settings.learning))
    for seed in settings.learning.seeds:
        with warm_start(settings.learning, seed, progress) as start:
            for lag in settings.lags:
                for correction in settings.corrections:
                    bench = replace(settings.learning, correction=correction)
                    run = learn(
                        bench,
                        start,
                        schedule="sync",
                        threads=threads,
                        lag=lag,
                        label=f"lag {lag}, {correction}",
                        progress=progress,
                    )
                    ablation.append(
                        {
                            "lag": lag,
                            "correction": correction,
                            "seed": seed,
                            "final_reward": run.final_reward,
                            "accuracy_before": run.accuracy_before,
                            "accuracy_after": run.accuracy_after,
                            "ess_min": min((point.ess for point in run.curve if point.ess is not None), default=None),
                            "seconds": run.curve[-1].seconds,
                            "curve": written(run.curve),
                        }
                    )
    unused = ("modes", "correction", "target")
    return {
        "bench": "learning",
        "task": TASK,
        **{name: value for name, value in asdict(settings.learning).items() if name not in unused},
        "group_size": GROUP_SIZE,
        "lags": settings.lags,
        "corrections": settings.corrections,
        "smoothing_steps": SMOOTHING_STEPS,
        "final_reward": {
            correction: {str(lag): _mean(ablation, "final_reward", lag, correction) for lag in settings.lags}
            for correction in settings.corrections
        },
        "ablation": ablation,
    }


def lags_table(result: dict[str, Any]) -> Table:
    """Final reward and, after it, held-out accuracy: a row per correction, a column per lag."""
    table = Table(title=f"{learning_title(result)}: final reward, held-out accuracy", title_justify="left")
    table.add_column("correction")
    for lag in result["lags"]:
        table.add_column(f"lag {lag}", justify="right")
    for correction in result["corrections"]:
        cells = (
            [_mean(result["ablation"], name, lag, correction) for name in ("final_reward", "accuracy_after")]
            for lag in result["lags"]
        )
        table.add_row(correction, *(f"{reward:.3f}, {accuracy:.3f}" for reward, accuracy in cells))
    return table


def _mean(ablation: list[dict[str, Any]], name: str, lag: int, correction: str) -> float:
    return fmean(run[name] for run in ablation if (run["lag"], run["correction"]) == (lag, correction))
