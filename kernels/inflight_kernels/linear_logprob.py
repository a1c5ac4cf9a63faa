"""Log-probability and entropy of chosen tokens from hidden states: the output layer and the softmax in one function
that never stores the logits [N, V].

log p = z[a] / τ − logsumexp_{j ∈ S}(z_j / τ) with z = softcap · tanh((h · Wᵀ + b) / softcap), the cap being optional. S
is the row's sampling mask or the whole vocabulary. The mask contains the tokens that top-k, top-p or min-p kept
(DeepSeek-V3.2, arXiv 2512.02556, §3.1, trains on the set that was sampled from). A row with a mask reads the |S| rows
of W that it needs. Other rows are multiplied a tile of the vocabulary at a time, with a running maximum and sum
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); backward multiplies once more instead of
keeping logits (as in Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"). With u = z / τ, d log
p / du_j = 1[j = a] − p_j and d entropy / du_j = −p_j (log p_j + entropy).

N rows, of which K have a sampling mask; H hidden size, V vocabulary, C columns of one piece of it, E ids in all masks.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from inflight_kernels._sampling_mask import Head, Masks, Rows, Split, split_rows


def linear_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    tokens_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sampling_mask: tuple[torch.Tensor, torch.Tensor] | None = None,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute from hidden [N, H], weight [V, H] and bias [V] of one float dtype, tokens i64[N], temperatures [N] > 0 →
    log-probabilities f32[N] and, if requested, entropies f32[N] of the same distributions. Both have gradients to
    hidden, weight and bias, which are summed in fp32 and have their dtype. A CPU also takes float64, and returns it.

    sampling_mask: offsets i64[N + 1] and token ids i64[E] or i32[E]. Row i has the distinct ids from offsets[i] to
    offsets[i + 1]; a row without ids is over the whole vocabulary. On a GPU, offsets in CPU memory save a wait for the
    device.

    Raises ValueError for shapes, dtypes and offsets that do not fit, and on a CPU for an id outside the vocabulary and
    a mask without the row's token. On a GPU, where this check would need a wait, such a row has a log-probability of
    NaN. A token outside the vocabulary has NaN on either device.
    """
    rows = hidden_NH.shape[:1]
    if (
        hidden_NH.ndim != 2
        or weight_VH.ndim != 2
        or not len(weight_VH)
        or hidden_NH.shape[1] != weight_VH.shape[1]
        or tokens_N.shape != rows
        or temperatures_N.shape != rows
    ):
        raise ValueError(
            "expected hidden [N, H], weight [V > 0, H], tokens [N] and temperatures [N], got "
            f"{list(hidden_NH.shape)}, {list(weight_VH.shape)}, {list(tokens_N.shape)} and {list(temperatures_N.shape)}"
        )
    if bias is not None and bias.shape != weight_VH.shape[:1]:
        raise ValueError(f"expected a bias [{len(weight_VH)}], one value per row of weight, got {list(bias.shape)}")
    allowed = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (not hidden_NH.is_cuda)
    dtypes = {tensor.dtype for tensor in (hidden_NH, weight_VH, bias) if tensor is not None}
    if len(dtypes) != 1 or hidden_NH.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(
            f"expected hidden, weight and bias of one dtype out of {names}, got "
            f"{', '.join(sorted(str(dtype) for dtype in dtypes))}"
        )
    if tokens_N.dtype != torch.int64 or not temperatures_N.is_floating_point():
        raise ValueError(f"expected tokens i64 and temperatures float, got {tokens_N.dtype} and {temperatures_N.dtype}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"expected a softcap > 0, or None for logits as they are, got {softcap}")
    split: Split = slice(None), None
    if sampling_mask is not None:
        split = split_rows(*sampling_mask, tokens_N, weight_VH)
    compute_dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    outputs: Any = LinearLogprobs.apply(
        _rows_contiguous(hidden_NH),
        _rows_contiguous(weight_VH),
        bias if bias is None else bias.contiguous(),
        tokens_N.contiguous(),
        temperatures_N.detach().to(compute_dtype).contiguous(),
        softcap,
        entropy,
        split,
    )
    return outputs


def linear_logprobs_reference(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    tokens_N: torch.Tensor,
    temperatures_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sampling_mask: tuple[torch.Tensor, torch.Tensor] | None = None,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the same in plain PyTorch, with all logits at once."""
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    logits_NV = hidden_NH.to(dtype) @ weight_VH.to(dtype).T
    if bias is not None:
        logits_NV = logits_NV + bias.to(dtype)
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    scaled_NV = logits_NV / temperatures_N.to(dtype)[:, None]
    if sampling_mask is not None:
        offsets, token_ids = sampling_mask
        lengths_N = offsets.diff().to(tokens_N.device)
        row_E = torch.repeat_interleave(torch.arange(len(tokens_N), device=tokens_N.device), lengths_N)
        dropped_NV = (lengths_N > 0)[:, None].repeat(1, len(weight_VH))
        dropped_NV[row_E, token_ids.long().to(tokens_N.device)] = False
        scaled_NV = scaled_NV.masked_fill(dropped_NV, -torch.inf)
    logprobs_NV = torch.log_softmax(scaled_NV, -1)
    logprobs_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
    if not entropy:
        return logprobs_N, None
    return logprobs_N, -(logprobs_NV.exp() * logprobs_NV.masked_fill(scaled_NV == -torch.inf, 0.0)).sum(-1)


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# ---- forward and backward, on either device -------------------------------------------------------------------------


def _backend(device: torch.device) -> ModuleType:
    """Return the module with `ROWS`, `COLUMNS` and the functions `dense_forward`, `masked_forward`, `grad_logits`,
    `add_product` and `segment_sum`. The docstrings of the CPU functions describe both modules."""
    if device.type == "cuda":
        from inflight_kernels import _linear_logprob_triton

        return _linear_logprob_triton
    from inflight_kernels import _linear_logprob_cpu

    return _linear_logprob_cpu


class LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        tokens_N: torch.Tensor,
        temperatures_N: torch.Tensor,
        softcap: float | None,
        entropy: bool,
        split: Split,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        backend = _backend(hidden_NH.device)
        head = Head(weight_VH, bias_V, softcap)
        logprobs_N, lses_N = torch.empty_like(temperatures_N), torch.empty_like(temperatures_N)
        entropies_N = torch.empty_like(temperatures_N) if entropy else None
        logits_E = None
        dense, masks = split
        for rows in (dense, masks and masks.rows):
            if rows is None:
                continue
            arguments = (hidden_NH[rows], head, tokens_N[rows], temperatures_N[rows], entropy)
            if rows is dense:
                logprobs, lses, entropies = backend.dense_forward(*arguments)
            else:
                logprobs, lses, entropies, logits_E = backend.masked_forward(*arguments, masks)
            logprobs_N[rows], lses_N[rows] = logprobs, lses
            if entropies_N is not None:
                entropies_N[rows] = entropies
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, tokens_N, temperatures_N, lses_N, entropies_N, logits_E)
        ctx.softcap, ctx.split = softcap, split
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, tokens_N, temperatures_N, lses_N, entropies_N, logits_E = ctx.saved_tensors
        head, (dense, masks) = Head(weight_VH, bias_V, ctx.softcap), ctx.split
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        backend = _backend(hidden_NH.device)
        dtype = temperatures_N.dtype
        # Gradients of the loss over τ: with u = z / τ, d loss / dz is d loss / du over τ.
        grad_logprobs_N = torch.zeros_like(temperatures_N) if grads[0] is None else grads[0] / temperatures_N
        grad_entropies_N = None if grads[1] is None else grads[1] / temperatures_N
        all_rows = Rows(tokens_N, temperatures_N, lses_N, grad_logprobs_N, entropies_N, grad_entropies_N)

        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if wants_weight else None
        grad_bias_V = torch.empty_like(bias_V) if wants_bias else None
        sum_by_token = None
        if masks is not None:
            grad_E = _masked_grad_logits(logits_E, masks, ctx.softcap, all_rows.take(masks.rows))
            if grad_hidden_NH is not None:
                grad_KH = backend.segment_sum(grad_E, weight_VH, masks.token_ids, masks.offsets)
                grad_hidden_NH[masks.rows] = grad_KH.to(hidden_NH.dtype)
            sum_by_token = _by_token(backend, grad_E, masks, len(weight_VH))
            masked_KH = hidden_NH[masks.rows]

        dense = slice(0) if dense is None else dense
        dense_NH, dense_rows = hidden_NH[dense], all_rows.take(dense)
        grad_dense_NH = dense_NH.new_zeros(dense_NH.shape, dtype=dtype) if wants_hidden else None
        for begin in range(0, len(weight_VH), backend.COLUMNS):
            columns = slice(begin, begin + backend.COLUMNS)
            piece = head.columns(columns)
            grad_CH = grad_C = None
            if sum_by_token is not None:
                grad_CH = sum_by_token(masked_KH, columns) if wants_weight else None
                grad_C = sum_by_token(torch.ones_like(masked_KH[:, :1]), columns)[:, 0] if wants_bias else None
            for first in range(0, len(dense_NH), backend.ROWS):
                rows = slice(first, first + backend.ROWS)
                grad_NC = backend.grad_logits(dense_NH[rows], piece, begin, dense_rows.take(rows))
                if grad_dense_NH is not None:
                    backend.add_product(grad_dense_NH[rows], grad_NC, piece.weight_VH)
                if wants_weight:
                    grad_CH = backend.add_product(grad_CH, grad_NC.T, dense_NH[rows])
                if wants_bias:
                    sum_C = grad_NC.sum(0, dtype=dtype)
                    grad_C = sum_C if grad_C is None else grad_C + sum_C
                del grad_NC  # before the next one is allocated, so that it takes the same memory
            if grad_weight_VH is not None:
                grad_weight_VH[columns] = 0 if grad_CH is None else grad_CH
            if grad_bias_V is not None:
                grad_bias_V[columns] = 0 if grad_C is None else grad_C
        if grad_hidden_NH is not None and grad_dense_NH is not None:
            grad_hidden_NH[dense] = grad_dense_NH.to(hidden_NH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _masked_grad_logits(logits_E: torch.Tensor, masks: Masks, softcap: float | None, rows: Rows) -> torch.Tensor:
    """Return the gradient of the logits of all masks, in the order of their ids."""
    row_E = masks.row_E
    logprobs_E = logits_E / rows.temperatures[row_E] - rows.lses[row_E]
    probs_E = logprobs_E.exp()
    coefficient_E = rows.grad_logprobs[row_E]
    hit_E = torch.where(masks.token_ids == rows.tokens[row_E], coefficient_E, 0.0)
    if rows.entropies is not None and rows.grad_entropies is not None:
        coefficient_E = coefficient_E + rows.grad_entropies[row_E] * (logprobs_E + rows.entropies[row_E])
    grad_E = hit_E - torch.where(probs_E == 0, 0.0, probs_E * coefficient_E)  # a logit of −∞ has p log p = 0
    return grad_E if softcap is None else grad_E * (1 - (logits_E / softcap) ** 2)


def _by_token(
    backend: ModuleType, grad_E: torch.Tensor, masks: Masks, vocabulary: int
) -> Callable[[torch.Tensor, slice], torch.Tensor]:
    """Return a function that sums, for columns C of the vocabulary, gradients times rows of a table [K, width] → [C,
    width].

    The entries of all masks are sorted by token id, so that a row of the weight's gradient is a sum over neighbours,
    always in the same order, and needs no atomic addition.
    """
    ids_E, order_E = masks.token_ids.sort(stable=True)
    grad_E, row_E = grad_E[order_E], masks.row_E[order_E]
    offsets = torch.searchsorted(ids_E, torch.arange(vocabulary + 1, device=ids_E.device))
    return lambda table, columns: backend.segment_sum(grad_E, table, row_E, offsets[columns.start : columns.stop + 1])
