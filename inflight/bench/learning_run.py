"""One run of GRPO from a warmed-up start: `inflight bench learning` compares many of them."""

import logging
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from inflight.bench.lagged_publisher import LaggedPublisher
from inflight.bench.options import LearningOptions, Progress
from inflight.core.clock import now_ns
from inflight.core.sampling import SamplingParams
from inflight.demo.run import held_out_accuracy, longest
from inflight.demo.tasks import Task, gym_task
from inflight.demo.trainer import Threads, load_trainer, require_tokenizer, torch_threads, without_full_collections
from inflight.demo.warmup import WarmupConfig, ramp_and_decay, warm_up
from inflight.engine.device import resolve_device
from inflight.engine.shapes import SHAPES
from inflight.session import launch
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.schedules import RolloutSchedule

logger = logging.getLogger("inflight.observability")

GPU_SAMPLE_S = 0.1
TASK = "spell_backward"
GROUP_SIZE = 8
ENGINE_SEQUENCES = 128
"""The engine decodes at most so many sequences together."""
SMOOTHING_STEPS = 10
"""A smoothed reward is the mean over the last so many steps; the final reward is the last smoothed one."""
TARGET_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class LearningSettings(LearningOptions):
    """The options, in which nothing is left to the kind of comparison."""

    steps: int = 200
    sequences: int = 512
    learning_rate: float = 3e-4


@dataclass(frozen=True, slots=True)
class Start:
    """The start of all runs of a seed."""

    task: Task
    seed: int
    directory: str
    """The warmed-up model and its tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One optimizer step of a run."""

    step: int
    seconds: float
    """Seconds since reinforcement learning began, generation included."""
    tokens: int
    """Tokens trained on so far."""
    reward: float
    """The mean over the step's rollouts."""
    ess: float | None
    version_lag: float | None
    """The mean over the step's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    curve: list[Point]
    accuracy_before: float
    """The share of held-out prompts whose greedy answer is right."""
    accuracy_after: float
    staleness: dict[str, Any]
    engine: dict[str, Any]
    """How the engine ran its passes."""
    gpu_busy: float | None
    """The share of the run in which the GPU computed, for trainer or engine; None on a CPU."""

    @property
    def final_reward(self) -> float:
        return float(smoothed([point.reward for point in self.curve])[-1])

    def reached(self, target: float) -> Point | None:
        """Return the first step at which the smoothed reward is the target or more."""
        rewards = smoothed([point.reward for point in self.curve])
        return next((point for point, reward in zip(self.curve, rewards, strict=True) if reward >= target), None)


@contextmanager
def warm_start(settings: LearningSettings, seed: int, progress: Progress) -> Iterator[Start]:
    """Warm a model up and save it, so that all runs of this seed begin alike."""
    disable_progress_bar()  # of Transformers
    task = gym_task(TASK, seed=seed, max_tokens=settings.tokens or None)
    torch.manual_seed(seed)
    model, tokenizer = load_trainer(settings.model, resolve_device(settings.device)), require_tokenizer(settings.model)
    if settings.warmup_steps and settings.model in SHAPES:
        warm_up(
            model,
            tokenizer,
            task.train,
            WarmupConfig(
                steps=settings.warmup_steps,
                demonstrations=settings.demonstrations,
                learning_rate=settings.warmup_learning_rate,
            ),
            seed=seed,
            on_step=lambda step, loss: progress(f"seed {seed}, warm-up, step {step}: loss {loss:.3f}"),
        )
    with tempfile.TemporaryDirectory(prefix="inflight-learning-") as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        yield Start(task, seed, directory)


def learn(
    settings: LearningSettings,
    start: Start,
    *,
    schedule: RolloutSchedule,
    threads: Threads,
    lag: int = 0,
    label: str = "",
    progress: Progress,
) -> Run:
    """Run GRPO once.

    lag: how many versions the engine's weights are late, on top of the schedule's own. label: what progress calls the
    run.
    """
    torch.manual_seed(start.seed)
    device = resolve_device(settings.device)
    model, tokenizer = load_trainer(start.directory, device), require_tokenizer(start.directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = ramp_and_decay(optimizer, ramp=10, steps=settings.steps, floor=0.1)
    config = GRPOConfig(
        steps=settings.steps,
        groups_per_step=settings.sequences // GROUP_SIZE,
        sampling=SamplingParams(n=GROUP_SIZE, max_tokens=start.task.max_tokens),
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
            max_context=longest(start.task, tokenizer),
            threads=threads.engine,
        ) as engine,
        without_full_collections(),
    ):
        before = held_out_accuracy(engine, start.task, start.task.held_out)
        examples = start.task.shuffled(start.seed)
        publisher = LaggedPublisher(engine, model, lag=lag) if lag else engine.publisher(model)
        curve: list[Point] = []
        with publisher, gpu_busy(device) as busy:
            began_ns = now_ns()
            for report in grpo(engine, publisher, model, optimizer, examples, start.task.score, config, scheduler):
                curve.append(
                    Point(
                        step=report.step,
                        seconds=(report.finished_ns - began_ns) / 1e9,
                        tokens=report.num_tokens + (curve[-1].tokens if curve else 0),
                        reward=report.reward,
                        ess=report.stats.ess if report.stats else None,
                        version_lag=float(report.staleness.version_lag.mean()) if report.staleness else None,
                    )
                )
                progress(f"seed {start.seed}, {label or schedule}, step {report.step}: reward {report.reward:.3f}")
        with engine.publisher(model) as publisher:  # the trainer's last weights, however late the others were
            engine.wait_for_version(publisher.publish())
            after = held_out_accuracy(engine, start.task, start.task.held_out)
        return Run(
            curve=curve,
            accuracy_before=before,
            accuracy_after=after,
            staleness=engine.staleness.summary(),
            engine=engine.info.execution(),
            gpu_busy=fmean(busy) / 100 if busy else None,
        )


@contextmanager
def gpu_busy(device: torch.device) -> Iterator[list[int]]:
    """Sample a GPU's utilisation while the block runs: the percentage of time in which any process had a kernel on it.

    The list stays empty on a CPU, and where the driver cannot be asked (NVML, by the package nvidia-ml-py).
    """
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(GPU_SAMPLE_S):
            try:
                samples.append(torch.cuda.utilization(device))
            except (ModuleNotFoundError, RuntimeError) as error:
                logger.warning("the GPU's utilisation is not measured: %s", error)
                return

    if device.type != "cuda":
        yield samples
        return
    thread = threading.Thread(target=sample, name="inflight-gpu-meter", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def smoothed(rewards: Sequence[float]) -> np.ndarray:
    """Return the mean over the last SMOOTHING_STEPS rewards, or over as many as there are: f64[n]."""
    sums = np.cumsum([0.0, *rewards])
    ends = np.arange(1, len(rewards) + 1)
    begins = np.maximum(0, ends - SMOOTHING_STEPS)
    return (sums[ends] - sums[begins]) / (ends - begins)


def reward_line(points: list[dict[str, Any]], name: str, unit: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([point[name] / unit for point in points]), smoothed([point["reward"] for point in points])


def mean_line(lines: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over lines where all of them are known."""
    grid = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), 200)
    return grid, np.mean([np.interp(grid, x, rewards) for x, rewards in lines], axis=0)


def rounded_points(curve: list[Point]) -> list[dict[str, Any]]:
    """Return the points for a JSON file, in five digits."""
    return [
        {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in asdict(point).items()}
        for point in curve
    ]


def learning_title(result: dict[str, Any]) -> str:
    return f"{result['task']}, {result['model']} on {result['device']}, {result['sequences']} rollouts per step"
