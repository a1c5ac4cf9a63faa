"""The Triton kernel of `policy_loss`, one program per block of tokens.

A program writes its tokens' gradients and one row of sums, which PyTorch adds up; there is no atomic addition, so
results repeat. What makes a gradient is fp32, as in the reference. Sums are fp64, and so are ρ's statistics: in fp32
ρ² overflows from log ρ = 44 on, and ρ − 1 − log ρ cancels for the ratios next to 1 that one wants to know it of.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels.policy_loss import (
    CLIPPED_TOLERANCE,
    LOG_RATIO_BOUND,
    NUM_CLASSES,
    Correction,
    PolicyLossTerms,
    Surrogate,
    clip_bounds,
)

BLOCK: Any = 1024  # tokens
CONSTANTS: dict[str, Any] = {
    "LOG_BOUND": LOG_RATIO_BOUND,
    "TOLERANCE": CLIPPED_TOLERANCE,
    "CLASSES": NUM_CLASSES,
    "BLOCK": BLOCK,
}


@triton.jit
def clamped(x, low, high):
    """NaN stays NaN, as in PyTorch and unlike in `tl.clamp`."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def share_of_less(less, more):
    return tl.where(less < more, 1.0, tl.where(less == more, 0.5, 0.0))


@triton.jit(do_not_specialize=["num_tokens"])
def policy_loss_kernel(
    logprobs,
    behavior,
    proximal,
    advantages,
    weights,
    classes,
    gradients,
    losses,
    sums,
    num_tokens,
    low,
    high,
    floor,
    cap,
    dual,
    CORRECTION: tl.constexpr,
    SURROGATE: tl.constexpr,
    LOG_BOUND: tl.constexpr,
    TOLERANCE: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    tokens = program * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < num_tokens
    logprob = tl.load(logprobs + tokens, mask=mask, other=0.0)
    log_b = tl.load(behavior + tokens, mask=mask, other=0.0)
    log_p = tl.load(proximal + tokens, mask=mask, other=0.0)
    advantage = tl.load(advantages + tokens, mask=mask, other=0.0)
    weight = tl.load(weights + tokens, mask=mask, other=0.0)

    if CORRECTION == "none":
        open_c = tl.full((BLOCK,), 1.0, tl.float32)
        c = open_c
    else:
        open_c = tl.exp(clamped(log_p - log_b, -LOG_BOUND, LOG_BOUND))
        if CORRECTION == "truncate":
            c = clamped(open_c, low, high)
        else:
            c = tl.where((open_c >= low) & (open_c <= high), open_c, 0.0)

    if SURROGATE == "reinforce":
        slope = -advantage
        open_slope = slope
        loss = slope * logprob
    else:
        log_u = logprob - log_p
        u = tl.exp(clamped(log_u, -LOG_BOUND, LOG_BOUND))
        clipped_u = clamped(u, floor, cap)
        if SURROGATE == "cispo":
            slope = -clipped_u * advantage
            open_slope = -u * advantage
            loss = slope * logprob
        else:
            gain = u * advantage
            clipped_gain = clipped_u * advantage
            open_slope = tl.where(tl.abs(log_u) <= LOG_BOUND, -gain, 0.0)
            share = tl.where((u >= floor) & (u <= cap), 1.0, share_of_less(gain, clipped_gain))
            gain = tl.where(clipped_gain < gain, clipped_gain, gain)
            least = tl.where(advantage < 0, dual * advantage, float("-inf"))
            slope = open_slope * share * share_of_less(least, gain)
            loss = -tl.where(least > gain, least, gain)

    gradient = c * slope
    open_gradient = open_c * open_slope
    clipped = (tl.abs(gradient - open_gradient) > TOLERANCE * tl.abs(open_gradient)).to(tl.float64)
    tl.store(gradients + tokens, weight * gradient, mask=mask)
    tl.store(losses + program, tl.sum((weight * (c * loss)).to(tl.float64), 0))

    log_rho = (logprob - log_b).to(tl.float64)
    rho = tl.exp(log_rho)
    token_class = tl.load(classes + tokens, mask=mask, other=-1)
    for i in range(CLASSES):
        row = sums + (program * CLASSES + i) * 8
        member = token_class == i
        tl.store(row, tl.sum(member.to(tl.float64), 0))
        tl.store(row + 1, tl.sum(tl.where(member, rho, 0.0), 0))
        tl.store(row + 2, tl.sum(tl.where(member, rho * rho, 0.0), 0))
        tl.store(row + 3, tl.min(tl.where(member, rho, float("inf")), 0))
        tl.store(row + 4, tl.max(tl.where(member, rho, float("-inf")), 0))
        tl.store(row + 5, tl.sum(tl.where(member, rho - 1.0 - log_rho, 0.0), 0))
        tl.store(row + 6, tl.sum(tl.where(member, tl.abs(log_rho), 0.0), 0))
        tl.store(row + 7, tl.sum(tl.where(member, clipped, 0.0), 0))


@torch.no_grad()
def policy_loss_terms(
    logprobs: torch.Tensor,
    behavior: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    classes: torch.Tensor,
    *,
    correction: Correction,
    low: float,
    high: float,
    surrogate: Surrogate,
    clip_low: float,
    clip_high: float,
    dual: float,
) -> PolicyLossTerms:
    """For n > 0 and float32."""
    num_tokens = len(logprobs)
    programs = triton.cdiv(num_tokens, BLOCK)
    gradient = torch.empty(num_tokens, dtype=torch.float32, device=logprobs.device)
    losses_P = torch.empty(programs, dtype=torch.float64, device=logprobs.device)
    sums_PC8 = torch.empty(programs, NUM_CLASSES, 8, dtype=torch.float64, device=logprobs.device)
    floor, cap = clip_bounds(surrogate, clip_low, clip_high)
    constants: dict[str, Any] = CONSTANTS | {"CORRECTION": correction, "SURROGATE": surrogate}
    policy_loss_kernel[(programs,)](
        logprobs.contiguous(),
        behavior.contiguous(),
        proximal.contiguous(),
        advantages.contiguous(),
        weights.contiguous(),
        classes.contiguous(),
        gradient,
        losses_P,
        sums_PC8,
        num_tokens,
        float(low),
        float(high),
        float(floor),
        float(cap),
        float(dual),
        **constants,
    )
    sums_C8 = sums_PC8.sum(0)
    sums_C8[:, 3] = sums_PC8[:, :, 3].amin(0)
    sums_C8[:, 4] = sums_PC8[:, :, 4].amax(0)
    return PolicyLossTerms(losses_P.sum().float(), gradient, sums_C8)
