"""Ranks other than 0 of `grpo`: train on their shares, and take the decisions of rank 0."""

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from inflight.core.errors import InflightError
from inflight.core.spans import span
from inflight.training.config import GRPOConfig
from inflight.training.data.demonstrations import Demonstration, next_demonstrations
from inflight.training.data.shares import decode_share
from inflight.training.evaluation import Evaluation
from inflight.training.ranks.group import RankGroup, naming_lost_ranks
from inflight.training.ranks.leader import score_share
from inflight.training.ranks.messages import decode_evaluations, decode_report, decode_totals
from inflight.training.reference import ReferenceScorer
from inflight.training.report import StepReport
from inflight.training.schedules import HasProgress
from inflight.training.step import StepGradient, check_finite, take_step
from inflight.training.teacher import AddTeacher


class ReceivesShares(Protocol):
    """The stream of a rank other than 0."""

    @property
    def rank(self) -> int: ...
    def check(self) -> None:
        """Raise RankLostError if a rank is known to be lost."""

    def receive(self) -> tuple[str, bytes] | None:
        """Return the content of the next share of rank 0, and its bytes."""
        ...


class Publishes(Protocol):
    def publish(self) -> int: ...


@dataclass(slots=True)
class Follower:
    """A rank other than 0. Its steps, publishes and reports are those of rank 0, which has the engine."""

    stream: ReceivesShares
    group: RankGroup
    publisher: Publishes
    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: GRPOConfig
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
    score_reference: ReferenceScorer | None
    add_teacher: AddTeacher | None
    run: HasProgress | None
    evaluation: Evaluation | None
    demonstrations: Iterator[Sequence[Demonstration]] | None
    gradient: StepGradient = field(init=False)
    has_batch: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.gradient = self._empty_gradient()

    def reports(self) -> Iterator[StepReport]:
        """Yield the reports of rank 0. Raises its errors, and RankLostError."""
        own_evaluation = nullcontext() if self.evaluation is None else closing(self.evaluation)
        with own_evaluation, closing(self), naming_lost_ranks(self.stream.check):
            while True:
                with span("wait for rollouts"):
                    what, data = self.stream.receive() or ("the end of its batches", b"")
                match what:
                    case "report":
                        yield self._report(data)
                    case "end":
                        if self.evaluation is not None:
                            self.evaluation.adopt(decode_evaluations(data))
                        return
                    case _:
                        self._obey(what, data)

    def close(self) -> None:
        """Drop the gradients of a step that was not taken."""
        if self.has_batch:
            self.optimizer.zero_grad()
        self.group.close()

    def _obey(self, what: str, data: bytes) -> None:
        match what:
            case "begin":
                if data:
                    self.publisher.publish()
            case "reference":
                self._score_reference(data)
            case "part":
                share = decode_share(data)
                self.gradient.add(share.batch(), share=share.info.of_step)
                self.has_batch = True
            case "count":
                self.gradient.count(decode_totals(data))
            case "step":
                self._step()
            case _:
                raise InflightError(
                    f"rank 0 sends {what}, and rank {self.stream.rank} runs grpo: every rank runs the same training "
                    "loop"
                )

    def _score_reference(self, data: bytes) -> None:
        assert self.score_reference is not None, "all ranks have the same options"
        with span("reference"):
            scores = score_share(decode_share(data), self.score_reference, self.config.micro_batch_tokens, self.group)
            self.group.gather(scores.tobytes())

    def _step(self) -> None:
        """Take the optimizer step, if something is in the loss of the batch, and publish."""
        given = next_demonstrations(self.demonstrations)
        if self.has_batch:
            take_step(self.gradient, self.lr_scheduler, self.config, given)
        self.gradient, self.has_batch = self._empty_gradient(), False
        with self.group.together():
            check_finite(self.model, trainable=True)
        self.publisher.publish()

    def _report(self, data: bytes) -> StepReport:
        report, progress = decode_report(data)
        if self.run is not None:
            self.run.progress["grpo"] = progress
        if self.evaluation is not None:
            self.evaluation.adopt(report.evaluations)
        return report

    def _empty_gradient(self) -> StepGradient:
        return StepGradient(
            self.model,
            self.optimizer,
            self.config,
            score_reference=self.score_reference,
            add_teacher=self.add_teacher,
            ranks=self.group,
        )
