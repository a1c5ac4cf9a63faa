"""Rollouts packed into one batch: sequences (prompt and answer) one after another. T tokens, B sequences, G groups.

Two kinds of tokens of an answer take no part in the loss. Those that the policy did not draw (`drawn`) are context, as
a prompt is, and no part of the averages either. Those that are left out (`included`), because they are too old, still
count in every average, so that leaving tokens out never makes the others weigh more.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from inflight.core.rollout import Rollout
from inflight.training.data.partition import partition
from inflight.training.model.replay import routing_column
from inflight.training.model.sampling_mask import expand
from inflight.training.objective.aggregation import StepTotals


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """What a policy loss needs, per token. Columns that describe a drawn token are 0 on prompt tokens."""

    input_ids: torch.Tensor
    """i64[T]"""
    position_ids: torch.Tensor
    """i64[T], from 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """i32[B + 1], where each sequence begins; the last entry is T."""
    loss_mask: torch.Tensor
    """bool[T], true on tokens that the engine drew. The others, of prompts or of what a tool answered, are context."""
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
    groups: torch.Tensor
    """i64[B], which prompt each sequence answers, as an index into totals.group_tokens."""
    totals: StepTotals
    """Of the optimizer step that this batch is, or is a micro-batch of."""
    drawn: torch.Tensor = None  # pyright: ignore
    """i64[n], where loss_mask is true; found out where it is not given."""
    mask_offsets: torch.Tensor | None = None
    """i64[n + 1], on the CPU: drawn token i was drawn from mask_token_ids[mask_offsets[i] : mask_offsets[i + 1]], from
    the whole vocabulary where that is empty; None if all were."""
    mask_token_ids: torch.Tensor | None = None
    """i64[…]"""
    mask_cut_from: torch.Tensor | None = None
    """i32[n], on the CPU: 0, or the size of a vocabulary where the ids are those that were cut from it; None: 0."""
    routed_experts: torch.Tensor | None = None
    """i16[T, layers, k], the experts that each token took in the engine, −1 where that is not known."""
    included: torch.Tensor | None = None
    """bool[T], false on drawn tokens that are left out of the loss, though they count where it is averaged."""
    proximal_logprobs: torch.Tensor | None = None
    """f32[T], under the policy that a trust region is about, where it is not the current one."""
    reference_logprobs: torch.Tensor | None = None
    """f32[T], under the policy that a KL penalty refers to."""
    trainer_version: int | None = None
    """Of the weights that the trainer has when it takes the batch; tells mismatch from staleness."""
    rollouts: Sequence[Rollout] = ()
    """B, what the sequences were made of: text, rewards and metadata."""

    def __post_init__(self) -> None:
        if self.drawn is None:
            self.drawn = torch.nonzero(self.loss_mask).flatten()

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_drawn(self) -> int:
        """Tokens that the engine drew."""
        return len(self.drawn)

    @property
    def sequence_ids(self) -> torch.Tensor:
        """i64[T], the sequence of each token."""
        lengths_B = self.cu_seqlens.diff().long()
        sequences_B = torch.arange(self.num_sequences, device=lengths_B.device)
        return torch.repeat_interleave(sequences_B, lengths_B, output_size=len(self.input_ids))

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(offsets i64[n + 1], token ids i64[…]) of what was kept for the drawn tokens."""
        if self.mask_offsets is None or self.mask_token_ids is None:
            return None
        if self.mask_cut_from is None:
            return self.mask_offsets, self.mask_token_ids
        return expand(self.mask_offsets, self.mask_token_ids, self.mask_cut_from)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch with all its columns on `device`, but for those of kept sets that are read on the CPU."""
        columns = {name: column for name, column in self._tensors().items() if name not in _ON_CPU}
        totals = replace(self.totals, group_tokens=self.totals.group_tokens.to(device))
        return replace(self, **{name: column.to(device) for name, column in columns.items()}, totals=totals)

    def with_column(self, name: str, drawn: torch.Tensor) -> "PackedBatch":
        """The batch with a column, `proximal_logprobs` or `reference_logprobs`, made of its drawn tokens' f32[n]."""
        column = torch.zeros_like(self.behavior_logprobs)
        column[self.drawn] = drawn.detach().float().to(column.device)
        return replace(self, **{name: column})

    def micro_batches(self, max_tokens: int, *, at_least: int = 1) -> list["PackedBatch"]:
        """Batches of at most `max_tokens` tokens each, as few as are needed and alike in cost.

        Their losses add up to that of the whole batch. Samples of a prompt stay together where they fit, so that it can
        be computed once; tokens are counted as if it were not. at_least: so many, for ranks that must agree on a
        number; what is missing is filled up with a sequence without a part in the loss. Raises ValueError if one
        sequence is longer than `max_tokens`.
        """
        lengths = self.cu_seqlens.diff().tolist()
        parts = [self.select(chosen) for chosen in partition(lengths, self.groups.tolist(), max_tokens)]
        if len(parts) < at_least:
            shortest = self.select([lengths.index(min(lengths))])
            nothing = replace(shortest, included=torch.zeros_like(shortest.loss_mask))
            parts += [nothing] * (at_least - len(parts))
        return parts

    def select(self, sequences: Sequence[int]) -> "PackedBatch":
        """Some sequences, in the order given, as a micro-batch of the same step."""
        if list(sequences) == list(range(self.num_sequences)):
            return self
        device = self.input_ids.device
        starts = self.cu_seqlens.tolist()
        rows = torch.cat([torch.arange(starts[s], starts[s + 1], device=device) for s in sequences])
        lengths = [starts[s + 1] - starts[s] for s in sequences]
        chosen = {name: getattr(self, name)[rows] for name in self._tensors() if name not in _NOT_PER_TOKEN}
        if self.mask_offsets is not None and self.mask_token_ids is not None:
            place = torch.zeros_like(self.loss_mask, dtype=torch.int64)
            place[self.drawn] = torch.arange(len(self.drawn), device=device)
            own = place[rows][self.loss_mask[rows]].cpu()  # among all drawn tokens
            counts = self.mask_offsets.diff()[own]
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            begins = torch.repeat_interleave(self.mask_offsets[own] - offsets[:-1], counts)
            chosen["mask_offsets"] = offsets
            chosen["mask_cut_from"] = None if self.mask_cut_from is None else self.mask_cut_from[own]
            chosen["mask_token_ids"] = self.mask_token_ids[(begins + torch.arange(len(begins))).to(device)]
        return replace(
            self,
            **chosen,
            drawn=torch.nonzero(self.loss_mask[rows]).flatten(),
            cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device),
            groups=self.groups[torch.tensor(sequences, device=device)],
            rollouts=[self.rollouts[sequence] for sequence in sequences] if self.rollouts else (),
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}


