"""The drawn tokens of a batch as inputs of formulas: one entry per token, without prompts."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

Proximal = Literal["current", "behavior", "recomputed", "loglinear"]

LOG_RATIO_BOUND = 20.0


def exp_ratio(log_ratios: torch.Tensor) -> torch.Tensor:
    """Return ratios f[n] of log-ratios f[n], which are clamped to ±20 so that ratios are finite (as verl does)."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True, kw_only=True)
class DrawnTokens:
    """n drawn tokens of S sequences. π_θ is the trainer's policy, π_b the policy that drew the token, and π_p the
    proximal policy of trust regions (Hilton et al. 2021, arXiv 2110.00641)."""

    logprobs: torch.Tensor
    """f[n], log π_θ, with gradient."""
    behavior: torch.Tensor
    """f[n], log π_b as recorded."""
    proximal: torch.Tensor
    """f[n], log π_p, without gradient."""
    advantages: torch.Tensor
    """f[n]"""
    sequences: torch.Tensor
    """i64[n], the sequence of each token, in ascending order."""
    num_sequences: int
    proximal_policy: Proximal = "recomputed"
    """The kind of π_p. current: u = π_θ / π_p is always 1, so that bounds on u have no effect. behavior: w = π_p / π_b
    is always 1, so that bounds on w have no effect."""

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
        """Return sums f[S] over each sequence of values f[n]."""
        return values.new_zeros(self.num_sequences).index_add(0, self.sequences, values)

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Return means f[S] over each sequence of values f[n]; 0 for a sequence without drawn tokens."""
        return self.sequence_sums(values) / self.lengths.clamp(min=1)
