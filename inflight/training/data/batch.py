"""Rollouts packed into one batch: concatenated sequences (prompt and answer). T tokens, B sequences, G groups."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from inflight.core.arguments import named
from inflight.core.rollout import Rollout, samples_of
from inflight.core.sampling import SamplingParams
from inflight.training.model.replay import routed_experts_column
from inflight.training.model.sampling_mask import PackedSamplingMask, pack_banned, pack_masks
from inflight.training.objective.aggregation import StepTotals
from inflight.training.objective.distillation import TOP_IDS, TOP_LOGPROBS


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """Inputs of a policy loss, per token. Columns that describe a drawn token are 0 on prompt tokens."""

    input_ids: torch.Tensor
    """i64[T]"""
    position_ids: torch.Tensor
    """i64[T], from 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """i32[B + 1], start of each sequence; the last entry is T."""
    loss_mask: torch.Tensor
    """bool[T], true on tokens that the engine drew. The others, of prompts or tool outputs, are context."""
    behavior_logprobs: torch.Tensor
    """f32[T], as recorded when drawn."""
    weight_versions: torch.Tensor
    """i64[T], version of the weights that drew the token."""
    sampled_at_ns: torch.Tensor
    """i64[T], CLOCK_MONOTONIC."""
    temperatures: torch.Tensor
    """f32[T], sampling temperature of the token; 1 on prompt tokens."""
    advantages: torch.Tensor
    """f32[T]"""
    groups: torch.Tensor
    """i64[B], prompt of each sequence, as an index into totals.group_tokens."""
    totals: StepTotals
    """Totals of the optimizer step that consists of this batch or contains it as a micro-batch."""
    drawn: torch.Tensor = None  # pyright: ignore
    """i64[n], indices of the true entries of loss_mask; computed if omitted. On a CPU other indices raise
    ValueError; on a GPU they are not checked, because the check would wait for the GPU."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values [T] by name of the columns of one number per token that every rollout recorded (`Rollout.columns`). The
    scores of a teacher can have several, [T, k] (`distillation.TOP_IDS`, `TOP_LOGPROBS`)."""
    sampling_mask: PackedSamplingMask | None = None
    """The tokens that each drawn token was sampled from; None if all were sampled from the whole vocabulary."""
    banned: torch.Tensor | None = None
    """i64[ranges, 2], begins and ends of ranges of token ids, in order, that the engine never draws; scores leave them
    out. None: it draws all."""
    routed_experts: torch.Tensor | None = None
    """i16[T, layers, k], the experts that each token used in the engine, −1 if unknown."""
    sample_tokens: torch.Tensor | None = None
    """i64[B], drawn tokens of the sample that each sequence is a part of, also in its sequences that are left out of
    the batch but count in the averages; None: each sequence is a sample. Only an episode can have several."""
    included: torch.Tensor | None = None
    """bool[T], false on drawn tokens that are left out of the loss but still count in its average."""
    proximal_logprobs: torch.Tensor | None = None
    """f32[T], under the proximal policy of a trust region, if it differs from the current policy."""
    reference_logprobs: torch.Tensor | None = None
    """f32[T], under the reference policy of a KL penalty."""
    trainer_version: int | None = None
    """Version of the trainer's weights when it takes the batch; it separates mismatch from staleness. After unpublished
    optimizer steps it is the next version. No token has that version."""
    foreign_versions: torch.Tensor | None = None
    """i64[T], versions after the token's, up to trainer_version, that changed other adapters and not the adapter that
    drew the token; None: none."""
    taken_ns: int = 0
    """CLOCK_MONOTONIC when the trainer had the last of the groups."""
    rollouts: Sequence[Rollout] = ()
    """B, the source rollouts of the sequences: text, rewards and metadata."""
    observers: "list[LossObserver]" = field(default_factory=list)
    """Functions that every loss of this batch and of its micro-batches calls. A batch of a stream shares the stream's
    list."""

    def __post_init__(self) -> None:
        if self.drawn is None:
            self.drawn = torch.nonzero(self.loss_mask).flatten()
        elif (
            self.drawn.is_cpu
            and self.loss_mask.is_cpu
            and not torch.equal(self.drawn, torch.nonzero(self.loss_mask).flatten())
        ):
            raise ValueError(
                "drawn does not contain the indices of the true entries of loss_mask: with another loss_mask give "
                "drawn=None"
            )

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the engine drew."""
        return len(self.drawn)

    @property
    def sequence_ids(self) -> torch.Tensor:
        """i64[T], the sequence of each token."""
        lengths_B = self.cu_seqlens.diff().long()
        sequences_B = torch.arange(self.num_sequences, device=lengths_B.device)
        return torch.repeat_interleave(sequences_B, lengths_B, output_size=len(self.input_ids))

    @property
    def version_lags(self) -> torch.Tensor:
        """i64[T], trainer_version − the version of the token. Only versions that changed the adapter that drew the
        token count. Raises ValueError without trainer_version."""
        if self.trainer_version is None:
            raise ValueError("version_lags needs trainer_version, the version of the trainer's weights")
        lags = self.trainer_version - self.weight_versions
        return lags if self.foreign_versions is None else lags - self.foreign_versions

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Return the batch with its tensors on `device`. Offsets and `cut_from` of a sampling mask stay on the CPU."""
        return replace(
            self,
            **{name: column.to(device) for name, column in self._tensors().items()},
            columns={name: column.to(device) for name, column in self.columns.items()},
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.to(device),
            totals=replace(self.totals, group_tokens=self.totals.group_tokens.to(device)),
        )

    def with_column(self, name: str, drawn: torch.Tensor) -> "PackedBatch":
        """Return the batch with a column, such as `reference_logprobs`, made of its drawn tokens' f32[n]."""
        return replace(self, **{name: self.laid_out(drawn.detach().float())})

    def laid_out(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return [T, …] with values [n, …] at the drawn tokens and 0 elsewhere, on the batch's device."""
        column = drawn.new_zeros(len(self.input_ids), *drawn.shape[1:], device=self.input_ids.device)
        column[self.drawn] = drawn.to(column.device)
        return column

    def micro_batches(self, max_tokens: int, *, at_least: int = 1) -> list["PackedBatch"]:
        """Split into batches of at most `max_tokens` tokens each, as few as possible and of similar cost, whose losses
        add up to the loss of the whole batch. Samples of a prompt stay together where they fit. at_least: minimum
        number of batches, for ranks that must agree on a number; missing batches are filled with a sequence that takes
        no part in the loss. Raises ValueError if one sequence is longer than `max_tokens`."""
        lengths = self.cu_seqlens.diff().tolist()
        parts = [self.select(chosen) for chosen in _partition(lengths, self.groups.tolist(), max_tokens)]
        if len(parts) < at_least:
            shortest = self.select([lengths.index(min(lengths))])
            nothing = replace(shortest, included=torch.zeros_like(shortest.loss_mask))
            parts += [nothing] * (at_least - len(parts))
        return parts

    def select(self, sequences: Sequence[int]) -> "PackedBatch":
        """Return some sequences, in the given order, as a micro-batch of the same step."""
        if list(sequences) == list(range(self.num_sequences)):
            return self
        device = self.input_ids.device
        starts = self.cu_seqlens.tolist()
        rows = torch.cat([torch.arange(starts[s], starts[s + 1], device=device) for s in sequences])
        lengths = [starts[s + 1] - starts[s] for s in sequences]
        chosen = {name: getattr(self, name)[rows] for name in self._tensors() if name not in _NOT_PER_TOKEN}
        mask = self.sampling_mask
        if mask is not None:
            places = self.loss_mask.cumsum(0) - 1  # Positions among all drawn tokens.
            mask = mask.select(places[rows][self.loss_mask[rows]].cpu())
        return replace(
            self,
            **chosen,
            columns={name: column[rows] for name, column in self.columns.items()},
            sampling_mask=mask,
            drawn=torch.nonzero(self.loss_mask[rows]).flatten(),
            cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device),
            groups=self.groups[chosen_B := torch.tensor(sequences, device=device)],
            sample_tokens=None if self.sample_tokens is None else self.sample_tokens[chosen_B],
            rollouts=[self.rollouts[sequence] for sequence in sequences] if self.rollouts else (),
        )

    def by_adapter(self) -> dict[str | None, "PackedBatch"]:
        """Return the sequences that each LoRA adapter has drawn, as micro-batches of the same step, by its name; None
        is the weights alone. Activate the adapter before you compute the loss of its part."""
        sequences: dict[str | None, list[int]] = {}
        for index, rollout in enumerate(self.rollouts):
            sequences.setdefault(rollout.adapter, []).append(index)
        return {adapter: self.select(chosen) for adapter, chosen in sequences.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}


