"""Low-rank adapters of a projection, with one adapter or none per row (Hu et al. 2021, "LoRA"; rows of several adapters
in one call as in Chen et al. 2023, "Punica").

A fused projection has parts side by side, such as q, k and v, and an adapter has an A and a B for each of them: y[t,
columns of p] += (x[t] · A[s, rows of p]ᵀ) · B[s, columns of p]ᵀ with s the slot of row t. The scale α / R is in B.

T tokens, K inputs, N outputs, R rank, P rows of A over all parts, S adapter slots.
"""

import ctypes
from collections.abc import Sequence

import torch

from inflight_kernels import _cpu

SMALL_TOKENS = 256
"""Number of tokens up to which the kernels of a GPU have smaller tiles. They are compiled once for each."""


def add_lora(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SPK: torch.Tensor,
    b_SNR: torch.Tensor,
    widths: Sequence[int],
    slots_T: torch.Tensor,
) -> None:
    """Add to each row of y, in place, the product of the same row of x and the adapter in its slot.

    y [T, N], x [T, K], a [S, P, K] and b [S, N, R] of one float dtype. Parts have `widths` columns of y, N in all, and
    R rows of A each, P in all. Rows of x and y, and adapters in a and b, can have any distance; inside they are
    contiguous. slots i32[T] on the device of x; a row with a negative slot stays unchanged. Sums are fp32, and only the
    last one is rounded. On a GPU the launches depend on shapes alone, so that a CUDA graph can contain them. Raises
    ValueError if shapes, strides or dtypes do not fit. Slots are not checked against S.
    """
    tokens, inputs = len(x_TK), x_TK.shape[-1]
    adapters, rank = len(b_SNR), b_SNR.shape[-1]
    if (
        x_TK.shape != (tokens, inputs)
        or y_TN.shape != (tokens, sum(widths))
        or a_SPK.shape != (adapters, len(widths) * rank, inputs)
        or b_SNR.shape != (adapters, sum(widths), rank)
        or slots_T.shape != (tokens,)
    ):
        raise ValueError(
            f"expected y [T, N], x [T, K], a [S, {len(widths)}·R, K], b [S, N, R] and slots [T] with N = {sum(widths)} "
            f"for parts of {list(widths)} columns, got {list(y_TN.shape)}, {list(x_TK.shape)}, {list(a_SPK.shape)}, "
            f"{list(b_SNR.shape)} and {list(slots_T.shape)}"
        )
    dtype = x_TK.dtype
    if not dtype == y_TN.dtype == a_SPK.dtype == b_SNR.dtype or slots_T.dtype != torch.int32:
        raise ValueError(
            f"expected y, x, a and b of one dtype and slots of torch.int32, got {y_TN.dtype}, {dtype}, {a_SPK.dtype}, "
            f"{b_SNR.dtype} and {slots_T.dtype}"
        )
    strides = y_TN.stride(), x_TK.stride(), a_SPK.stride(), b_SNR.stride()
    if [stride[1:] for stride in strides] != [(1,), (1,), (inputs, 1), (rank, 1)]:
        raise ValueError(f"expected contiguous rows of y and x and adapters in a and b, got strides {strides}")
    if x_TK.is_cuda:
        from inflight_kernels import _lora_triton

        _lora_triton.add_lora(y_TN, x_TK, a_SPK, b_SNR, widths, slots_T, SMALL_TOKENS)
        return
    if _cpu.takes(x_TK, y_TN, a_SPK, b_SNR):
        ran = _cpu.call(
            "add_lora", y_TN, strides[0][0], x_TK, strides[1][0], a_SPK, strides[2][0], b_SNR, strides[3][0],
            dtype == torch.bfloat16, (ctypes.c_int64 * len(widths))(*widths), len(widths), rank, slots_T.contiguous(),
            tokens, adapters, inputs,
        )  # fmt: skip
        if ran:
            return
    add_lora_reference(y_TN, x_TK, a_SPK, b_SNR, widths, slots_T)


def add_lora_reference(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SPK: torch.Tensor,
    b_SNR: torch.Tensor,
    widths: Sequence[int],
    slots_T: torch.Tensor,
) -> None:
    """Compute the same in plain PyTorch, one adapter after another."""
    for slot in slots_T[slots_T >= 0].unique().tolist():
        rows = torch.nonzero(slots_T == slot)[:, 0]
        shrunk_tP = x_TK[rows].float() @ a_SPK[slot].float().T
        parts = zip(shrunk_tP.split(b_SNR.shape[2], 1), b_SNR[slot].float().split(list(widths)), strict=True)
        change_tN = torch.cat([shrunk_tR @ b_nR.T for shrunk_tR, b_nR in parts], 1)
        y_TN[rows] = (y_TN[rows] + change_tN).to(y_TN.dtype)
