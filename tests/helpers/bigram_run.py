"""Runs of `grpo` in float64 on a policy that is a table, with an engine that draws the same rollouts in every run."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.observability.staleness_meter import StalenessMeter
from inflight.training.config import GRPOConfig
from inflight.training.data.batch import PackedBatch
from inflight.training.grpo import grpo
from inflight.training.model.forward import TokenScores
from inflight.training.report import StepReport
from inflight.training.schedules import Example

VOCABULARY = 11
SAMPLING = SamplingParams(n=4, max_tokens=9)
UNIFORM = (0, 3, 4, 8, 13)
"""Groups whose rewards are equal."""


class Bigram(nn.Module):
    """The logits of a token are the row of the token before it."""

    def __init__(self, seed: int = 0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=random, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens].log_softmax(-1)


def score_tokens(model: nn.Module, batch: PackedBatch, *, entropy: bool = False) -> TokenScores:
    """Return log-probabilities f64[n] of the drawn tokens, and their entropies."""
    logs = model(batch.input_ids[batch.drawn - 1])
    own = logs.gather(1, batch.input_ids[batch.drawn, None])[:, 0]
    return TokenScores(own, -(logs.exp() * logs).sum(-1) if entropy else None)


def reward(rollout: Rollout) -> float:
    return 1.0 if rollout.group_id in UNIFORM else float(rollout.token_ids.sum() % 3)


class FakeEngine:
    """An engine and a publisher. Groups finish in the order of submission, and are a function of their id.

    waits: called before each group; returns True if the group has not finished when the trainer asks for it.
    """

    def __init__(self, waits: Callable[[], bool] = lambda: False):
        self._waits = waits
        self.stream = self.ledger = self.scoring = self
        self.staleness = StalenessMeter()
        self.observers: list[Any] = []
        self.failures: Counter[str] = Counter()
        self.outstanding: list[int] = []
        self.version = 10
        self.policy = Bigram().table.detach().log_softmax(-1).numpy()
        self._groups: dict[int, list[Rollout]] = {}
        self._ids = count()

    def check(self, scored: Any, least: int) -> None:
        """Do nothing: no score fails."""

    def publish(self) -> int:
        self.version += 1
        self.staleness.published(self.version, now_ns())
        return self.version

    def prompt_lengths(self, prompts: list[list[int]]) -> list[int]:
        return [len(prompt) for prompt in prompts]

    def submit(self, prompts: list[list[int]], params: SamplingParams, **_: Any) -> list[int]:
        ids = [next(self._ids) for _ in prompts]
        self._groups |= {group: self._draw(group, prompt, params) for group, prompt in zip(ids, prompts, strict=True)}
        self.outstanding += ids
        return ids

    def _draw(self, group: int, prompt: list[int], params: SamplingParams) -> list[Rollout]:
        random = np.random.default_rng(group)
        rollouts = []
        for sample in range(params.n):
            length = int(random.integers(1, params.max_tokens + 1))
            tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
            lags = np.minimum(np.sort(random.integers(0, 3, length))[::-1], random.integers(0, 3))
            logprobs = self.policy[[prompt[-1], *tokens[:-1]], tokens] + random.normal(0, 0.2, length)
            rollouts.append(
                Rollout(
                    request_id=100 * group + sample,
                    group_id=group,
                    sample=sample,
                    params=params,
                    metadata={},
                    prompt_token_ids=np.array(prompt, np.int32),
                    token_ids=tokens,
                    logprobs=logprobs.clip(max=-1e-3).astype(np.float32),
                    weight_versions=np.maximum(self.version - lags, 0),
                    sampled_at_ns=np.full(length, now_ns()),
                    finish_reason="length" if length == params.max_tokens else "stop",
                )
            )
        return rollouts

    def groups(
        self, *, score: Callable[[Rollout], float], before_waiting: Callable[[], None] | None = None
    ) -> Iterator[list[Rollout]]:
        while self.outstanding:
            if self._waits() and before_waiting is not None:
                before_waiting()
            group = self._groups.pop(self.outstanding.pop(0))
            for rollout in group:
                rollout.reward = score(rollout)
            yield group

    def wait_for_version(self, version: int, *, timeout_s: float) -> None: ...

    def drop(self, group_ids: list[int]) -> None: ...

    def cancel(self, group_ids: list[int] | None = None) -> None: ...


class Run:
    """A run with its reports, and the gradients and the numbers of forward passes of its steps."""

    def __init__(
        self,
        *,
        steps: int = 3,
        groups_per_step: int = 6,
        waits: Callable[[], bool] = lambda: False,
        num_examples: int = 100,
        score: Callable[[Rollout], float] = reward,
        engine: Any = None,
        publisher: Any = None,
        model: nn.Module | None = None,
        on_step: Callable[[StepReport], None] = lambda report: None,
        reference: nn.Module | None = None,
        teacher: nn.Module | None = None,
        decay: float = 1.0,
        demonstrations: Any = None,
        run: Any = None,
        loggers: Sequence[Any] = (),
        **options: Any,
    ):
        """engine: None: a FakeEngine. publisher: None: the engine. decay: factor of the learning rate at each step."""
        self.engine = FakeEngine(waits) if engine is None else engine
        self.model = Bigram() if model is None else model
        self.gradients: list[torch.Tensor] = []
        self.forwards: list[int] = [0]
        self.reports: list[StepReport] = []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)
        optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self._gradient()))
        getattr(self.engine, "observers", []).append(self._heard)
        lr_scheduler = None if decay == 1 else torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
        options = {"max_grad_norm": 0.0, "ahead": 1, "sampling": SAMPLING} | options
        config = GRPOConfig(steps=steps, groups_per_step=groups_per_step, **options)
        examples = (Example([index % VOCABULARY, 3 * index % VOCABULARY], {}) for index in range(num_examples))
        publisher = publisher or self.engine
        given = {"reference": reference, "teacher": teacher, "loggers": loggers, "run": run}
        given["demonstrations"] = demonstrations
        for report in grpo(
            self.engine, publisher, self.model, optimizer, examples, score, config, lr_scheduler, **given
        ):
            self.reports.append(report)
            self.forwards.append(0)
            on_step(report)

    @property
    def table(self) -> torch.Tensor:
        """The whole table."""
        [parameter] = self.model.parameters()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _gradient(self) -> torch.Tensor:
        [parameter] = self.model.parameters()
        assert parameter.grad is not None
        return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()

    def _heard(self, *_: Any) -> None:
        self.forwards[-1] += 1
