"""One run of GRPO from a warmed-up start: `inflight bench learning` compares many of them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from inflight.core.clock import now_ns
from inflight.core.sampling import SamplingParams
from inflight.engine.model.device import resolve_device
from inflight.engine.model.shapes import SHAPES
from inflight.fleet.engine import Engine
from inflight.fleet.launching import launch
from inflight.observability.trace import Trace
from inflight.observability.trace_file import read
from inflight.tools.bench.options import LearningOptions
from inflight.tools.bench.trace import summarize
from inflight.tools.demo.run import held_out_accuracy, longest
from inflight.tools.demo.tasks import Task, gym_task
from inflight.tools.demo.trainer import (
    Threads,
    WarmupConfig,
    load_trainer,
    ramp_and_decay,
    require_tokenizer,
    saved,
    torch_threads,
    warm_up,
    without_full_collections,
)
from inflight.tools.plots import smoothed
from inflight.tools.progress import Progress
from inflight.training.grpo import GRPOConfig, grpo
from inflight.weights.tensors import fill, published_tensors

TRACED_STEPS = 2
TRACED_FROM = 0.8
"""Share of the steps of a run before the traced ones on a GPU. The reward hardly rises from there."""
TASK = "spell_backward"
GROUP_SIZE = 8
ENGINE_SEQUENCES = 128
"""Maximum number of sequences that the engine decodes together."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start of all runs of a seed."""

    task: Task
    seed: int
    directory: str
    """Warmed-up model and its tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One optimizer step of a run."""

    step: int
    seconds: float
    """Seconds since reinforcement learning began, generation included."""
    tokens: int
    """Tokens trained on so far."""
    reward: float
    """Mean over the rollouts of the step."""
    ess: float | None
    version_lag: float | None
    """Mean over the tokens of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    curve: list[Point]
    accuracy_before: float
    """Share of held-out prompts with a correct greedy answer."""
    accuracy_after: float
    staleness: dict[str, Any]
    engine: dict[str, Any]
    """Execution of the passes in the engine."""
    gpu_busy: float | None
    """Share of the time of a few steps with a running kernel of trainer or engine on the GPU. None on a CPU."""

    @property
    def final_reward(self) -> float:
        """Return the last smoothed reward."""
        return float(smoothed([point.reward for point in self.curve])[-1])

    def reached(self, target: float) -> Point | None:
        """Return the first step at which the smoothed reward is the target or more."""
        rewards = smoothed([point.reward for point in self.curve])
        return next((point for point, reward in zip(self.curve, rewards, strict=True) if reward >= target), None)


@contextmanager
def warm_start(settings: LearningOptions, seed: int, progress: Progress) -> Iterator[Start]:
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
            share = step / settings.warmup_steps
            progress(f"seed {seed}, warm-up, step {step}: loss {loss:.3f}", share)
    with (
        TemporaryDirectory(prefix="inflight-start-") as parent,
        saved(model, tokenizer, Path(parent) / "start") as directory,
    ):
        yield Start(task, seed, directory)


def learn(
    settings: LearningOptions,
    start: Start,
    *,
    schedule: str,
    threads: Threads,
    label: str = "",
    progress: Progress,
) -> Run:
    """Run GRPO once. label: name of the run in the progress."""
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
        curve: list[Point] = []
        with engine.publisher(model) as publisher, TemporaryDirectory(prefix="inflight-busy-") as traces:
            meter = BusyMeter(engine, device, Path(traces), steps=settings.steps)
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
                meter.after(report.step)
                text = f"seed {start.seed}, {label or schedule}, step {report.step}: reward {report.reward:.3f}"
                progress(text, report.step / settings.steps)
            busy = meter.share()
            engine.wait_for_version(publisher.publish())
        after = held_out_accuracy(engine, start.task, start.task.held_out)
        return Run(
            curve=curve,
            accuracy_before=before,
            accuracy_after=after,
            staleness=engine.staleness.summary(),
            engine=engine.info.execution(),
            gpu_busy=busy,
        )


class LaggedPublisher:
    """Publisher with a delay for experiments: `publish()` sends the weights of `lag` calls ago.

    The first call sends the weights at once. Later, call n sends the model of call n − lag under that version number,
    so that a version has the same weights as without a lag. With schedule "sync" all tokens of step t have version
    max(1, t − lag). The publisher stores lag + 2 copies of the model.
    """

    def __init__(self, engine: Engine, model: nn.Module, *, lag: int):
        if lag < 0:
            raise ValueError(f"lag must be at least 0 versions, got {lag}")
        self._lag, self._meter = lag, engine.staleness
        self._current = published_tensors(model)
        self._snapshots: deque[dict[str, torch.Tensor]] = deque()
        lagged = deepcopy(model)
        self._lagged = published_tensors(lagged)
        self._publisher = engine.publisher(lagged)
        self._has_sent = False

    @property
    def version(self) -> int:
        """Return the newest version sent to the engine."""
        return self._publisher.version

    def publish(self) -> int:
        """Store the present parameters, and send the parameters of `lag` calls ago. Returns their version."""
        self._snapshots.append({name: tensor.detach().clone() for name, tensor in self._current.items()})
        if len(self._snapshots) > self._lag or not self._has_sent:
            self._has_sent = True
            self._publisher.wait_copied()
            fill(self._lagged, self._snapshots.popleft())
            self._publisher.publish()
        self._meter.trainer_version = self.version + len(self._snapshots)
        return self.version

    def close(self) -> None:
        self._publisher.close()


class BusyMeter:
    """Measures the busy share of a GPU during a few whole steps: the share of time with a kernel or a copy of trainer
    or engine, from a trace of both. The utilization of the driver (NVML) is coarser.

    On a CPU it does nothing. The trace is merged in a thread while the run continues.
    """

    def __init__(self, engine: Engine, device: torch.device, directory: Path, *, steps: int):
        """steps: number of steps of the run. TRACED_STEPS of them, near the end, are traced."""
        self._engine, self._path = engine, directory / "busy.json.gz"
        self._first = max(1, int(TRACED_FROM * steps)) if device.type == "cuda" else 0
        self._trace: Trace | None = None
        self._closing: Future[None] | None = None

    def after(self, step: int) -> None:
        """Call this after each step. The first step is 1."""
        if step == self._first:
            self._trace = self._engine.trace(self._path)
        elif self._trace is not None and step == self._first + TRACED_STEPS:
            with_a_thread = ThreadPoolExecutor(1, "inflight-busy-meter")
            self._closing = with_a_thread.submit(self._trace.close)
            with_a_thread.shutdown(wait=False)

    def share(self) -> float | None:
        """Return the busy share, 0 … 1, or None on a CPU. Raises InflightError if the trace was not written."""
        if self._trace is None:
            return None
        if self._closing is not None:
            self._closing.result()
        else:  # the run was too short
            self._trace.close()
        return summarize(read(self._path))["busy_share"]
