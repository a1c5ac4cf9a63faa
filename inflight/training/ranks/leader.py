"""Rank 0 of `grpo` on several ranks: shares batches with the other ranks, and sends its decisions and its reports."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from inflight.training.data.batch import PackedBatch
from inflight.training.data.rollout_stream import Sharing
from inflight.training.data.scored_groups import Dropped
from inflight.training.data.shares import Share, encode_share, split
from inflight.training.evaluation import EvaluationResult
from inflight.training.objective.aggregation import StepTotals
from inflight.training.ranks.group import RankGroup, equal_micro_batches, naming_lost_ranks
from inflight.training.ranks.messages import What, encode_evaluations, encode_report, encode_totals
from inflight.training.reference import ReferenceScorer
from inflight.training.report import StepReport


class Leader:
    """Sends the other ranks what they need for the steps that rank 0 takes. They follow in `ranks/follower.py`."""

    def __init__(self, sharing: Sharing, group: RankGroup):
        self.group, self._sharing = group, sharing

    def lead(self, reports: Iterator[StepReport]) -> Iterator[StepReport]:
        """Yield the reports. If they raise, the other ranks raise the error, too. A run that the caller's loop ends has
        not failed."""
        try:
            with naming_lost_ranks(self._sharing.check):
                yield from reports
        except GeneratorExit:
            raise
        except BaseException as error:
            if error is not self.group.agreed_error:
                self._sharing.fail(error, "finish a step of grpo")
            raise
        finally:
            self.group.close()

    def ask(self) -> None:
        """Let the other ranks wait for the next step without a bound: the caller's loop has asked for it."""
        self._sharing.wait_for_rollouts()

    def share(self, batch: PackedBatch, of_step: float) -> PackedBatch:
        """Split a part of a step. Returns this rank's share. of_step: the expected share of the step that has arrived
        with this part."""
        own, *others = split(batch, self.group.size, dropped=Dropped(), of_step=of_step)
        self.send("part", list(map(encode_share, others)))
        packed = own.batch()
        packed.observers = batch.observers
        return packed

    def count(self, totals: StepTotals) -> StepTotals:
        """Send the totals of a part of which nothing is in the loss. Returns the share of a rank."""
        size, groups = self.group.size, totals.num_groups or len(totals.group_tokens)
        share = replace(
            totals,
            num_tokens=totals.num_tokens / size,
            num_sequences=totals.num_sequences / size,
            num_groups=groups / size,
        )
        self.send("count", encode_totals(share))
        return share

    def report(self, report: StepReport, progress: dict[str, Any]) -> None:
        """Send the report of a step, and the progress of the run. The other ranks wait for the caller's loop within a
        bound."""
        self._sharing.send("report", encode_report(report, progress))

    def end(self, evaluations: Sequence[EvaluationResult]) -> None:
        """End the run on all ranks, with the results of the last evaluations."""
        self.send("end", encode_evaluations(evaluations))
        self._sharing.settle()

    def reference_scorer(self, score: ReferenceScorer, max_tokens: int) -> ReferenceScorer:
        """Return a function that has every rank score a share of a batch. score: scores a micro-batch, of at most
        `max_tokens` tokens (0: no bound)."""

        def score_shares(batch: PackedBatch) -> torch.Tensor:
            shares = split(batch, self.group.size, dropped=Dropped())
            self.send("reference", [encode_share(share) for share in shares[1:]])
            of_ranks = self.group.gather(score_share(shares[0], score, max_tokens, self.group).tobytes())
            return _in_order(batch, shares, [np.frombuffer(data, np.float64) for data in of_ranks])

        return score_shares

    def send(self, what: What, shares: Sequence[bytes] | bytes = b"") -> None:
        """Send a message to each other rank, or to all of them the same one. They wait for the next without a bound."""
        self._sharing.send(what, shares)
        self._sharing.wait_for_rollouts()


def score_share(share: Share, score: ReferenceScorer, max_tokens: int, group: RankGroup) -> np.ndarray:
    """Return the reference log-probabilities f64[n] of a share's drawn tokens, in their order. All ranks call this for
    their shares at the same time."""
    batch = share.batch()
    batch.columns = {"place": torch.arange(len(batch.input_ids))}
    scores_T = torch.zeros(len(batch.input_ids), dtype=torch.float64)
    for part in equal_micro_batches(batch, max_tokens, group):
        scores_T[part.columns["place"][part.drawn]] = score(part).double().cpu()
    return scores_T[batch.drawn].numpy()


def _in_order(batch: PackedBatch, shares: Sequence[Share], of_shares: Sequence[np.ndarray]) -> torch.Tensor:
    """Return the numbers of the shares' drawn tokens in the order of the batch's, f64[n]."""
    places = {id(rollout): place for place, rollout in enumerate(batch.rollouts)}
    counts = torch.bincount(batch.sequence_ids[batch.drawn], minlength=batch.num_sequences).tolist()
    begins = np.concatenate([[0], np.cumsum(counts)])
    found = np.zeros(batch.num_drawn)
    for share, numbers in zip(shares, of_shares, strict=True):
        end = 0
        for rollout in [] if share.info.is_filler else share.rollouts:
            place = places[id(rollout)]
            begin, end = end, end + counts[place]
            found[begins[place] : begins[place + 1]] = numbers[begin:end]
    return torch.from_numpy(found)
