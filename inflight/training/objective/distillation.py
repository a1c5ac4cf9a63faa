"""The divergence of the policy from a teacher, per drawn token, over the teacher's k likeliest tokens.

With k = 0 there is no divergence here: the drawn token's advantage grows by τ · log(π_teacher / π_θ) (`loss.py`).
n drawn tokens.
"""

from math import log1p
from typing import Literal

import torch

TeacherKL = Literal["reverse", "forward"]

LOGPROBS, TOP_IDS, TOP_LOGPROBS = "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"
"""Columns of rollouts and batches with the scores of a teacher: f32[T], log π_teacher of the token; i32[T, k], the k
likeliest tokens in its place; and f32[T, k], their log π_teacher."""
_LEAST_REST = 1e-6
"""Least probability of all other tokens together, so that its logarithm is finite."""


def top_k_kl(kind: TeacherKL, logprobs: torch.Tensor, teacher_logprobs: torch.Tensor) -> torch.Tensor:
    """Return divergences f[n], with gradient to `logprobs`, log π_θ f[n, k] of the teacher's k likeliest tokens, from
    these and log π_teacher f[n, k].

    All other tokens count as one more, with the remaining mass of each policy: q_k₊₁ = 1 − Σ q_i for q = π_θ, and p_k₊₁
    = 1 − Σ p_i for p = π_teacher. reverse: Σ_i q_i log(q_i / p_i). forward: Σ_i p_i log(p_i / q_i). Both sums run over
    these k + 1 tokens, so that each is a KL of two distributions: at least 0, and at most the KL over the whole
    vocabulary. Without the remaining mass the reverse sum falls when the policy moves its mass away from all k tokens.
    A token with log π_θ = −∞, which the policy cannot draw, counts among the others. The remaining masses are at least
    1e-6.

    The whole distribution after each prefix is compared. The drawn token does not appear, and needs no importance
    ratio: the gradient is exact for the prefixes that were drawn, whichever policy drew them.

    Sources: Agarwal et al., arXiv 2306.13649 (GKD), for both directions on the student's own answers; verl's pull
    request 7855 for the remaining mass of the forward KL; arXiv 2601.19897 (SDFT) for the reverse KL.
    """
    can_draw = logprobs > -torch.inf
    logs = logprobs.masked_fill(~can_draw, 0.0), teacher_logprobs.to(logprobs.dtype).masked_fill(~can_draw, 0.0)
    log_q, log_p = (torch.cat([of_k, _log_rest(of_k, can_draw)], -1) for of_k in logs)
    weights = log_q.exp() if kind == "reverse" else log_p.exp()
    counts = torch.cat([can_draw, can_draw.new_ones(len(can_draw), 1)], -1)
    terms = weights * (log_q - log_p if kind == "reverse" else log_p - log_q)
    return torch.where(counts, terms, 0.0).sum(-1)


def _log_rest(logs_nk: torch.Tensor, counts_nk: torch.Tensor) -> torch.Tensor:
    """Return log(1 − Σ exp(logs)) f[n, 1] over the logarithms that count, at least log(1e-6)."""
    log_sums = logs_nk.masked_fill(~counts_nk, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.log(-torch.expm1(log_sums.clamp(max=log1p(-_LEAST_REST))))
