"""Log-probability of one chosen token per row at a temperature per row, without a second [N, V] tensor.

log p = z[a] / τ − logsumexp(z / τ).  Forward reads the logits once (running maximum and sum, as in Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"); backward writes (1[a] − p) · g / τ in one pass.
N rows, V vocabulary.
"""

import torch


def selective_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Compute from logits [N, V] of any float dtype, tokens i64[N], temperatures f32[N] → log-probabilities f32[N],
    with gradient to the logits. Raises ValueError if the shapes do not fit."""
    if logits.ndim != 2 or tokens.shape != logits.shape[:1] or temperatures.shape != logits.shape[:1]:
        raise ValueError(
            f"expected logits [N, V], tokens [N] and temperatures [N], got {list(logits.shape)}, "
            f"{list(tokens.shape)} and {list(temperatures.shape)}"
        )
    if logits.is_cuda:
        from inflight_kernels._selective_logprob_triton import SelectiveLogprobs

        return SelectiveLogprobs.apply(logits, tokens, temperatures)
    return selective_logprobs_reference(logits, tokens, temperatures)


def selective_logprobs_reference(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    scaled_NV = logits.float() / temperatures[:, None]
    return scaled_NV.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(scaled_NV, -1)
