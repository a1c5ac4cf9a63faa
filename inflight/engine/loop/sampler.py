"""Samples one token per row, with its log-probability and the columns that requests asked for.

Repetition penalty, logit bias, min_tokens and temperature change the logits. Then top-k, top-p and min-p set the logits
of removed tokens to −∞. Each filter works on the renormalised result of the previous one. The remaining tokens are the
sampling mask. Sampling inverts the cumulative distribution at one uniform number per row, a hash of (seed, position),
so the result does not depend on the other rows of the batch.

M rows, F of them filtered; V vocabulary, K tokens that a filter can leave.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from inflight_kernels import Filters, Penalties, cut_logits, draw, penalize

from inflight.core.sampling import SamplingParams
from inflight.engine.loop.own_columns import ColumnFunction, compute_columns
from inflight.engine.loop.sequence import Cohort, Draws
from inflight.engine.model.device import to_device

_MANY = 512
"""Number of candidates that are tried before a whole vocabulary is sorted."""
_FEW_RANGES = 4
"""Number of ranges of ids up to which filling them one by one is faster than filling all ids by index."""
_LAST_ID = 2**31 - 1
_MASK_IDS = 256
"""Average number of ids in the masks of a pass that a GPU copies to the host without a wait."""
_LARGE_MASK = 16384
"""A mask that leaves more tokens than this, and most of the vocabulary, is recorded as the list of removed tokens."""


@dataclass(slots=True)
class Samples:
    """The samples of a pass, on its device: tokens i64[M], logprobs f32[M], and the columns that some row asked for.

    `columns` maps names to [M] or [M, k]. The sampling mask consists of mask_counts i64[M], 0 for rows without a mask,
    and mask_token_ids i64[sum of mask_counts]. If the ids of a row can be the removed tokens, mask_cut_from i32[M] is
    present.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    mask_AV: torch.Tensor | None = None
    """bool[A, V] on a GPU: the tokens of the masks. mask_token_ids has a fixed length there, and can be too short."""

    @classmethod
    def none(cls, device: torch.device) -> "Samples":
        """Return the samples of a pass in which no prompt was finished."""
        return cls(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device))

    def to_host(self) -> "Samples":
        """Return a copy on the CPU. On a GPU the copies are queued after the pass and are valid once they are done."""
        columns = {name: column.to("cpu", non_blocking=True) for name, column in self.columns.items()}
        tokens, logprobs = self.tokens.to("cpu", non_blocking=True), self.logprobs.to("cpu", non_blocking=True)
        return Samples(tokens, logprobs, columns, self.mask_AV)

    def read_columns(self) -> dict[str, torch.Tensor]:
        """Return the columns on the CPU, after the copies."""
        if self.mask_AV is not None:
            total, ids = int(self.columns["mask_counts"].sum()), self.columns["mask_token_ids"]
            ids = ids[:total] if total <= len(ids) else self.mask_AV.nonzero()[:, 1].cpu()
            self.columns["mask_token_ids"], self.mask_AV = ids, None
        return self.columns


@dataclass(slots=True)
class _Rows:
    """Parameters of the rows of a batch, as tensors. They stay valid while the same sequences sample."""

    cohort: Cohort
    """The sequences of the rows."""
    temperatures: torch.Tensor
    seeds: torch.Tensor
    batch_rows: torch.Tensor
    adjusted: list[int]
    penalized: "_Penalized | None"
    filtered: "_Filtered | None"
    entropy: bool
    top: int
    own: dict[str, torch.Tensor | None]
    """Maps the custom columns that some row asked for to these rows i64[S], or to None for all rows."""