LossObserver = Callable[[PackedBatch, torch.Tensor, torch.Tensor], None]
"""A function of a batch or micro-batch, the rows i64[n] of its tokens in the loss, and their log(π_θ / π_b) f[n], both
on the device. The loss calls it after it has copied its statistics."""
_NOT_PER_TOKEN = ("cu_seqlens", "groups", "drawn", "banned", "sample_tokens")
_QUADRATIC = 1 / 8192
"""Attention's share of the cost of a sequence of n tokens: n + n² · this. Linear work is about 24 h² operations per
token and layer, attention's 2 h n forward, so that they are equal at n = 12 h: some 8,000 to 12,000 tokens where h is
700 to 1,000."""


def _partition(lengths: Sequence[int], groups: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put sequences into bins of at most `max_tokens` tokens each. Groups that fit into a bin stay whole. The most
    expensive group is placed first, each in the cheapest bin that has room (longest processing time first, Graham
    1969), so that bins are few and of similar cost. Raises ValueError if a sequence does not fit into a bin."""
    longest = max(lengths)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of the batch has {longest} tokens, and a micro-batch holds {max_tokens} (micro_batch_tokens); "
            f"allow at least {longest}"
        )
    units: dict[int, list[int]] = {}
    for sequence, group in enumerate(groups):
        units.setdefault(group, []).append(sequence)
    whole = [u for u in units.values() if sum(lengths[s] for s in u) <= max_tokens]
    split = [[s] for u in units.values() if sum(lengths[s] for s in u) > max_tokens for s in u]
    ordered = sorted(whole + split, key=lambda unit: -_cost(unit, lengths))
    num_bins = max(1, -(-sum(lengths) // max_tokens))
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    costs, tokens = [0.0] * num_bins, [0] * num_bins
    for unit in ordered:
        size = sum(lengths[s] for s in unit)
        room = [b for b in range(len(bins)) if tokens[b] + size <= max_tokens]
        best = min(room, key=costs.__getitem__, default=len(bins))
        if not room:
            bins.append([])
            costs.append(0.0)
            tokens.append(0)
        bins[best] += unit
        costs[best] += _cost(unit, lengths)
        tokens[best] += size
    return [sorted(chosen) for chosen in bins if chosen]


def _cost(unit: Sequence[int], lengths: Sequence[int]) -> float:
    return sum(lengths[s] + lengths[s] ** 2 * _QUADRATIC for s in unit)


@named()
def pack(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float | np.ndarray],
    *,
    drawn: Sequence[np.ndarray] | None = None,
    included: Sequence[np.ndarray] | None = None,
    trainer_version: int | None = None,
    foreign_versions: Sequence[np.ndarray] | None = None,
) -> PackedBatch:
    """Pack rollouts, each with one advantage for all its tokens, or with f32[tokens].

    drawn: for each rollout bool[tokens], true for tokens that the policy drew; None: as its turns say, and all without
    turns. The others (tool outputs between two turns) are context for later tokens. They take no part in the loss or
    its average, and their log-probabilities and versions are not read.
    included: for each rollout bool[tokens], true for drawn tokens that take part in the loss; None: all. Excluded
    tokens (as too old, for example) still count in every average of the loss, so that the others weigh no more.
    foreign_versions: for each rollout i64[tokens], as in `PackedBatch`; None: 0.
    Sampling masks and routed experts are packed if they were recorded.
    Raises ValueError for an empty batch, for lengths that do not match, for non-finite log-probabilities, for a token
    that is not in its sampling mask, for routed experts of different models, for an answer without a token before it,
    and for greedy rollouts, which have no importance ratio.
    """
    if not rollouts:
        raise ValueError("cannot pack a batch without rollouts")
    if len(rollouts) != len(advantages):
        raise ValueError(f"{len(rollouts)} rollouts need as many advantages, got {len(advantages)}")
    masks = _token_masks("drawn", rollouts, [rollout.drawn for rollout in rollouts] if drawn is None else drawn)
    for rollout, advantage, mask in zip(rollouts, advantages, masks, strict=True):
        _check(rollout, np.asarray(advantage), mask)
    _warn_of_other_distributions(rollouts)
    lengths = [len(r.prompt_token_ids) + len(r.token_ids) for r in rollouts]

    def column(
        dtype: np.typing.DTypeLike, context_value: float, of_rollouts: Sequence[Any], width: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Lay out one value per rollout, or one per token, at the tokens that the policy drew. width: shape of one."""
        out = np.full((sum(lengths), *width), context_value, dtype)
        end = 0
        for mask, length, values in zip(masks, lengths, of_rollouts, strict=True):
            end += length
            out[end - len(mask) : end][mask] = np.broadcast_to(values, (*mask.shape, *width))[mask]
        return torch.from_numpy(out)

    group_index = {group_id: index for index, group_id in enumerate(dict.fromkeys(r.group_id for r in rollouts))}
    groups = np.array([group_index[r.group_id] for r in rollouts])
    drawn_tokens = np.array([mask.sum() for mask in masks])
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
            num_sequences=len(samples_of(rollouts)),
            group_tokens=torch.from_numpy(np.bincount(groups, drawn_tokens).astype(np.int64)),
        ),
        columns={
            name: column(values.dtype, 0, [r.columns.get(name, 0) for r in rollouts], values.shape[1:])
            for name, values in _shared_columns(rollouts).items()
        },
        sampling_mask=pack_masks(rollouts, masks),
        banned=pack_banned(rollouts, masks),
        routed_experts=routed_experts_column(rollouts),
        sample_tokens=tokens_of_samples(rollouts, drawn_tokens),
        included=None if included is None else column(bool, False, _token_masks("included", rollouts, included)),
        trainer_version=trainer_version,
        foreign_versions=None if foreign_versions is None else column(np.int64, 0, foreign_versions),
        rollouts=list(rollouts),
    )


