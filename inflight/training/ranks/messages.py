"""Messages of rank 0 of `grpo` to the other ranks: the totals of a part without a batch, a report, the last
evaluations. Shares of batches are messages of `training/data/shares.py`."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import msgspec

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import ProtocolError
from inflight.core.rollout import Rollout
from inflight.observability.staleness_meter import TokenStaleness
from inflight.stream.rollout_codec import Arrays, RolloutHeader, arrays_of, decode, encode, header_of, make_rollout
from inflight.training.evaluation import EvaluationResult
from inflight.training.objective.aggregation import StepTotals
from inflight.training.report import StepReport

What = Literal["join", "begin", "reference", "part", "count", "step", "report", "end"]
"""Messages in their order. join, twice: make the process group. begin: publish first, or not. Then for each step:
reference: a share whose reference log-probabilities rank 0 needs; part: a share of groups of the step; count: the
totals of a part of which nothing is in the loss; step: take the optimizer step, and publish; report: the report. end:
the last evaluations."""

_Evaluated = tuple[EvaluationResult, list[RolloutHeader]]
"""An evaluation without its rollouts, and their headers."""


class _Sent(msgspec.Struct, frozen=True):
    """The plain part of a message. Its rollouts are the report's groups, one after another, and then the evaluations',
    and the last arrays are the staleness."""

    groups: list[list[RolloutHeader]]
    evaluations: list[_Evaluated]
    report: StepReport | None = None
    """The report without groups, staleness and evaluations."""
    progress: dict[str, Any] = {}
    has_staleness: bool = False

    @property
    def num_arrays(self) -> int:
        rollouts = sum(map(len, self.groups)) + sum(len(headers) for _, headers in self.evaluations)
        return rollouts + self.has_staleness


def encode_totals(totals: StepTotals) -> bytes:
    """Encode the totals of a part without a batch."""
    groups = totals.num_groups or len(totals.group_tokens)
    return msgspec.msgpack.encode((totals.num_tokens, totals.num_sequences, totals.group_tokens.tolist(), groups))


def decode_totals(data: bytes) -> StepTotals:
    """Decode a message of `encode_totals`."""
    import torch

    tokens, sequences, group_tokens, groups = msgpack_decoder(tuple[float, float, list[int], float]).decode(data)
    return StepTotals(tokens, sequences, torch.tensor(group_tokens, dtype=torch.int64), groups)


def encode_report(report: StepReport, progress: dict[str, Any]) -> bytes:
    """Encode a report and the progress of the run. Raises InvalidRequestError for metadata that a message cannot
    hold."""
    plain = replace(report, groups=[], staleness=None, evaluations=())
    return _encode(report.groups, report.evaluations, report.staleness, report=plain, progress=progress)


def decode_report(data: bytes) -> tuple[StepReport, dict[str, Any]]:
    """Decode a message of `encode_report`. Its rollouts lack sampling masks, routed experts and scores of prompts."""
    sent, arrays, groups, evaluations = _decode(data)
    staleness = TokenStaleness(**arrays[-1]) if sent.has_staleness else None
    assert sent.report is not None
    return replace(sent.report, groups=groups, staleness=staleness, evaluations=tuple(evaluations)), sent.progress


def encode_evaluations(evaluations: Sequence[EvaluationResult]) -> bytes:
    """Encode the results of evaluations."""
    return _encode([], evaluations, None)


def decode_evaluations(data: bytes) -> list[EvaluationResult]:
    """Decode a message of `encode_evaluations`."""
    return _decode(data)[3]


def _encode(
    groups: Sequence[Sequence[Rollout]],
    evaluations: Sequence[EvaluationResult],
    staleness: TokenStaleness | None,
    **plain: Any,
) -> bytes:
    sent = _Sent(
        groups=[list(map(header_of, group)) for group in groups],
        evaluations=[(replace(each, rollouts=[]), list(map(header_of, each.rollouts))) for each in evaluations],
        has_staleness=staleness is not None,
        **plain,
    )
    rollouts = [r for group in (*groups, *(each.rollouts for each in evaluations)) for r in group]
    light = [replace(r, sampling_mask=None, routed_experts=None, prompt_scores=None) for r in rollouts]
    last = [] if staleness is None else [{of.name: getattr(staleness, of.name) for of in fields(staleness)}]
    return encode(sent, [*map(arrays_of, light), *last])


def _decode(data: bytes) -> tuple[_Sent, list[Arrays], list[list[Rollout]], list[EvaluationResult]]:
    sent, arrays = decode(data, _Sent, lambda sent: sent.num_arrays)
    left = iter(arrays)

    def rollouts_of(headers: list[RolloutHeader]) -> list[Rollout]:
        return [make_rollout(header, next(left)) for header in headers]

    try:
        groups = list(map(rollouts_of, sent.groups))
        evaluations = [replace(each, rollouts=rollouts_of(headers)) for each, headers in sent.evaluations]
    except KeyError as error:
        raise ProtocolError(f"a report of rank 0 lacks {error}") from error
    return sent, arrays, groups, evaluations
