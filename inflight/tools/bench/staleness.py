"""`inflight bench staleness`: the ages of tokens in a running loop of generating, training and publishing."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel

from inflight.core.extras import needing
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.model.device import resolve_device
from inflight.fleet.engine import Engine
from inflight.fleet.launching import launch
from inflight.tools.bench.measured_run import measured
from inflight.tools.bench.options import StalenessOptions, TraceOptions
from inflight.tools.bench.peers import vllm_python
from inflight.tools.demo.trainer import Threads, load_trainer, split_cores, torch_threads
from inflight.tools.plots import new_table
from inflight.tools.progress import Progress, untold
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.schedules import resolve_schedule
from inflight.weights.trainer.publisher import Publisher

GROUP_SIZE = 4
WARM_UP_STEPS = 3
POINTS = ("p50", "p90", "p99", "max")
SERVED = ("swap_ms", "update_ms", "stall_ms", "gap_ms", "gap_across_ms")


def measure(settings: StalenessOptions, progress: Progress = untold) -> dict[str, Any]:
    """Train by GRPO on arbitrary rewards for `steps` optimizer steps while the engine draws `sequences` sequences at a
    time, and publish after every `publish_every`-th step.

    An optimizer step uses `sequences` rollouts. With mode "inflight" twice as many are outstanding, so that a slower
    trainer lets the generator idle at that bound. On a CPU engine and trainer get half of the cores each. In mode
    "sync" one of them works at a time and has all cores. Three additional steps before the first measured step compile
    kernels and let the first prompts end.

    The result has {p50, p90, p99, max} in milliseconds of weight_lag_ms, token_age_ms, policy_age_ms, swap_ms and
    stall_ms, version_lag {p50, max}, the counts of tokens and swaps, the seconds of each side by activity (trainer_s,
    engine_s), and the distribution of each measure (`spread`). With `settings.target` the command measures a server
    (`served_staleness`).
    """
    if settings.target is not None:
        with needing("bench", "measuring a server"):
            from inflight.tools.bench import served_staleness
        return served_staleness.measure(settings, progress)
    config = GRPOConfig(
        steps=WARM_UP_STEPS + settings.steps,
        groups_per_step=max(1, settings.sequences // GROUP_SIZE),
        sampling=SamplingParams(n=GROUP_SIZE, max_tokens=settings.tokens, ignore_eos=True),
        schedule=settings.mode,
        skip_uniform_groups=False,
    )
    with engine_and_trainer(
        settings, slots=settings.slots, backend=settings.backend, in_turn=settings.mode == "sync"
    ) as (engine, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        prompts = random_prompts(engine.info.vocab_size, settings.prompt_tokens)
        with engine.publisher(model) as publisher:
            seldom = _EveryNth(publisher, settings.publish_every)
            reports = grpo(engine, seldom, model, optimizer, prompts, parity_of_tokens, config)
            for report in islice(reports, WARM_UP_STEPS):
                progress(f"warm-up, step {report.step} of {WARM_UP_STEPS}", report.step / config.steps)
            with measured(engine) as run:
                for report in reports:
                    run.step(report)
                    progress(f"step {report.step - WARM_UP_STEPS} of {settings.steps}", report.step / config.steps)
        return {"bench": "staleness", **asdict(settings), "engine": engine.info.execution(), **run.result()}


def check_modes(modes: Collection[str]) -> None:
    """Raise ValueError unless each mode is a schedule and there is at least one."""
    if not modes:
        raise ValueError("--modes must name at least one schedule, such as inflight,sync")
    for mode in modes:
        resolve_schedule(mode)


class _EveryNth:
    """Publisher that publishes at every n-th call."""

    def __init__(self, publisher: Publisher, every: int):
        self._publisher, self._every, self._calls = publisher, every, 0

    @property
    def version(self) -> int:
        return self._publisher.version

    def publish(self) -> int:
        is_due = self._calls % self._every == 0  # as before the first step
        self._calls += 1
        return self._publisher.publish() if is_due else self.version


def random_prompts(vocabulary: int, length: int) -> Iterator[list[int]]:
    """Yield prompts of random token ids without end."""
    while True:
        yield torch.randint(vocabulary, (length,)).tolist()


@contextmanager
def engine_and_trainer(
    settings: StalenessOptions | TraceOptions, *, slots: int = 2, backend: str = "inflight", in_turn: bool = False
) -> Iterator[tuple[Engine, PreTrainedModel]]:
    """Launch an engine for `sequences` in groups of GROUP_SIZE, and load its trainer in fp32. in_turn: one of them
    works at a time, and has all cores."""
    device = resolve_device(settings.device)
    threads = Threads(torch.get_num_threads(), 0) if in_turn else split_cores(device)
    with (
        torch_threads(threads.trainer),
        launch(
            settings.model,
            backend=backend,
            backend_python=vllm_python(backend),
            device=device.type,
            dtype=settings.dtype,
            slots=slots,
            max_sequences=max(1, settings.sequences // GROUP_SIZE) * GROUP_SIZE,
            max_context=settings.prompt_tokens + settings.tokens,
            seed=settings.seed,
            threads=threads.engine,
        ) as engine,
    ):
        torch.manual_seed(settings.seed)
        yield engine, load_trainer(settings.model, device)


def table(result: dict[str, Any]) -> Table:
    """Show the distribution of every age, and the counts of a server."""
    if result["target"] is None:
        title = f"{result['mode']}, {result['num_swaps']} swaps, {result['num_swaps_in_flight']} of them in flight, "
    else:
        title = f"{result['num_updates']} updates of {result['target']}, "
    shown = new_table(f"{result['model']}: {title}{result['tokens_per_s']:,.0f} tokens/s", "", *POINTS, left="")
    for name in (*SERVED, "weight_lag_ms", "token_age_ms", "policy_age_ms", "version_lag"):
        values = result.get(name) or {}
        if name in result:
            shown.add_row(name, *(f"{values[key]:,.2f}" if key in values else "" for key in POINTS))
    for name in (name for name in result if name.startswith("num_") and result["target"] is not None):
        shown.add_row(name[4:].replace("_", " "), "not told" if result[name] is None else f"{result[name]:,}")
    return shown


def parity_of_tokens(rollout: Rollout) -> float:
    """Return a reward that differs within a group and costs nothing."""
    return float(rollout.token_ids.sum() % 2)
