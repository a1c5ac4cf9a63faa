"""Rollouts packed into one batch, and their way through the trainer's model.

A packed batch lays its sequences (prompt and answer) one after another. T tokens, B sequences.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from inflight.core.rollout import Rollout


@dataclass(slots=True)
class PackedBatch:
    """What a policy loss needs, per token. Columns that describe a drawn token are 0 on prompt tokens."""

    input_ids: torch.Tensor
    """i64[T]"""
    position_ids: torch.Tensor
    """i64[T], from 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """i32[B + 1], where each sequence begins; the last entry is T."""
    loss_mask: torch.Tensor
    """bool[T], true on tokens that the engine drew."""
    behavior_logprobs: torch.Tensor
    """f32[T], as recorded when drawn."""
    weight_versions: torch.Tensor
    """i64[T], the weights that drew the token."""
    sampled_at_ns: torch.Tensor
    """i64[T], CLOCK_MONOTONIC."""
    temperatures: torch.Tensor
    """f32[T], at which the token was drawn; 1 on prompt tokens."""
    advantages: torch.Tensor
    """f32[T]"""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_drawn(self) -> int:
        """Tokens that take part in the loss."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch with all its columns on `device`."""
        return PackedBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def pack(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> PackedBatch:
    """Pack rollouts, each with one advantage for all its tokens.

    Raises ValueError for an empty batch, for lengths that do not match, for non-finite log-probabilities, and for
    greedy rollouts: a policy that always takes the likeliest token has no importance ratio.
    """
    if not rollouts:
        raise ValueError("cannot pack a batch without rollouts")
    if len(rollouts) != len(advantages):
        raise ValueError(f"{len(rollouts)} rollouts need as many advantages, got {len(advantages)}")
    for rollout in rollouts:
        _check(rollout)
    if any(rollout.params.filtered for rollout in rollouts):
        warnings.warn(
            "rollouts drawn with top_k, top_p or min_p: their log-probabilities are over the tokens that were "
            "kept, the trainer's over the whole vocabulary, so importance ratios are biased towards 0 even on-policy",
            stacklevel=2,
        )
    if any(rollout.params.adjusted for rollout in rollouts):
        warnings.warn(
            "rollouts drawn with repetition_penalty, logit_bias or min_tokens: their log-probabilities are those of "
            "the logits that these changed, the trainer's those of the model, so importance ratios are not 1 even "
            "on-policy",
            stacklevel=2,
        )
    lengths = [len(r.prompt_token_ids) + len(r.token_ids) for r in rollouts]

    def column(dtype: np.typing.DTypeLike, prompt_value: float, drawn: Sequence[np.ndarray | float]) -> torch.Tensor:
        out = np.full(sum(lengths), prompt_value, dtype)
        end = 0
        for rollout, length, values in zip(rollouts, lengths, drawn, strict=True):
            end += length
            out[end - len(rollout.token_ids) : end] = values
        return torch.from_numpy(out)

    return PackedBatch(
        input_ids=torch.from_numpy(
            np.concatenate([part for r in rollouts for part in (r.prompt_token_ids, r.token_ids)]).astype(np.int64)
        ),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        loss_mask=column(bool, False, [True] * len(rollouts)),
        behavior_logprobs=column(np.float32, 0, [r.logprobs for r in rollouts]),
        weight_versions=column(np.int64, 0, [r.weight_versions for r in rollouts]),
        sampled_at_ns=column(np.int64, 0, [r.sampled_at_ns for r in rollouts]),
        temperatures=column(np.float32, 1, [r.params.temperature for r in rollouts]),
        advantages=column(np.float32, 0, list(advantages)),
    )


def _check(rollout: Rollout) -> None:
    name = f"rollout {rollout.request_id}"
    columns = (rollout.token_ids, rollout.logprobs, rollout.weight_versions, rollout.sampled_at_ns)
    if len({len(column) for column in columns}) != 1:
        raise ValueError(f"{name} has columns of different lengths")
    if not np.isfinite(rollout.logprobs).all():
        raise ValueError(f"{name} has log-probabilities that are not finite (it ended with {rollout.finish_reason!r})")
    if rollout.params.greedy:
        raise ValueError(f"{name} was drawn greedily (temperature 0) and has no importance ratio; do not train on it")


def padded(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch as rows padded on the right: (input_ids i64[B, S], position_ids i64[B, S], row i64[T], column i64[T]).

    `row` and `column` say where each packed token went. Causality keeps real tokens from seeing padding, so no
    attention mask is needed.
    """
    lengths_B = batch.cu_seqlens.diff().long()
    row_T = torch.repeat_interleave(torch.arange(batch.num_sequences, device=lengths_B.device), lengths_B)
    longest = int(lengths_B.max())
    ids_BS = batch.input_ids.new_zeros(batch.num_sequences, longest)
    ids_BS[row_T, batch.position_ids] = batch.input_ids
    positions_BS = torch.arange(longest, device=lengths_B.device).expand(batch.num_sequences, -1)
    return ids_BS, positions_BS, row_T, batch.position_ids