class _Penalized(NamedTuple):
    """Rows with a repetition penalty, and their penalties."""

    rows: list[int]
    penalties: Penalties

    @classmethod
    def of(
        cls, special: Seq[tuple[int, SamplingParams]], batch_rows: torch.Tensor, device: torch.device
    ) -> "_Penalized | None":
        """Return the rows with a penalty among these (row, parameters), or None."""
        penalized = [(row, params.repetition_penalty) for row, params in special if params.repetition_penalty != 1]
        if not penalized:
            return None
        rows, factors = map(list, zip(*penalized, strict=True))
        index = to_device(rows, device, torch.int64)
        return cls(rows, Penalties(index, batch_rows[index], to_device(factors, device, torch.float32)))


class _Filtered(NamedTuple):
    """Rows with filters, and their filters."""

    filters: Filters
    masks: torch.Tensor | None
    """i64[A]: the rows whose sampling masks are recorded."""

    @classmethod
    def of(cls, special: Seq[tuple[int, SamplingParams]], device: torch.device) -> "_Filtered | None":
        """Return the rows with filters among these (row, parameters), or None."""
        filtered = [(row, params) for row, params in special if params.filtered]
        if not filtered:
            return None
        rows, params = map(list, zip(*filtered, strict=True))
        filters = Filters(
            to_device(rows, device, torch.int64),
            to_device([p.temperature for p in params], device, torch.float32),
            to_device([p.top_k or _LAST_ID for p in params], device, torch.int64),  # logits can be of any width
            to_device([p.top_p for p in params], device, torch.float64),
            to_device([p.min_p for p in params], device, torch.float32),
        )
        asked = [row for row, of_row in filtered if of_row.return_sampling_mask]
        return cls(filters, to_device(asked, device, torch.int64) if asked else None)


