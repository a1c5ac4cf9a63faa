"""Draws one token per row, with the log-probability that it had and what else was asked for.

Logits go through repetition penalty, logit bias, min_tokens and temperature; then top-k, top-p and min-p keep a set of
tokens, each from the renormalised result of the one before. A draw inverts the cumulative distribution at one uniform
number per row, a hash of (seed, position): which other rows are in the batch does not matter.

M rows, V vocabulary, K tokens that a filter may keep.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from inflight_kernels import draw, uniforms

from inflight.core.sampling import SamplingParams
from inflight.engine.device import to_device
from inflight.engine.sequence import Sequence

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_TENSORS = ("tokens", "logprobs", "entropies", "top_token_ids", "top_logprobs")
_TENSORS += ("mask_counts", "mask_token_ids", "mask_cut_from")
_MANY = 512
"""Candidates that are tried before a whole vocabulary is sorted."""
_LAST_ID = 2**31 - 1
_LARGE_SET = 16384
"""Kept sets of more tokens, and of most of the vocabulary, are told by what was cut."""


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one sample of a group: SplitMix64's output function (Steele, Lea and Flood 2014), as i64."""
    x = np.array([(seed + sample * int(_GOLDEN)) % 2**64], _U64) + _GOLDEN
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return int((x ^ (x >> _U64(31))).view(np.int64)[0])