def given_rollout(prompt: ArrayLike, answer: ArrayLike, *, request_id: int, group_id: int, sample: int = 0) -> Rollout:
    """Return a rollout of given tokens, i[P] and i[T], as if version 0 had drawn the answer with probability 1."""
    token_ids = np.asarray(answer, np.int32)
    nothing = np.zeros(len(token_ids), np.int64)
    return Rollout(
        request_id=request_id,
        group_id=group_id,
        sample=sample,
        params=SamplingParams(),
        metadata={},
        prompt_token_ids=np.asarray(prompt, np.int32),
        token_ids=token_ids,
        logprobs=nothing.astype(np.float32),
        weight_versions=nothing,
        sampled_at_ns=nothing,
        finish_reason="stop",
    )


def tokens_of_samples(rollouts: Sequence[Rollout], drawn_tokens: np.ndarray) -> torch.Tensor | None:
    """Return `PackedBatch.sample_tokens` of a batch with these sequences. drawn_tokens: i64[B]."""
    samples = samples_of(rollouts)
    if len(samples) == len(rollouts):
        return None
    place_of = {id(rollout): place for place, sample in enumerate(samples) for rollout in sample}
    places_B = np.array([place_of[id(rollout)] for rollout in rollouts])
    return torch.from_numpy(np.bincount(places_B, drawn_tokens).astype(np.int64)[places_B])


