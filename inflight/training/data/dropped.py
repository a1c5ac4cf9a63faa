"""What was left out of batches, and why: the one record that the stream, `grpo`, logs and files share."""

from dataclasses import asdict, dataclass, fields
from math import isnan, nan


@dataclass(slots=True)
class Dropped:
    """Counts of what was left out. Two records add up to one: `a + b`."""

    num_failed_groups: int = 0
    """Groups of which a sample was cancelled or ended with an error."""
    num_unscored_groups: int = 0
    """Groups of which no sample has a reward."""
    num_unscored_rollouts: int = 0
    """Rollouts that have no reward: it was None, not finite, or took too long. Those of unscored groups are among
    them, those of failed groups are not."""
    num_uniform_groups: int = 0
    """Groups of equal rewards, which were left out of the forward pass and still count in what the loss is averaged
    over."""
    num_stale_rollouts: int = 0
    """Rollouts that staleness rules rejected."""
    num_stale_tokens: int = 0
    """Tokens that have no part in the loss because they are too old: masked ones, and all of rejected rollouts."""
    num_masked_tokens: int = 0
    """The stale tokens that stayed in the batch."""
    num_rollouts: int = 0
    """Rollouts to which the staleness rules were applied, old or not."""
    num_tokens: int = 0
    """Tokens of these rollouts."""
    sum_lengths: int = 0
    """The sum over these tokens of the length of the rollout that each belongs to."""
    sum_kept_lengths: int = 0
    """The same sum over the tokens that are not stale."""

    @property
    def num_unusable_groups(self) -> int:
        """Groups of which nothing can be trained on: failed or unscored."""
        return self.num_failed_groups + self.num_unscored_groups

    @property
    def stale_share(self) -> float:
        """Share of the tokens that are stale; NaN if there are no tokens."""
        return self.num_stale_tokens / self.num_tokens if self.num_tokens else nan

    @property
    def length_bias(self) -> float:
        """Mean length of the rollout that a token belongs to, over the tokens that are not stale, as a share of that
        over all tokens: below 1, short rollouts are favoured. NaN if all tokens are stale."""
        num_kept = self.num_tokens - self.num_stale_tokens
        return (self.sum_kept_lengths / num_kept) / (self.sum_lengths / self.num_tokens) if num_kept else nan

    def __add__(self, other: "Dropped") -> "Dropped":
        return Dropped(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __str__(self) -> str:
        return (
            f"{self.num_failed_groups:,} groups failed, {self.num_unscored_groups:,} groups and "
            f"{self.num_unscored_rollouts:,} rollouts had no reward, {self.num_uniform_groups:,} groups had equal "
            f"rewards, {self.stale_share:.1%} of {self.num_tokens:,} tokens were too old "
            f"({self.num_masked_tokens:,} masked, {self.num_stale_rollouts:,} of {self.num_rollouts:,} rollouts "
            f"rejected; length bias {self.length_bias:.3f})"
        )

    def as_dict(self) -> dict[str, float]:
        """The counts, the share of stale tokens and the length bias, under their names; what is NaN is left out."""
        numbers = asdict(self) | {"stale_share": self.stale_share, "length_bias": self.length_bias}
        return {name: number for name, number in numbers.items() if name[:4] != "sum_" and not isnan(number)}