@dataclass(slots=True)
class Drawn:
    """What a pass drew, on the device: tokens i64[M], logprobs f32[M], and where some row asked for them entropies
    f32[M], top_token_ids i64[M, k] and top_logprobs f32[M, k], and the tokens that were kept for the rows
    `mask_rows`."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None
    top_token_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    mask_rows: list[int] = field(default_factory=list)
    mask_counts: torch.Tensor | None = None
    """i64[len(mask_rows)]"""
    mask_token_ids: torch.Tensor | None = None
    """i64[sum of mask_counts]"""
    mask_cut_from: torch.Tensor | None = None
    """i32[len(mask_rows)]: 0, or the size of the vocabulary where the ids are those that were cut from it."""

    def to_host(self) -> "Drawn":
        """The same on the CPU, once the copies are done; on a GPU they are queued behind the pass."""
        if self.tokens.device.type == "cpu":
            return self
        copied = {
            name: value.to("cpu", non_blocking=True) for name in _TENSORS if (value := getattr(self, name)) is not None
        }
        return Drawn(**copied, mask_rows=self.mask_rows)


def nothing_drawn(logits: torch.Tensor) -> Drawn:
    """Of a pass in which no prompt came to its end."""
    return Drawn(logits.new_empty(0, dtype=torch.int64), logits.new_empty(0, dtype=torch.float32))


@dataclass(slots=True)
class _Rows:
    """Parameters of the rows of a batch, as tensors; kept as long as the same sequences draw."""

    key: list[int]
    temperatures: torch.Tensor
    seeds: torch.Tensor
    batch_rows: torch.Tensor
    adjusted: list[int]
    filtered: list[int]
    entropy: bool
    top: int


class Sampler:
    """Draws for the sequences of one engine; `last_tokens` (by batch row) receives what was drawn."""

    def __init__(self, vocab_size: int, eos_ids: frozenset[int], last_tokens: torch.Tensor):
        self._vocab_size, self._eos_ids = vocab_size, sorted(eos_ids)
        self._last_tokens = last_tokens
        self._device = last_tokens.device
        self._rows: _Rows | None = None
        self._seen: torch.Tensor | None = None
        """bool[batch_rows, V]: tokens of the prompt or drawn, for sequences with a repetition penalty."""
        self._seen_by: dict[int, tuple[int, int]] = {}
        """Lane → request whose tokens `_seen` holds, and how many of them."""

    @torch.inference_mode()
    def draw(self, logits_MV: torch.Tensor, sequences: Seq[Sequence]) -> Drawn:
        """Draw the next token of each sequence from its row of logits of any float dtype."""
        rows = self._rows_of(sequences)
        positions = self._tensor([s.length - 1 for s in sequences], torch.int64)
        if rows.adjusted:
            logits_MV = self._adjust(logits_MV.float(), sequences, rows.adjusted)
        if not rows.filtered:
            drawn = self._draw_plain(logits_MV, rows, positions)
        else:
            drawn = self._draw_filtered(logits_MV.float(), sequences, rows, positions)
        self._last_tokens[rows.batch_rows] = drawn.tokens
        if self._seen is not None:
            watched = [i for i in rows.adjusted if sequences[i].params.repetition_penalty != 1]
            if watched:
                index = self._tensor(watched, torch.int64)
                self._seen[rows.batch_rows[index], drawn.tokens[index]] = True
                for sequence in (sequences[i] for i in watched):
                    self._seen_by[sequence.batch_row] = (sequence.request_id, sequence.length)
        return drawn

    # ---- parameters ---------------------------------------------------------------------------------------------

    def _rows_of(self, sequences: Seq[Sequence]) -> _Rows:
        key = [s.request_id * 65536 + s.batch_row for s in sequences]
        if self._rows is None or self._rows.key != key:
            params = [s.params for s in sequences]
            self._rows = _Rows(
                key=key,
                temperatures=self._tensor([p.temperature for p in params], torch.float32),
                seeds=self._tensor([s.seed for s in sequences], torch.int64),
                batch_rows=self._tensor([s.batch_row for s in sequences], torch.int64),
                adjusted=[i for i, p in enumerate(params) if p.adjusted],
                filtered=[i for i, p in enumerate(params) if p.filtered],
                entropy=any(p.return_entropy for p in params),
                top=max(p.top_logprobs for p in params),
            )
        return self._rows

    def _tensor(self, values: Seq[float] | Seq[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, self._device, dtype)

    # ---- logits -------------------------------------------------------------------------------------------------

    def _adjust(self, logits_MV: torch.Tensor, sequences: Seq[Sequence], adjusted: list[int]) -> torch.Tensor:
        logits_MV = logits_MV.clone()
        rows: list[int] = []
        tokens: list[int] = []
        biases: list[float] = []
        for row in adjusted:
            sequence = sequences[row]
            params = sequence.params
            if params.repetition_penalty != 1:
                penalty, seen_V = params.repetition_penalty, self._seen_tokens(sequence)
                row_V = logits_MV[row]
                logits_MV[row] = torch.where(seen_V, torch.where(row_V > 0, row_V / penalty, row_V * penalty), row_V)
            changes = dict(params.logit_bias)
            if len(sequence.tokens) + sequence.num_pending <= params.min_tokens:  # the draw to come is pending already
                ends = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids))
                changes |= dict.fromkeys(ends, float("-inf"))
            rows += [row] * len(changes)
            tokens += changes
            biases += changes.values()
        if rows:
            where = (self._tensor(rows, torch.int64), self._tensor(tokens, torch.int64))
            logits_MV.index_put_(where, self._tensor(biases, torch.float32), accumulate=True)
        return logits_MV

    def _seen_tokens(self, sequence: Sequence) -> torch.Tensor:
        if self._seen is None:
            batch_rows = len(self._last_tokens)
            self._seen = torch.zeros(batch_rows, self._vocab_size, dtype=torch.bool, device=self._device)
        seen_V = self._seen[sequence.batch_row]
        if self._seen_by.get(sequence.batch_row) != (sequence.request_id, sequence.length - 1):
            seen_V.zero_()
            seen_V[self._tensor(sequence.token_ids(), torch.int64)] = True
        return seen_V

    # ---- draws --------------------------------------------------------------------------------------------------

    def _draw_plain(self, logits_MV: torch.Tensor, rows: _Rows, positions: torch.Tensor) -> Drawn:
        tokens, logprobs, entropies = draw(logits_MV, rows.temperatures, rows.seeds, positions, entropy=rows.entropy)
        drawn = Drawn(tokens, logprobs, entropies)
        if rows.top:
            temperature_M1 = torch.where(rows.temperatures == 0, 1.0, rows.temperatures)[:, None]
            chosen_M1 = logits_MV.gather(1, tokens[:, None]).float()
            top_Mk, drawn.top_token_ids = logits_MV.float().topk(min(rows.top, logits_MV.shape[1]))
            drawn.top_logprobs = (top_Mk - chosen_M1) / temperature_M1 + logprobs[:, None]
        return drawn

    def _draw_filtered(
        self, logits_MV: torch.Tensor, sequences: Seq[Sequence], rows: _Rows, positions: torch.Tensor
    ) -> Drawn:
        """With tokens sorted by probability every filter keeps a prefix, so the kept set is the shortest of them."""
        plain = [i for i in range(len(sequences)) if i not in set(rows.filtered)]
        drawn = self._draw_plain(logits_MV, rows, positions) if plain or rows.top or rows.entropy else None
        index = self._tensor(rows.filtered, torch.int64)
        params = [sequences[i].params for i in rows.filtered]
        temperature_F1 = rows.temperatures[index][:, None]
        logits_FV = logits_MV if drawn is None else logits_MV[index]
        scaled_FV = (logits_FV - logits_FV.amax(-1, keepdim=True)) / temperature_F1  # small ones do not overflow
        sorted_FK, order_FK, kept_FK = _candidates(scaled_FV, params)
        cdf_FK = (sorted_FK.exp() * kept_FK).cumsum(-1)
        logprobs_FK = torch.where(kept_FK, sorted_FK - cdf_FK[:, -1:].log(), float("-inf"))
        rank_F1 = _invert_cdf(cdf_FK, uniforms(rows.seeds[index], positions[index]))[:, None]
        tokens_F, logprobs_F = order_FK.gather(1, rank_F1)[:, 0], logprobs_FK.gather(1, rank_F1)[:, 0]
        if drawn is None:
            drawn = Drawn(tokens_F, logprobs_F)
        else:
            drawn.tokens[index], drawn.logprobs[index] = tokens_F, logprobs_F
            if drawn.entropies is not None:
                drawn.entropies[index] = -(logprobs_FK.exp() * logprobs_FK.masked_fill(~kept_FK, 0)).sum(-1)
            if drawn.top_logprobs is not None and drawn.top_token_ids is not None:
                top = min(rows.top, order_FK.shape[1])
                drawn.top_token_ids[index, :top] = order_FK[:, :top]
                drawn.top_logprobs[index] = float("-inf")
                drawn.top_logprobs[index, :top] = logprobs_FK[:, :top]
        asked = [f for f, p in enumerate(params) if p.return_sampling_mask]
        if asked:
            drawn.mask_rows = [rows.filtered[f] for f in asked]
            if len(asked) < len(params):
                among = self._tensor(asked, torch.int64)
                order_FK, kept_FK = order_FK[among], kept_FK[among]
            _tell_kept(drawn, order_FK, kept_FK, self._vocab_size)
        return drawn


def _tell_kept(drawn: Drawn, order_AK: torch.Tensor, kept_AK: torch.Tensor, vocabulary: int) -> None:
    """Which tokens were kept, as their ids, or as those of the others where these are far fewer."""
    counts_A = kept_AK.sum(-1)
    if kept_AK.shape[1] == vocabulary > _LARGE_SET:
        by_cut_A = counts_A > max(_LARGE_SET, vocabulary // 2)
        drawn.mask_cut_from = by_cut_A.int() * vocabulary
        counts_A = torch.where(by_cut_A, vocabulary - counts_A, counts_A)
        kept_AK = kept_AK ^ by_cut_A[:, None]
    drawn.mask_counts = counts_A
    drawn.mask_token_ids = order_AK[kept_AK]


def _candidates(
    scaled_FV: torch.Tensor, params: Seq[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scores [F, K] by falling probability, their token ids i64[F, K], which of them are kept bool[F, K])."""
    vocabulary = scaled_FV.shape[1]
    most = max(p.top_k or vocabulary for p in params)
    few = all(p.top_k <= _MANY for p in params)  # top-p asks for the mass of all that top-k keeps
    if most >= vocabulary and few and scaled_FV.device.type == "cpu" and vocabulary > 4 * _MANY:
        # Sorting is slow and what top-p or min-p keep is mostly few: try that first. (On a GPU, asking whether it was
        # enough would wait for the device.)
        order_FK = _best(scaled_FV, _MANY)
        best_FK = scaled_FV.gather(1, order_FK)
        probs_FK = torch.exp(best_FK - scaled_FV.logsumexp(-1, keepdim=True))
        kept_FK = kept_prefix(probs_FK, params)
        if not bool(kept_FK[:, -1].any()):
            return best_FK, order_FK, kept_FK
    order_FK = _best(scaled_FV, most) if most <= vocabulary // 2 else _all(scaled_FV)
    sorted_FK = scaled_FV.gather(1, order_FK)
    probs_FK = torch.exp(sorted_FK - scaled_FV.logsumexp(-1, keepdim=True))
    return sorted_FK, order_FK, kept_prefix(probs_FK, params)


