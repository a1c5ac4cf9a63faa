"""Ranks other than 0 of `grpo`: train on their shares, and take the decisions of rank 0."""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Protocol

from inflight.core.errors import InflightError
from inflight.core.spans import span
from inflight.training.data.shares import decode_share
from inflight.training.evaluation import Evaluation
from inflight.training.ranks.group import RankGroup, naming_lost_ranks
from inflight.training.ranks.leader import score_share
from inflight.training.ranks.messages import decode_evaluations, decode_report, decode_totals
from inflight.training.report import StepReport
from inflight.training.schedules import HasProgress, WeightPublisher
from inflight.training.step import Learner


class ReceivesShares(Protocol):
    """The stream of a rank other than 0."""

    @property
    def rank(self) -> int: ...
    def check(self) -> None: ...
    def receive(self) -> tuple[str, bytes] | None: ...


@dataclass(slots=True)
class Follower:
    """A rank other than 0. Its steps, publishes and reports are those of rank 0, which has the engine."""

    stream: ReceivesShares
    group: RankGroup
    learner: Learner
    publisher: WeightPublisher
    run: HasProgress | None
    evaluation: Evaluation | None

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
        self.learner.drop()
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
                self.learner.add(share.batch(), share=share.info.of_step)
            case "count":
                self.learner.count(decode_totals(data))
            case "step":
                self.learner.step(self.learner.next_demonstrations())
                self.learner.publish(self.publisher)
            case _:
                raise InflightError(
                    f"rank 0 sends {what}, and rank {self.stream.rank} runs grpo: every rank runs the same training "
                    "loop"
                )

    def _score_reference(self, data: bytes) -> None:
        score, max_tokens = self.learner.score_reference, self.learner.config.micro_batch_tokens
        assert score is not None, "all ranks have the same options"
        with span("reference"):
            self.group.gather(score_share(decode_share(data), score, max_tokens, self.group).tobytes())

    def _report(self, data: bytes) -> StepReport:
        report, progress = decode_report(data)
        if self.run is not None:
            self.run.progress["grpo"] = progress
        if self.evaluation is not None:
            self.evaluation.adopt(report.evaluations)
        return report