_ON_CPU = ("mask_offsets", "mask_cut_from")
_NOT_PER_TOKEN = ("cu_seqlens", "groups", "drawn", "mask_token_ids", *_ON_CPU)


def pack(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float] | Sequence[np.ndarray],
    *,
    drawn: Sequence[np.ndarray] | None = None,
    included: Sequence[np.ndarray] | None = None,
    trainer_version: int | None = None,
) -> PackedBatch:
    """Pack rollouts, each with one advantage for all its tokens, or one for each f32[tokens].

    drawn: for each rollout bool[tokens], which of its tokens the policy drew; None: all. The others (what a tool
    answered between two turns) are context for those after them: they have no part in the loss, nor in what it is
    averaged over, and what the rollout says of them (log-probabilities, versions) is not read.
    included: for each rollout bool[tokens], which of its drawn tokens take part in the loss; None: all. Those left out
    (as too old, for example) still count in everything that the loss is averaged over.

    Sampling masks (`SamplingParams.return_sampling_mask`) and routed experts (`EngineOptions.record_routed_experts`)
    come along where they were recorded. Raises ValueError for an empty batch, for lengths that do not match, for
    non-finite log-probabilities, for a token that is not in its sampling mask, for routed experts of different models,
    for an answer without a token before it, and for greedy rollouts: a policy that always takes the likeliest token has
    no importance ratio.
    """
    if not rollouts:
        raise ValueError("cannot pack a batch without rollouts")
    if len(rollouts) != len(advantages):
        raise ValueError(f"{len(rollouts)} rollouts need as many advantages, got {len(advantages)}")
    masks = _token_masks("drawn", rollouts, drawn)
    for rollout, advantage, mask in zip(rollouts, advantages, masks, strict=True):
        _check(rollout, np.asarray(advantage), mask)
    _warn_of_other_distributions(rollouts)
    lengths = [len(r.prompt_token_ids) + len(r.token_ids) for r in rollouts]

    def column(dtype: np.typing.DTypeLike, context_value: float, of_rollouts: Sequence[Any]) -> torch.Tensor:
        """Of each rollout one value, or one per token, for what the policy drew."""
        out = np.full(sum(lengths), context_value, dtype)
        end = 0
        for mask, length, values in zip(masks, lengths, of_rollouts, strict=True):
            end += length
            out[end - len(mask) : end][mask] = np.broadcast_to(values, mask.shape)[mask]
        return torch.from_numpy(out)

    group_index = {group_id: index for index, group_id in enumerate(dict.fromkeys(r.group_id for r in rollouts))}
    groups = np.array([group_index[r.group_id] for r in rollouts])
    drawn_tokens = np.array([mask.sum() for mask in masks])
    mask_counts, kept_ids = zip(*(_kept(r, mask) for r, mask in zip(rollouts, masks, strict=True)), strict=True)
    has_kept = any(counts.any() for counts in mask_counts)
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
        groups=torch.from_numpy(groups),
        totals=StepTotals(
            num_tokens=int(drawn_tokens.sum()),
            num_sequences=len(rollouts),
            group_tokens=torch.from_numpy(np.bincount(groups, drawn_tokens).astype(np.int64)),
        ),
        mask_offsets=torch.from_numpy(np.cumsum([0, *np.concatenate(mask_counts)])) if has_kept else None,
        mask_token_ids=torch.from_numpy(np.concatenate(kept_ids).astype(np.int64)) if has_kept else None,
        mask_cut_from=_kept_of(rollouts, masks) if has_kept else None,
        routed_experts=routing_column(rollouts),
        included=None if included is None else column(bool, False, _token_masks("included", rollouts, included)),
        trainer_version=trainer_version,
        rollouts=list(rollouts),
    )