def _best(scores_FV: torch.Tensor, count: int) -> torch.Tensor:
    """Token ids i64[F, count] of the best scores by rank.

    On a CPU, ranks of a whole vocabulary cost ten times as much as `topk` of the scores. So only some more than are
    asked for get ranks there, and the whole row where ties go on beyond them. (On a GPU, asking would wait.)
    """
    some = count + count // 2 + 64
    if scores_FV.device.type != "cpu" or some >= scores_FV.shape[1]:
        return _ranks(scores_FV).topk(count).indices
    scores_FS, ids_FS = scores_FV.topk(some)
    best_FK = ids_FS.gather(1, _ranks(scores_FS, ids_FS).topk(count).indices)
    tied_F = ~(scores_FS[:, -1] < scores_FS[:, count - 1])  # or NaN
    if bool(tied_F.any()):
        best_FK[tied_F] = _ranks(scores_FV[tied_F]).topk(count).indices
    return best_FK


def _all(scores_FV: torch.Tensor) -> torch.Tensor:
    """Token ids i64[F, V], best first. On a CPU, NumPy sorts the ranks, whose low bits tell the ids, 20 times as fast
    as PyTorch sorts them with their places."""
    ranks_FV = _ranks(scores_FV)
    if ranks_FV.device.type != "cpu":
        return ranks_FV.sort(descending=True).indices
    rising_FV = ranks_FV.numpy()
    rising_FV.sort(axis=-1)
    return _LAST_ID - (torch.from_numpy(rising_FV[:, ::-1].copy()) & _LAST_ID)