class Sampler:
    """Samples for the sequences of one engine, and writes the tokens to `last_tokens`, by batch row."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: frozenset[int],
        last_tokens: torch.Tensor,
        own_columns: Mapping[str, ColumnFunction] | None = None,
        banned: Seq[tuple[int, int]] = (),
    ):
        """banned: ranges [begin, end) of ids that are never drawn (`banned_ids`)."""
        self._vocab_size, self._eos_ids = vocab_size, sorted(eos_ids)
        self._last_tokens = last_tokens
        self._own_columns = own_columns or {}
        self._device = last_tokens.device
        few = len(banned) <= _FEW_RANGES
        self._banned = banned if few else ()
        self._banned_ids = None if few else torch.cat([torch.arange(*ids, device=self._device) for ids in banned])
        """i64[…]: the banned ids, if they are in more than a few ranges."""
        self._rows: _Rows | None = None
        self._seen: torch.Tensor | None = None
        """bool[batch_rows, V]: tokens of the prompt or sampled, for sequences with a repetition penalty."""
        self._seen_by: dict[int, tuple[int, int]] = {}
        """Maps a batch row to the epoch in which the sequence entered whose tokens `_seen` holds, and their number."""

    def sample(self, logits_MV: torch.Tensor, draws: Draws) -> Samples:
        """Sample the next token of each sequence from its row of logits of any float dtype. The logits can change."""
        for begin, end in self._banned:
            logits_MV[:, begin:end] = float("-inf")
        if self._banned_ids is not None:
            logits_MV.index_fill_(1, self._banned_ids, float("-inf"))
        rows, sequences = self._rows_of(draws.cohort), draws.cohort.sequences
        positions = to_device(torch.from_numpy(draws.positions), self._device)
        if rows.adjusted:
            logits_MV = self._adjust(logits_MV.float(), rows)
        if rows.filtered is not None:
            logits_MV = _filter(logits_MV.float(), rows.filtered.filters)
        samples = self._sample(logits_MV, rows, positions)
        if rows.filtered is not None and rows.filtered.masks is not None:
            mask_AV = logits_MV[rows.filtered.masks] > float("-inf")
            columns, mask_AV = count_mask(mask_AV, rows.filtered.masks, num_rows=len(sequences))
            if mask_AV.is_cuda:  # nonzero() would wait for the device, because its result can have any length
                size = min(mask_AV.numel(), _MASK_IDS * len(mask_AV))
                columns["mask_token_ids"] = torch.nonzero_static(mask_AV, size=size)[:, 1]
                samples.mask_AV = mask_AV
            else:
                columns["mask_token_ids"] = mask_AV.nonzero()[:, 1]
            samples.columns |= columns
        if rows.own:
            logprobs_MV = (logits_MV.float() / _recorded_temperatures(rows.temperatures)).log_softmax(-1)
            samples.columns |= compute_columns(self._own_columns, rows.own, logprobs_MV, samples.tokens)
        self._last_tokens.index_copy_(0, rows.batch_rows, samples.tokens)
        if rows.penalized is not None and self._seen is not None:
            penalties = rows.penalized.penalties
            self._seen[penalties.seen_rows, samples.tokens[penalties.rows]] = True
            for row in rows.penalized.rows:
                sequence = sequences[row]
                self._seen_by[sequence.batch_row] = (int(draws.cohort.entered[row]), sequence.length)
        return samples

    def _rows_of(self, cohort: Cohort) -> _Rows:
        if self._rows is None or self._rows.cohort is not cohort:
            special = [(i, cohort.sequences[i].params) for i in cohort.special]
            batch_rows = to_device(torch.from_numpy(cohort.rows), self._device)
            self._rows = _Rows(
                cohort=cohort,
                temperatures=to_device(torch.from_numpy(cohort.temperatures), self._device),
                seeds=to_device(torch.from_numpy(cohort.seeds), self._device),
                batch_rows=batch_rows,
                adjusted=[i for i, params in special if params.adjusted],
                penalized=_Penalized.of(special, batch_rows, self._device),
                filtered=_Filtered.of(special, self._device),
                entropy=any(params.return_entropy for _, params in special),
                top=max((params.top_logprobs for _, params in special), default=0),
                own=self._own_rows(special, len(cohort.sequences)),
            )
        return self._rows

    def _own_rows(self, special: Seq[tuple[int, SamplingParams]], num_rows: int) -> dict[str, torch.Tensor | None]:
        """Map the custom columns that these (row, parameters) ask for to the rows, as in `_Rows.own`."""
        asked = {n: [row for row, params in special if n in params.columns] for n in self._own_columns}
        return {
            name: to_device(rows, self._device, torch.int64) if len(rows) < num_rows else None
            for name, rows in asked.items()
            if rows
        }

    def _adjust(self, logits_MV: torch.Tensor, rows: _Rows) -> torch.Tensor:
        if rows.penalized is not None:
            self._penalize(logits_MV, rows.cohort, rows.penalized)
        changed: list[int] = []
        tokens: list[int] = []
        biases: list[float] = []
        for row in rows.adjusted:
            sequence = rows.cohort.sequences[row]
            params = sequence.params
            changes = dict(params.logit_bias)
            # The token to be drawn is already pending.
            if len(sequence.tokens) + sequence.num_pending <= params.min_tokens:
                ends = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids))
                changes |= dict.fromkeys(ends, float("-inf"))
            changed += [row] * len(changes)
            tokens += changes
            biases += changes.values()
        if changed:
            where = tuple(to_device(indices, self._device, torch.int64) for indices in (changed, tokens))
            logits_MV.index_put_(where, to_device(biases, self._device, torch.float32), accumulate=True)
        return logits_MV

    def _penalize(self, logits_MV: torch.Tensor, cohort: Cohort, penalized: _Penalized) -> None:
        """Mark the tokens that sequences new to their batch row have seen, and change logits in place."""
        if self._seen is None:
            batch_rows = len(self._last_tokens)
            self._seen = torch.zeros(batch_rows, self._vocab_size, dtype=torch.bool, device=self._device)
        for row in penalized.rows:
            sequence = cohort.sequences[row]
            if self._seen_by.get(sequence.batch_row) != (int(cohort.entered[row]), sequence.length - 1):
                seen_V = self._seen[sequence.batch_row]
                seen_V.zero_()
                seen_V[to_device(sequence.token_ids(), self._device, torch.int64)] = True
        penalize(logits_MV, self._seen, penalized.penalties)

    def _sample(self, logits_MV: torch.Tensor, rows: _Rows, positions: torch.Tensor) -> Samples:
        tokens, logprobs, entropies = draw(logits_MV, rows.temperatures, rows.seeds, positions, entropy=rows.entropy)
        samples = Samples(tokens, logprobs)
        if entropies is not None:
            samples.columns["entropies"] = entropies
        if rows.top:
            chosen_M1 = logits_MV.gather(1, tokens[:, None]).float()
            top_Mk, samples.columns["top_token_ids"] = logits_MV.float().topk(min(rows.top, logits_MV.shape[1]))
            top_logprobs_Mk = (top_Mk - chosen_M1) / _recorded_temperatures(rows.temperatures) + logprobs[:, None]
            samples.columns["top_logprobs"] = top_logprobs_Mk
        return samples


def count_mask(
    mask_AV: torch.Tensor, rows_A: torch.Tensor, *, num_rows: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the columns of `Samples` for the sampling mask of some rows among `num_rows`, except mask_token_ids, and
    bool[A, V]: True for the tokens whose ids are in mask_token_ids.

    mask_AV: True for the tokens that are left. rows_A: the rows.
    """
    counts_A, vocabulary = mask_AV.sum(-1), mask_AV.shape[1]
    columns = {}
    if vocabulary > _LARGE_MASK:
        by_cut_A = counts_A > max(_LARGE_MASK, vocabulary // 2)
        columns["mask_cut_from"] = _spread(rows_A, by_cut_A.int() * vocabulary, num_rows)
        counts_A = torch.where(by_cut_A, vocabulary - counts_A, counts_A)
        mask_AV = mask_AV ^ by_cut_A[:, None]
    columns["mask_counts"] = _spread(rows_A, counts_A, num_rows)
    return columns, mask_AV


def _spread(index_A: torch.Tensor, values_A: torch.Tensor, count: int) -> torch.Tensor:
    """Return [count]: the values at their rows and 0 elsewhere."""
    return values_A.new_zeros(count).index_copy_(0, index_A, values_A)


def _recorded_temperatures(temperatures_M: torch.Tensor) -> torch.Tensor:
    """Return [M, 1]: the temperatures of the recorded distributions, 1 for greedy rows."""
    return torch.where(temperatures_M == 0, 1.0, temperatures_M)[:, None]


def _filter(logits_MV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return logits with −∞ for removed tokens, on a GPU in place."""
    if logits_MV.is_cuda:
        cut_logits(logits_MV, filters)
        return logits_MV
    rows_F, temperatures_F = filters.rows, filters.temperatures
    every = len(rows_F) == len(logits_MV)
    logits_FV = logits_MV if every else logits_MV[rows_F]
    # The largest value is subtracted first, so that small temperatures do not overflow.
    peak_F1 = logits_FV.amax(-1, keepdim=True)
    _, order_FK, mask_FK = _candidates((logits_FV - peak_F1) / temperatures_F[:, None], filters)
    mask_FK &= peak_F1.isfinite()  # nothing is left of a row with a NaN or +∞, as in `cut_logits`
    left_FK = logits_FV.gather(1, order_FK).masked_fill_(~mask_FK, float("-inf"))
    cut_FV = torch.full_like(logits_FV, float("-inf")).scatter_(1, order_FK, left_FK)
    return cut_FV if every else logits_MV.index_copy(0, rows_F, cut_FV)


def _candidates(scaled_FV: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (scores [F, K] by falling probability, token ids i64[F, K], bool[F, K]: True for tokens that stay)."""
    vocabulary = scaled_FV.shape[1]
    top_ks = filters.top_ks.tolist()
    most = max(top_ks)

    def cut(order_FK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sorted_FK = scaled_FV.gather(1, order_FK)
        probs_FK = torch.exp(sorted_FK - scaled_FV.logsumexp(-1, keepdim=True))
        return sorted_FK, order_FK, _mask(probs_FK, filters, vocabulary)

    # Top-p asks for the mass of all tokens that top-k leaves.
    few = all(top_k <= _MANY or top_k >= vocabulary for top_k in top_ks)
    if most >= vocabulary and few and vocabulary > 4 * _MANY:
        # Sorting is slow, and top-p and min-p mostly leave few tokens, so a small number is tried first.
        tried = cut(_best(scaled_FV, _MANY))
        if not bool(tried[2][:, -1].any()):
            return tried
    return cut(_best(scaled_FV, most) if most <= vocabulary // 2 else _all(scaled_FV))


def _best(scores_FV: torch.Tensor, count: int) -> torch.Tensor:
    """Return token ids i64[F, count] of the best scores by rank. Ranks cost ten times as much as `topk` of the scores,
    so only a few more tokens than requested get ranks, and the whole row if ties extend beyond these tokens."""
    some = count + count // 2 + 64
    if some >= scores_FV.shape[1]:
        return _ranks(scores_FV).topk(count).indices
    scores_FS, ids_FS = scores_FV.topk(some)
    best_FK = ids_FS.gather(1, _ranks(scores_FS, ids_FS).topk(count).indices)
    tied_F = ~(scores_FS[:, -1] < scores_FS[:, count - 1])  # or NaN
    if bool(tied_F.any()):
        best_FK[tied_F] = _ranks(scores_FV[tied_F]).topk(count).indices
    return best_FK


def _all(scores_FV: torch.Tensor) -> torch.Tensor:
    """Return token ids i64[F, V], best first. The low bits of the ranks encode the ids. NumPy sorts these ranks 20
    times as fast as PyTorch sorts them with their places."""
    rising_FV = _ranks(scores_FV).numpy()
    rising_FV.sort(axis=-1)
    return _LAST_ID - (torch.from_numpy(rising_FV[:, ::-1].copy()) & _LAST_ID)


def _ranks(scores_FV: torch.Tensor, ids_FV: torch.Tensor | None = None) -> torch.Tensor:
    """Return i64[F, V] in the order of the scores, f32, and among equal scores of falling token ids. No two ranks are
    equal, so the best tokens do not depend on the number requested, unlike with `topk` of scores."""
    if ids_FV is None:
        ids_FV = torch.arange(scores_FV.shape[1], device=scores_FV.device)
    bits_FV = scores_FV.view(torch.int32)
    ranks_FV = (bits_FV ^ ((bits_FV >> 31) & _LAST_ID)).long()
    ranks_FV <<= 32
    ranks_FV |= _LAST_ID - ids_FV
    return ranks_FV


def _mask(probs_FK: torch.Tensor, filters: Filters, vocabulary: int) -> torch.Tensor:
    """Return bool[F, K]: True for tokens, sorted by falling probability, that survive top-k, top-p and min-p. If K is
    less than the vocabulary, the K most likely tokens are given with their probabilities among all tokens."""
    top_k_F1, top_p_F1, min_p_F1 = filters.top_ks[:, None], filters.top_ps.float()[:, None], filters.min_ps[:, None]
    mask_FK = torch.arange(probs_FK.shape[1], device=probs_FK.device) < top_k_F1
    left_probs_FK = probs_FK * mask_FK
    before_FK = left_probs_FK.cumsum(-1) - left_probs_FK
    total_F1 = torch.where(top_k_F1 < vocabulary, left_probs_FK.sum(-1, keepdim=True), 1.0)
    mask_FK &= (before_FK < top_p_F1 * total_F1) | (top_p_F1 >= 1)
    mask_FK &= (probs_FK >= min_p_F1 * probs_FK[:, :1]) & (probs_FK > 0)
    mask_FK[:, 0] = True
    return mask_FK
