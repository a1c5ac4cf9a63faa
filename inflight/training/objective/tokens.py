"""The drawn tokens of a batch as formulas see them: one entry per token, prompts left out."""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from inflight_kernels.policy_loss import exp_ratio

__all__ = ["NO_TOKENS", "DrawnTokens", "check_interval", "exp_ratio"]


def check_interval(**bounds: float) -> None:
    """Raises ValueError, naming the two bounds, if no ratio of probabilities can lie between them: a batch would then
    train on nothing."""
    (low_name, low), (high_name, high) = bounds.items()
    if not (low <= high and low < inf and high > 0):
        raise ValueError(
            f"{low_name} {low} and {high_name} {high} leave no ratio between them; expected {low_name} ≤ {high_name}, "
            f"{low_name} finite and {high_name} above 0"
        )


@dataclass(frozen=True, kw_only=True)
class DrawnTokens:
    """n drawn tokens of S sequences in G groups. π_θ is the trainer's policy, π_b the one that drew the token, and π_p
    the proximal one, which trust regions are about (Hilton et al. 2021, arXiv 2110.00641)."""

    logprobs: torch.Tensor
    """f[n], log π_θ, with gradient."""
    behavior: torch.Tensor
    """f[n], log π_b as recorded."""
    proximal: torch.Tensor
    """f[n], log π_p, without gradient."""
    advantages: torch.Tensor
    """f[n]"""
    sequences: torch.Tensor
    """i64[n], the sequence that each token belongs to, rising."""
    num_sequences: int

    @cached_property
    def log_ratios(self) -> torch.Tensor:
        """f[n], log u = log π_θ − log π_p, with gradient."""
        return self.logprobs - self.proximal

    @cached_property
    def log_weights(self) -> torch.Tensor:
        """f[n], log w = log π_p − log π_b, without gradient."""
        return self.proximal - self.behavior

    @cached_property
    def log_behavior_ratios(self) -> torch.Tensor:
        """f[n], log ρ = log π_θ − log π_b, without gradient."""
        return self.logprobs.detach() - self.behavior

    @cached_property
    def lengths(self) -> torch.Tensor:
        """i64[S], drawn tokens of each sequence."""
        ones = torch.ones_like(self.sequences)
        return ones.new_zeros(self.num_sequences).index_add(0, self.sequences, ones)

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """f[n] → f[S]"""
        return values.new_zeros(self.num_sequences).index_add(0, self.sequences, values)

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """f[n] → f[S]; 0 for a sequence without drawn tokens."""
        return self.sequence_sums(values) / self.lengths.clamp(min=1)


_NONE, _NOWHERE = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
NO_TOKENS = DrawnTokens(
    logprobs=_NONE, behavior=_NONE, proximal=_NONE, advantages=_NONE, sequences=_NOWHERE, num_sequences=0
)
"""To try a formula on: whether its bounds make sense is told before there is data."""