def _shared_columns(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Return the columns of one number per token, and of a teacher's likeliest tokens, that all rollouts with tokens
    have: by name the column of the first."""
    first, *others = [rollout for rollout in rollouts if len(rollout.token_ids)] or rollouts
    return {
        name: values
        for name, values in first.columns.items()
        if (values.ndim == 1 or name in (TOP_IDS, TOP_LOGPROBS)) and all(name in other.columns for other in others)
    }


def _token_masks(name: str, rollouts: Sequence[Rollout], given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return bool[tokens] for each rollout."""
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
    columns = (rollout.logprobs, rollout.weight_versions, rollout.sampled_at_ns, *rollout.columns.values())
    if {len(column) for column in columns} != {len(rollout.token_ids)}:
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


def _warn_of_other_distributions(rollouts: Sequence[Rollout]) -> None:
    if any(rollout.params.filtered and rollout.sampling_mask is None for rollout in rollouts):
        warnings.warn(
            "rollouts sampled with top_k, top_p or min_p, without a sampling mask: their log-probabilities are over "
            "the tokens that these left, the trainer's over the whole vocabulary, so importance ratios are biased "
            "towards 0 even on-policy; sample with SamplingParams(return_sampling_mask=True)",
            stacklevel=3,
        )
    if any(rollout.params.adjusted for rollout in rollouts):
        warnings.warn(
            "rollouts sampled with repetition_penalty, logit_bias or min_tokens: their log-probabilities are those of "
            "the logits that these changed, the trainer's those of the model, so importance ratios are not 1 even "
            "on-policy",
            stacklevel=3,
        )
