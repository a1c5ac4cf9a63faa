"""`linear_logprob` on a CPU, in PyTorch: pieces of logits that stay in the cache, changed in place.

Products of fp32 go through `linear`, to oneDNN. Lower precisions are widened piece by piece, so that no logit is
rounded. N rows, K of them with a sampling mask, H hidden size, V vocabulary, C columns of a piece, E ids in masks.
"""

import torch
import torch.nn.functional as F

from inflight_kernels._sampling_mask import Head, Masks, Rows
from inflight_kernels.tokenwise import product

ROWS = 4096
COLUMNS = 1024
"""Columns of a piece of logits, 16 MiB in fp32. Smaller pieces cost more if other programs use the cores too, since
each operation on a piece waits for all threads."""
ENTRIES = 2048
"""Approximate number of weight rows that are gathered at a time."""


def dense_forward(
    hidden_NH: torch.Tensor, head: Head, tokens_N: torch.Tensor, temperatures_N: torch.Tensor, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (log-probabilities, logsumexps of scaled logits, entropies or None), each [N]."""
    lowest = torch.finfo(temperatures_N.dtype).min
    chosen_N = torch.full_like(temperatures_N, torch.nan)
    peaks_N = torch.full_like(temperatures_N, lowest)
    totals_N, moments_N = torch.zeros_like(temperatures_N), torch.zeros_like(temperatures_N)
    for first in range(0, len(hidden_NH), ROWS):
        rows = slice(first, first + ROWS)
        peak, total, moment, chosen = peaks_N[rows], totals_N[rows], moments_N[rows], chosen_N[rows]
        for begin in range(0, len(head.weight_VH), COLUMNS):
            z_NC = _logits(hidden_NH[rows], head.columns(slice(begin, begin + COLUMNS)))
            if head.softcap is not None:
                z_NC.div_(head.softcap).tanh_().mul_(head.softcap)
            z_NC.div_(temperatures_N[rows, None])
            row, column = _hits(tokens_N[rows], begin, z_NC.shape[1])
            chosen[row] = z_NC[row, column]
            # Not below `lowest`, so that the difference of two −∞ never arises.
            higher = torch.maximum(peak, z_NC.amax(1))
            z_NC.sub_(higher[:, None])
            shift = peak - higher
            scale = shift.exp()
            if entropy:
                exp_NC = z_NC.exp()
                moment.add_(total * shift).mul_(scale)
                moment.add_(z_NC.clamp_(min=lowest).mul_(exp_NC).sum(1))
            else:
                exp_NC = z_NC.exp_()
            total.mul_(scale).add_(exp_NC.sum(1))
            peak.copy_(higher)
            del z_NC, exp_NC  # before the next ones are allocated, so that they take the same memory
    log_totals_N = totals_N.log()
    lses_N = peaks_N + log_totals_N
    return chosen_N - lses_N, lses_N, log_totals_N - moments_N / totals_N if entropy else None


def grad_logits(hidden_NH: torch.Tensor, piece: Head, begin: int, rows: Rows) -> torch.Tensor:
    """Return the gradient [N, C] of the logits of the piece of the vocabulary from `begin` on."""
    z_NC = _logits(hidden_NH, piece)
    tanh_NC = None
    if piece.softcap is not None:
        tanh_NC = z_NC.div_(piece.softcap).tanh_()
        z_NC = tanh_NC * piece.softcap
    logprobs_NC = z_NC.div_(rows.temperatures[:, None]).sub_(rows.lses[:, None])
    if rows.entropies is not None and rows.grad_entropies is not None:
        probs_NC = logprobs_NC.exp()
        logprobs_NC.clamp_(min=-1e30)  # a logit of −∞ has p log p = 0
        grad_NC = logprobs_NC.add_(rows.entropies[:, None]).mul_(-rows.grad_entropies[:, None])
        grad_NC.sub_(rows.grad_logprobs[:, None]).mul_(probs_NC)
    else:
        grad_NC = logprobs_NC.exp_().mul_(-rows.grad_logprobs[:, None])
    row, column = _hits(rows.tokens, begin, grad_NC.shape[1])
    grad_NC[row, column] += rows.grad_logprobs[row]
    return grad_NC if tanh_NC is None else grad_NC.mul_(tanh_NC.square_().neg_().add_(1))


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a · b in the precision of a (fp32 or more): in the memory of total, or without a total in new
    memory."""
    added = product(a, b.to(a.dtype).T)
    return added if total is None else total.add_(added)


def masked_forward(
    hidden_KH: torch.Tensor,
    head: Head,
    tokens_K: torch.Tensor,
    temperatures_K: torch.Tensor,
    entropy: bool,
    masks: Masks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return (log-probabilities, logsumexps of scaled logits, entropies or None), each [K], and logits [E]."""
    dtype, token_ids_E, row_E = temperatures_K.dtype, masks.token_ids, masks.row_E
    logits_E = temperatures_K.new_empty(len(token_ids_E))
    for begin in range(0, len(token_ids_E), ENTRIES):
        entries = slice(begin, begin + ENTRIES)
        gathered_EH = head.weight_VH[token_ids_E[entries]].to(dtype)
        torch.sum(gathered_EH.mul_(hidden_KH[row_E[entries]]), 1, out=logits_E[entries])
    if head.bias_V is not None:
        logits_E += head.bias_V[token_ids_E]
    if head.softcap is not None:
        logits_E.div_(head.softcap).tanh_().mul_(head.softcap)
    scaled_E = logits_E / temperatures_K[row_E]
    chosen_K = torch.full_like(temperatures_K, torch.nan)
    hit_E = token_ids_E == tokens_K[row_E]
    chosen_K[row_E[hit_E]] = scaled_E[hit_E]
    peaks_K = torch.full_like(temperatures_K, torch.finfo(dtype).min).scatter_reduce_(0, row_E, scaled_E, "amax")
    scaled_E -= peaks_K[row_E]
    exp_E = scaled_E.exp()
    totals_K = torch.zeros_like(peaks_K).index_add_(0, row_E, exp_E)
    log_totals_K = totals_K.log()
    entropies_K = None
    if entropy:
        exp_E *= scaled_E.clamp_(min=torch.finfo(dtype).min)
        entropies_K = log_totals_K - torch.zeros_like(peaks_K).index_add_(0, row_E, exp_E) / totals_K
    lses_K = peaks_K + log_totals_K
    return chosen_K - lses_K, lses_K, entropies_K, logits_E


def segment_sum(
    factors_E: torch.Tensor, table: torch.Tensor, index_E: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return out[g] = Σ factors[e] · table[index[e]] over e from offsets[g] to offsets[g + 1], in the precision of
    factors."""
    begin, end = int(offsets[0]), int(offsets[-1])
    factors_E, index_E = factors_E[begin:end], index_E[begin:end]
    if table.dtype != factors_E.dtype:
        # Only the rows that occur are widened.
        used, index_E = index_E.unique(return_inverse=True)
        table = table[used].to(factors_E.dtype)
    return F.embedding_bag(
        index_E,
        table,
        offsets - begin,
        mode="sum",
        per_sample_weights=factors_E,
        include_last_offset=True,
    )


def _logits(hidden_NH: torch.Tensor, piece: Head) -> torch.Tensor:
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    bias_C = None if piece.bias_V is None else piece.bias_V.to(dtype)
    return product(hidden_NH.to(dtype), piece.weight_VH.to(dtype), bias_C)


def _hits(tokens_N: torch.Tensor, begin: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows whose token is in these columns, and the column of each."""
    columns_N = tokens_N - begin
    rows = ((columns_N >= 0) & (columns_N < width)).nonzero()[:, 0]
    return rows, columns_N[rows]
