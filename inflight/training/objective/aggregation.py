"""Aggregation of token losses to one number: the weight of each token in the sum.

Weights are computed from the totals of a whole optimizer step, so that the losses of its micro-batches add up to its
loss.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

Aggregation = Literal["token", "sequence", "group", "constant"]


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The size of one optimizer step, counted over all of its micro-batches."""

    num_tokens: float
    """Number of drawn tokens."""
    num_sequences: float
    """Number of samples. The token sequences of an episode are one sample."""
    group_tokens: torch.Tensor
    """i64[G], drawn tokens of each group of samples of one prompt."""
    num_groups: float | None = None
    """Number of groups if it is not G, such as when groups outside of the batch count, too."""

    def across_ranks(self, group: dist.ProcessGroup | None = None) -> "StepTotals":
        """Return totals for trainers that average gradients over the ranks of a group, each with different groups of
        samples: the average of the ranks' losses is the loss of all their tokens together. A collective call."""
        own = [self.num_tokens, self.num_sequences, self.num_groups or len(self.group_tokens)]
        sums = torch.tensor(own, dtype=torch.float64, device=self.group_tokens.device)
        dist.all_reduce(sums, group=group)
        tokens, sequences, groups = (sums / dist.get_world_size(group)).tolist()
        return StepTotals(tokens, sequences, self.group_tokens, groups)


def divisor(kind: Aggregation, totals: StepTotals) -> float:
    """Return N, the number of tokens, sequences or groups that divides all weights of `token_weights`. The N of a step
    is the sum over its parts; the rest of a weight depends only on the token's own group."""
    if kind == "token":
        return totals.num_tokens
    if kind == "group":
        return totals.num_groups or len(totals.group_tokens)
    return totals.num_sequences


def token_weights(
    kind: Aggregation,
    lengths: torch.Tensor,
    groups: torch.Tensor,
    totals: StepTotals,
    *,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """Return the weight of every token of a sequence, f64[S], from the drawn tokens of its sample i64[S] and its group
    i64[S].

    token: 1 / N tokens of the step, as in DAPO (arXiv 2503.14476, eq. 8). sequence: 1 / (S · length), the mean over
    sequences of their means, as in GRPO (arXiv 2402.03300, eq. 3). group: 1 / (G · tokens of the group), the mean over
    prompts of the means over their tokens. constant: 1 / (S · max_tokens), independent of the length. It removes the
    bias towards short right and long wrong answers (Dr. GRPO, arXiv 2503.20783, §3.1); it needs `max_tokens`, the
    length that the generator allows.
    """
    whole = divisor(kind, totals)
    if kind == "token":
        return torch.full_like(lengths, 1 / max(whole, 1), dtype=torch.float64)
    if kind == "sequence":
        return 1 / (whole * lengths.clamp(min=1).double())
    if kind == "group":
        return 1 / (whole * totals.group_tokens[groups].clamp(min=1).double())
    assert max_tokens, "Objective refuses other settings"
    return torch.full_like(lengths, 1 / (whole * max_tokens), dtype=torch.float64)