def _token_masks(name: str, rollouts: Sequence[Rollout], given: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """bool[tokens] of each rollout, all true if none are given."""
    if given is None:
        return [np.ones(len(rollout.token_ids), bool) for rollout in rollouts]
    if len(given) != len(rollouts):
        raise ValueError(f"{len(rollouts)} rollouts need as many masks in {name}, got {len(given)}")
    masks = [np.asarray(mask) for mask in given]
    for rollout, mask in zip(rollouts, masks, strict=True):
        if mask.shape != rollout.token_ids.shape or (mask.dtype != bool and mask.size):
            raise ValueError(
                f"rollout {rollout.request_id} needs {name} as bool[{len(rollout.token_ids)}], one for each of its "
                f"tokens after the prompt, got {mask.dtype}{list(mask.shape)}"
            )
    return [mask.astype(bool) for mask in masks]


def _check(rollout: Rollout, advantage: np.ndarray, drawn: np.ndarray) -> None:
    name = f"rollout {rollout.request_id}"
    if not len(rollout.prompt_token_ids) and (not len(drawn) or drawn[0]):
        raise ValueError(
            f"{name} has an empty prompt: nothing comes before its first token that its log-probability could be "
            "computed from; begin with a token such as BOS"
        )
    columns = (rollout.token_ids, rollout.logprobs, rollout.weight_versions, rollout.sampled_at_ns)
    if len({len(column) for column in columns}) != 1:
        raise ValueError(f"{name} has columns of different lengths")
    if advantage.ndim and advantage.shape != rollout.token_ids.shape:
        raise ValueError(
            f"{name} has {len(rollout.token_ids)} tokens and advantages of shape {list(advantage.shape)}; give one "
            f"number, or one per token"
        )
    if not np.isfinite(advantage[drawn] if advantage.ndim else advantage).all():
        raise ValueError(f"{name} has an advantage that is not finite")
    if not np.isfinite(rollout.logprobs[drawn]).all():
        raise ValueError(f"{name} has log-probabilities that are not finite (it ended with {rollout.finish_reason!r})")
    if rollout.params.greedy:
        raise ValueError(f"{name} was drawn greedily (temperature 0) and has no importance ratio; do not train on it")


def _kept(rollout: Rollout, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the drawn tokens: i64[n], the sizes of their kept sets, 0 for the whole vocabulary; and the ids in them."""
    name, num_tokens = f"rollout {rollout.request_id}", len(rollout.token_ids)
    offsets, kept = rollout.mask_offsets, rollout.mask_token_ids
    if offsets is None or kept is None:
        return np.zeros(drawn.sum(), np.int64), np.zeros(0, np.int64)
    if len(offsets) != num_tokens + 1 or offsets[0] != 0 or offsets[-1] != len(kept) or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{name} has {num_tokens} tokens and {len(kept)} kept token ids; its {len(offsets)} kept offsets must rise "
            f"from 0 to {len(kept)}, one for each token and one more"
        )
    counts = np.diff(offsets)
    owners = np.repeat(np.arange(num_tokens), counts)
    found = np.zeros(num_tokens, bool)
    found[owners[kept == rollout.token_ids[owners]]] = True
    if len(np.unique(owners << 32 | kept.astype(np.int64))) != len(kept):
        raise ValueError(f"{name} has a kept set with a token id twice")
    of = np.zeros(num_tokens, np.int32) if rollout.mask_cut_from is None else rollout.mask_cut_from
    if len(of) != num_tokens or ((kept < 0) | (of[owners] > 0) & (kept >= of[owners])).any():
        raise ValueError(f"{name} has kept sets with token ids that are not in a vocabulary of {of.max(initial=0)}")
    by_cut = of > 0
    missing = np.flatnonzero((found == by_cut) & (counts > 0) & drawn)
    if len(missing):
        first, sizes = missing[0], np.where(by_cut, of - counts, counts)
        raise ValueError(
            f"{name}: token {first} (id {rollout.token_ids[first]}) is not in the set of {sizes[first]} tokens that it "
            "was drawn from; these kept sets belong to other tokens"
        )
    return counts[drawn], kept[drawn[owners]]


def _kept_of(rollouts: Sequence[Rollout], drawn: Sequence[np.ndarray]) -> torch.Tensor | None:
    """i32[drawn tokens]: where what was cut is listed, of how many; None if it is nowhere."""
    columns = [r.mask_cut_from if r.mask_offsets is not None else None for r in rollouts]
    if all(column is None for column in columns):
        return None
    parts = [np.zeros(mask.sum(), np.int32) if c is None else c[mask] for c, mask in zip(columns, drawn, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


def _warn_of_other_distributions(rollouts: Sequence[Rollout]) -> None:
    if any(rollout.params.filtered and rollout.mask_offsets is None for rollout in rollouts):
        warnings.warn(
            "rollouts drawn with top_k, top_p or min_p, without what these kept: their log-probabilities are over the "
            "tokens that were kept, the trainer's over the whole vocabulary, so importance ratios are biased towards 0 "
            "even on-policy; draw with SamplingParams(return_sampling_mask=True)",
            stacklevel=3,
        )
    if any(rollout.params.adjusted for rollout in rollouts):
        warnings.warn(
            "rollouts drawn with repetition_penalty, logit_bias or min_tokens: their log-probabilities are those of "
            "the logits that these changed, the trainer's those of the model, so importance ratios are not 1 even "
            "on-policy",
            stacklevel=3,
        )
