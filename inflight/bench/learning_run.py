"""A run of GRPO from a warmed-up start, as `inflight bench learning` compares them: settings, start, run and curve."""

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.sampling import SamplingParams
from inflight.demo.run import held_out_accuracy, load_trainer, longest
from inflight.demo.tasks import Task, gym_task
from inflight.demo.warmup import WarmupConfig, ramp_and_decay, warm_up
from inflight.engine.shapes import SHAPES
from inflight.observability.gpu import BusyMeter
from inflight.session import launch
from inflight.training.grpo import GRPOConfig, StepReport, grpo
from inflight.training.lag import LaggedPublisher
from inflight.training.objective.objective import resolve
from inflight.training.schedules import SCHEDULES, Schedule

TASK = "spell_backward"
GROUP_SIZE = 8
ENGINE_SEQUENCES = 128
"""Sequences that the engine decodes together, at most."""
SMOOTHING_STEPS = 10
"""A smoothed reward is the mean over so many steps that lie behind; the final reward is the last one."""
TARGET_SHARE = 0.9
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningBench:
    model: str = "tiny"
    device: str = "auto"
    dtype: str = "auto"
    """Of the engine's weights; the trainer's are float32."""
    modes: tuple[Schedule, ...] = ("inflight", "sync", "one_step_off")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 200
    sequences: int = 512
    """Rollouts of an optimizer step, in groups of GROUP_SIZE."""
    tokens: int = 0
    """Of an answer at most; 0: what the task's longest answer needs."""
    correction: str = "tis"
    learning_rate: float = 3e-4
    warmup_steps: int = 250
    """Supervised steps; only for built-in shapes."""
    warmup_learning_rate: float = 2e-3
    demonstrations: int = 300
    """Worked examples that those steps see, over and over; a large model learns a few by heart and nothing else."""
    target: float | None = None
    """A reward; None: TARGET_SHARE of the least final reward of the modes, for each seed."""

    def __post_init__(self) -> None:
        if not self.modes or set(self.modes) - set(SCHEDULES):
            raise ValueError(f"--modes must be some of {', '.join(SCHEDULES)}, got {','.join(self.modes) or 'none'}")
        if self.sequences < GROUP_SIZE:
            raise ValueError(f"--sequences must be at least one group of {GROUP_SIZE}, got {self.sequences}")
        check_correction(self.correction)


def check_correction(name: str) -> None:
    """Raises ValueError if there is no such correction, or if a loop of one step per batch has no use for it."""
    if resolve(name).proximal == "recomputed":
        raise ValueError(f"correction {name!r} is for several optimizer steps per batch; these runs take one")


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads; 0 for the engine leaves torch's own choice."""

    trainer: int
    engine: int


@dataclass(frozen=True, slots=True)
class Start:
    """Where all runs of a seed begin."""

    task: Task
    seed: int
    directory: str
    """The warmed-up model and its tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One optimizer step of a run."""

    step: int
    seconds: float
    """Since reinforcement learning began, generation included."""
    tokens: int
    """Trained on so far."""
    reward: float
    """Mean of the step's rollouts."""
    ess: float | None
    version_lag: float | None
    """Mean over the step's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    curve: list[Point]
    accuracy_before: float
    """Of greedy answers to held-out prompts."""
    accuracy_after: float
    staleness: dict[str, Any]
    engine: dict[str, Any]
    """How its passes ran."""
    gpu_busy: float | None
    """Share of the time of reinforcement learning in which the GPU computed, for trainer or engine; None on a CPU."""

    @property
    def final_reward(self) -> float:
        return float(smoothed([point.reward for point in self.curve])[-1])

    def reached(self, target: float) -> Point | None:
        """The first step at which the smoothed reward is the target or more."""
        rewards = smoothed([point.reward for point in self.curve])
        return next((point for point, reward in zip(self.curve, rewards, strict=True) if reward >= target), None)


@contextmanager
def warm_start(settings: LearningBench, seed: int, progress: Progress) -> Iterator[Start]:
    """Warm a model up and save it, so that all runs of this seed begin alike."""
    disable_progress_bar()  # of Transformers
    task = gym_task(TASK, seed=seed, max_tokens=settings.tokens or None)
    torch.manual_seed(seed)
    model, tokenizer = load_trainer(settings.model, trainer_device(settings))
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
    settings: LearningBench,
    start: Start,
    *,
    schedule: Schedule,
    threads: Threads,
    lag: int = 0,
    label: str = "",
    progress: Progress = lambda _: None,
) -> Run:
    """One run of GRPO. lag: versions by which the engine's weights are late, on top of the schedule's own. label: what
    progress calls the run."""
    torch.manual_seed(start.seed)
    device = trainer_device(settings)
    model, tokenizer = load_trainer(start.directory, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = ramp_and_decay(optimizer, ramp=10, steps=settings.steps, floor=0.1)
    config = GRPOConfig(
        steps=settings.steps,
        groups_per_step=settings.sequences // GROUP_SIZE,
        sampling=SamplingParams(n=GROUP_SIZE, max_tokens=start.task.max_tokens),
        correction=settings.correction,
        schedule=schedule,
    )
    with (
        _torch_threads(threads.trainer),
        launch(
            start.directory,
            device=settings.device,
            dtype=settings.dtype,
            max_sequences=min(ENGINE_SEQUENCES, settings.sequences),
            max_context=longest(start.task, tokenizer),
            threads=threads.engine,
        ) as engine,
        _without_collections(),
    ):
        before = held_out_accuracy(engine, start.task, start.task.held_out)
        examples = start.task.shuffled(start.seed)
        publisher = LaggedPublisher(engine, model, lag=lag) if lag else engine.publisher(model)
        curve: list[Point] = []
        with publisher, BusyMeter(device) as meter:
            began_ns = now_ns()
            for report in grpo(engine, publisher, model, optimizer, examples, start.task.score, config, scheduler):
                curve.append(_point(report, began_ns, curve))
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
            gpu_busy=meter.share,
        )


def split_cores(device: torch.device) -> Threads:
    """Half of the cores each."""
    cores = torch.get_num_threads()
    return Threads(cores, 0) if device.type == "cuda" else Threads(max(1, cores // 2), max(1, cores - cores // 2))


def smoothed(rewards: Sequence[float]) -> np.ndarray:
    """The mean over the last SMOOTHING_STEPS rewards, or over as many as there are: f64[n]."""
    sums = np.cumsum([0.0, *rewards])
    ends = np.arange(1, len(rewards) + 1)
    begins = np.maximum(0, ends - SMOOTHING_STEPS)
    return (sums[ends] - sums[begins]) / (ends - begins)


def written(curve: list[Point]) -> list[dict[str, Any]]:
    """Points for a JSON file, in five digits."""
    return [
        {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in asdict(point).items()}
        for point in curve
    ]


def learning_title(result: dict[str, Any]) -> str:
    return f"{result['task']}, {result['model']} on {result['device']}, {result['sequences']} rollouts per step"


def _point(report: StepReport, began_ns: int, before: list[Point]) -> Point:
    return Point(
        step=report.step,
        seconds=(report.finished_ns - began_ns) / 1e9,
        tokens=report.num_tokens + (before[-1].tokens if before else 0),
        reward=report.reward,
        ess=report.stats.ess if report.stats else None,
        version_lag=float(report.staleness.version_lag.mean()) if report.staleness else None,
    )


def trainer_device(settings: LearningBench) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InflightError("--device cuda: torch finds no GPU here")
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_collections() -> Iterator[None]:
    """A full garbage collection would delay a publish by a quarter of a second, now and then."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
