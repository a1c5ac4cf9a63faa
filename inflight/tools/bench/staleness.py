"""`inflight bench staleness`: the ages of tokens in a running loop of generating, training and publishing."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.model.device import resolve_device
from inflight.fleet.launching import launch
from inflight.tools.bench.measured_run import measured
from inflight.tools.bench.options import StalenessOptions
from inflight.tools.bench.peers import vllm_python
from inflight.tools.demo.trainer import Threads, load_trainer, split_cores, torch_threads
from inflight.tools.progress import Progress, untold
from inflight.training.data.lead import read_ahead
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.schedules import resolve_schedule
from inflight.weights.trainer.publisher import Publisher

GROUP_SIZE = 4
WARM_UP_STEPS = 3


def measure(settings: StalenessOptions, progress: Progress = untold) -> dict[str, Any]:
    """Train by GRPO on arbitrary rewards for `steps` optimizer steps while the engine draws `sequences` sequences at a
    time, and publish after every `publish_every`-th step.

    An optimizer step uses `sequences` rollouts. With mode "inflight", `ahead` decides how many are in flight, and
    `split_cores` shares the cores of a CPU. In mode "sync" one side works at a time and has all cores. Three additional
    steps before the first measured step compile kernels and let the first prompts end.

    The result has {p50, p90, p99, max} in milliseconds of weight_lag_ms, token_age_ms, policy_age_ms, swap_ms and
    stall_ms, version_lag {p50, max}, steps_per_s, trainer_wait_share (the share of time in which the trainer waits for
    rollouts), age_over_bound (`TokenStaleness.age_over_bound`), the counts of tokens and swaps, and the distribution of
    each measure (`spread`). Raises ValueError if `sequences` is not a multiple of 4, and for a lead that the schedule
    does not use.
    """
    if settings.sequences % GROUP_SIZE:
        raise ValueError(
            f"--sequences must be a multiple of {GROUP_SIZE}, the size of a group, got {settings.sequences}"
        )
    if settings.ahead != "auto" and resolve_schedule(settings.mode).batches_ahead is not None:
        raise ValueError(
            f"--ahead is for --mode inflight; --mode {settings.mode} has its own lead, so leave --ahead out"
        )
    num_groups, device = settings.sequences // GROUP_SIZE, resolve_device(settings.device)
    config = GRPOConfig(
        steps=WARM_UP_STEPS + settings.steps,
        groups_per_step=num_groups,
        sampling=SamplingParams(n=GROUP_SIZE, max_tokens=settings.tokens, ignore_eos=True),
        schedule=settings.mode,
        ahead=read_ahead(settings.ahead),
        skip_uniform_groups=False,
    )
    torch.manual_seed(settings.seed)
    model = load_trainer(settings.model, device)
    threads = Threads(torch.get_num_threads(), 0) if settings.mode == "sync" else split_cores(device, model)
    with (
        torch_threads(threads.trainer),
        launch(
            settings.model,
            backend=settings.backend,
            backend_python=vllm_python(settings.backend),
            device=device.type,
            dtype=settings.dtype,
            slots=settings.slots,
            max_sequences=num_groups * GROUP_SIZE,
            max_context=settings.prompt_tokens + settings.tokens,
            seed=settings.seed,
            threads=threads.engine,
        ) as engine,
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        prompts = _random_prompts(engine.info.vocab_size, settings.prompt_tokens)
        with engine.publisher(model) as publisher:
            seldom = _EveryNth(publisher, settings.publish_every)
            reports = grpo(engine, seldom, model, optimizer, prompts, _parity_of_tokens, config)
            for report in islice(reports, WARM_UP_STEPS):
                progress(f"warm-up, step {report.step} of {WARM_UP_STEPS}", report.step / config.steps)
            with measured(engine) as run:
                for report in reports:
                    run.step(report)
                    progress(f"step {report.step - WARM_UP_STEPS} of {settings.steps}", report.step / config.steps)
        return {"engine": engine.info.execution(), **run.result()}


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


def _random_prompts(vocabulary: int, length: int) -> Iterator[list[int]]:
    """Yield prompts of random token ids without end."""
    while True:
        yield torch.randint(vocabulary, (length,)).tolist()


def _parity_of_tokens(rollout: Rollout) -> float:
    """Return a reward that differs within a group and costs nothing."""
    return float(rollout.token_ids.sum() % 2)