def _ranks(scores_FV: torch.Tensor, ids_FV: torch.Tensor | None = None) -> torch.Tensor:
    """i64[F, V], in the order of the scores, f32, and among equal ones in that of falling token ids. No two are equal,
    so that the best of them are the same ones however many are asked for; `topk` of scores promises no such thing."""
    if ids_FV is None:
        ids_FV = torch.arange(scores_FV.shape[1], device=scores_FV.device)
    bits_FV = scores_FV.view(torch.int32)
    ranks_FV = (bits_FV ^ ((bits_FV >> 31) & _LAST_ID)).long()
    ranks_FV <<= 32
    ranks_FV |= _LAST_ID - ids_FV
    return ranks_FV


def kept_prefix(probs_FK: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """bool[F, K]: which of the tokens, sorted by falling probability, survive top-k, top-p and min-p. Where K is less
    than the vocabulary, the K most likely tokens are given with their probabilities among all."""
    candidates, device = probs_FK.shape[1], probs_FK.device
    top_k_F1 = to_device([p.top_k or 2**31 for p in params], device)[:, None]
    top_p_F1 = to_device([p.top_p for p in params], device)[:, None]
    min_p_F1 = to_device([p.min_p for p in params], device)[:, None]
    kept_FK = torch.arange(candidates, device=device) < top_k_F1
    kept_probs_FK = probs_FK * kept_FK
    before_FK = kept_probs_FK.cumsum(-1) - kept_probs_FK
    total_F1 = torch.where(top_k_F1 < 2**31, kept_probs_FK.sum(-1, keepdim=True), 1.0)
    kept_FK &= (before_FK < top_p_F1 * total_F1) | (top_p_F1 >= 1)
    kept_FK &= (probs_FK >= min_p_F1 * probs_FK[:, :1]) & (probs_FK > 0)
    kept_FK[:, 0] = True
    return kept_FK


def _invert_cdf(cdf_FK: torch.Tensor, uniform_F: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds the uniform share of the total, so never one of weight 0."""
    total_F = cdf_FK[:, -1]
    target_F = torch.minimum(uniform_F * total_F, torch.nextafter(total_F, torch.zeros_like(total_F)))
    tokens_F = torch.searchsorted(cdf_FK, target_F[:, None], right=True)[:, 0]
    return tokens_F.clamp_(max=cdf_FK.shape[1] - 1)  # only a row of NaN gets here; its request ends with an error
