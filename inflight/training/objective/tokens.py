"""The drawn tokens of a batch as inputs of formulas: one entry per token, without prompts."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from inflight.training.data.batch import PackedBatch

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
    batch: PackedBatch | None = None
    """The batch of the tokens; None in the call without tokens that checks bounds."""
    rows: torch.Tensor | None = None
    """i64[n], the place of each token in the columns of the batch."""
    entropies: torch.Tensor | None = None
    """f[n], the entropy of the trainer's distribution that each token is drawn from, in nats and without gradient. None
    unless a part of the objective is declared by `bounds.needs_entropies`, or the objective has an entropy bonus."""

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

    def column(self, name: str) -> torch.Tensor:
        """Return the values [n] of a column of the batch: one that the rollouts recorded (`PackedBatch.columns`), or a
        field with one entry per token, such as "weight_versions", "sampled_at_ns", "input_ids", "position_ids" or
        "reference_logprobs". Raises ValueError for a column that the batch lacks."""
        if self.batch is None or self.rows is None:
            return torch.zeros_like(self.sequences)
        values = self.batch.columns.get(name, getattr(self.batch, name, None))
        if not isinstance(values, torch.Tensor) or len(values) != len(self.batch.input_ids):
            recorded = ", ".join(self.batch.columns) or "none"
            raise ValueError(f"the batch has no column {name!r} of one value per token; recorded columns: {recorded}")
        return values[self.rows]

    @cached_property
    def lags(self) -> torch.Tensor:
        """i64[n], how many versions older than the trainer's weights the weights are that drew each token; at least 0.
        Only versions that changed the adapter that drew the token count.
        Raises ValueError if the batch has no trainer_version."""
        return self.column("version_lags").clamp(min=0)

    @cached_property
    def ages_ms(self) -> torch.Tensor:
        """f64[n], milliseconds from the draw of each token to the moment when the trainer had the batch. Raises
        ValueError for a batch without `taken_ns`. `grpo` and `stream.batches` set it."""
        taken_ns = 1 if self.batch is None else self.batch.taken_ns
        if not taken_ns:
            raise ValueError("ages need batch.taken_ns, the time at which the trainer had the batch")
        return (taken_ns - self.column("sampled_at_ns")).double() / 1e6

    @cached_property
    def groups(self) -> torch.Tensor:
        """i64[n], the prompt of each token's sequence, as in `PackedBatch.groups`."""
        return self.sequences if self.batch is None else self.batch.groups[self.sequences]

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
