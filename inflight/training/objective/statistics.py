"""Statistics of the importance ratios of a batch, by two causes.

The ratio of a drawn token is ρ = π_θ / π_b. Tokens that the trainer's own version drew differ from 1 by *mismatch*
alone: engine and trainer compute the same probability with other numerics (Yao et al. 2025). Older tokens differ by
*staleness* as well. Everything is kept as sums, so that micro-batches add up. Sums of ratios are relative to the
largest one: the ratio of a long sequence can be e⁻⁴⁰⁰ or e⁴⁰⁰, and a float64 cannot hold its square.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, isnan, nan
from typing import Any

import torch

LARGEST_LOG = 690.0
"""Bound of reported means, maxima and KLs, as a logarithm, so that they are finite."""


@dataclass(frozen=True, slots=True)
class RatioStats:
    """The ratios ρ of some tokens, or of sequences, each counted as one token. Logarithms are natural. Means are NaN if
    there are none."""

    num_tokens: int = 0
    scaled_sum: float = 0.0
    """Σρ / ρ_max, with ρ_max the largest ratio."""
    scaled_squares: float = 0.0
    """Σρ² / ρ_max²"""
    min_log: float = inf
    max_log: float = -inf
    """log ρ_max"""
    sum_kl: float = 0.0
    """Σ(ρ − 1 − log ρ)"""
    sum_abs_log: float = 0.0

    @property
    def mean(self) -> float:
        """Mean ρ. Its expectation is 1; another value indicates that the trainer defines log π differently."""
        return self.max * (self.scaled_sum / self.num_tokens) if self.num_tokens else nan

    @property
    def ess(self) -> float:
        """Effective sample size (Σρ)² / (n Σρ²), in (0, 1]; 1 when the data is on-policy (Kong 1992)."""
        return self.scaled_sum**2 / (self.num_tokens * self.scaled_squares) if self.num_tokens else nan

    @property
    def min(self) -> float:
        """The smallest ρ."""
        return exp(min(self.min_log, LARGEST_LOG)) if self.num_tokens else nan

    @property
    def max(self) -> float:
        """The largest ρ."""
        return exp(min(self.max_log, LARGEST_LOG)) if self.num_tokens else nan

    @property
    def kl(self) -> float:
        """KL(π_b ‖ π_θ) by the k3 estimator, ρ − 1 − log ρ (Schulman, "Approximating KL divergence", 2020)."""
        return self.sum_kl / self.num_tokens if self.num_tokens else nan

    @property
    def logprob_diff(self) -> float:
        """Mean |log π_θ − log π_b|."""
        return self.sum_abs_log / self.num_tokens if self.num_tokens else nan

    def as_dict(self, name: str) -> dict[str, float]:
        """Return the numbers as "{name}/mean" and so on, or nothing without tokens."""
        if not self.num_tokens:
            return {}
        names = ("num_tokens", "mean", "ess", "min", "max", "kl", "logprob_diff")
        return known({f"{name}/{key}": getattr(self, key) for key in names})

    def __add__(self, other: "RatioStats") -> "RatioStats":
        largest = max(self.max_log, other.max_log)
        scales = [exp(of.max_log - largest) if of.num_tokens else 0.0 for of in (self, other)]
        return RatioStats(
            num_tokens=self.num_tokens + other.num_tokens,
            scaled_sum=self.scaled_sum * scales[0] + other.scaled_sum * scales[1],
            scaled_squares=self.scaled_squares * scales[0] ** 2 + other.scaled_squares * scales[1] ** 2,
            min_log=min(self.min_log, other.min_log),
            max_log=largest,
            sum_kl=self.sum_kl + other.sum_kl,
            sum_abs_log=self.sum_abs_log + other.sum_abs_log,
        )

    @classmethod
    def of(cls, log_ratios: torch.Tensor) -> "RatioStats":
        """Compute the statistics of log ρ f[n]."""
        return cls.from_sums(ratio_sums(log_ratios, torch.zeros_like(log_ratios, dtype=torch.int64))[0].tolist())

    @classmethod
    def from_sums(cls, row: list[float]) -> "RatioStats":
        """Compute the statistics of a class from its row of `ratio_sums`."""
        return cls(int(row[0]), *row[1:]) if row[0] else cls()


@dataclass(frozen=True, slots=True)
class LossStats:
    """Statistics of the loss of one optimizer step, or of the sum of its micro-batches."""

    loss: float
    ratios: RatioStats
    """Ratios of the drawn tokens that take part in the loss."""
    mismatch: RatioStats
    """Ratios of the tokens that the trainer's present weights drew; none if the batch has no trainer_version. With
    several optimizer steps on a batch it contains their drift."""
    stale: RatioStats
    """Ratios of the tokens that older weights drew: older versions, and the last version if the trainer has taken
    optimizer steps since its publish."""
    num_clipped: int | None
    """Tokens with an advantage that were truncated, clipped or left out. None if the objective clips softly,
    or does not declare how it clips (`Objective.clips`)."""
    sum_entropy: float | None = None
    """None unless the objective needs entropies. `score_tokens(entropy=True)` returns entropies in any case."""
    sum_reference_kl: float | None = None
    """None without a KL penalty."""
    sum_teacher_kl: float | None = None
    """None without a teacher. Sum of ρ · log(π_θ / π_teacher) of the drawn tokens, an estimate of KL(π_θ ‖ π_teacher);
    with teacher_top_k of the divergences."""
    sequences: RatioStats = RatioStats()
    """Products of the ratios of a sequence's tokens in the loss, for sequences with an advantage alone, so that the
    effective sample size does not depend on skipped groups of equal rewards."""

    @property
    def num_tokens(self) -> int:
        return self.ratios.num_tokens

    @property
    def ess(self) -> float:
        return self.ratios.ess

    @property
    def kl(self) -> float:
        return self.ratios.kl

    @property
    def clipped(self) -> float | None:
        """`num_clipped` as a share of tokens."""
        return None if self.num_clipped is None else self.num_clipped / max(self.num_tokens, 1)

    @property
    def entropy(self) -> float | None:
        """Mean over tokens, in nats; None without an entropy bonus."""
        return None if self.sum_entropy is None else self.sum_entropy / max(self.num_tokens, 1)

    @property
    def reference_kl(self) -> float | None:
        """Mean over tokens; None without a KL penalty."""
        return None if self.sum_reference_kl is None else self.sum_reference_kl / max(self.num_tokens, 1)

    @property
    def teacher_kl(self) -> float | None:
        """Mean over tokens; None without a teacher."""
        return None if self.sum_teacher_kl is None else self.sum_teacher_kl / max(self.num_tokens, 1)

    def __add__(self, other: "LossStats") -> "LossStats":
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        sums: list[Any] = [None if a is None or b is None else a + b for a, b in pairs]
        return LossStats(*sums)

    def as_dict(self) -> dict[str, float]:
        """Return all statistics as numbers under flat names, for any logger: "loss", "num_tokens", "clipped",
        "entropy", "reference_kl", "teacher_kl", "sequence/ess", and `RatioStats.as_dict` of "ratio" (all tokens),
        "mismatch" and "stale". Values of None or NaN are left out."""
        names = ("loss", "num_tokens", "clipped", "entropy", "reference_kl", "teacher_kl")
        numbers: dict[str, float | None] = {name: getattr(self, name) for name in names}
        for name, of_tokens in (("ratio", self.ratios), ("mismatch", self.mismatch), ("stale", self.stale)):
            numbers |= of_tokens.as_dict(name)
        return known(numbers | {"sequence/ess": self.sequences.ess})


def known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Return the numbers that are neither None nor NaN."""
    return {name: number for name, number in numbers.items() if number is not None and not isnan(number)}


def ratio_sums(log_ratios: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return sums f64[3, 7] over the tokens of each class, from log ρ f[n] and classes i64[n] from 0 to 2.

    The columns are the fields of `RatioStats`. In float32 ρ − 1 − log ρ would cancel for ratios next to 1.
    """
    logs = log_ratios.double()
    least = logs.new_full((3,), inf).scatter_reduce(0, classes, logs, "amin")
    most = logs.new_full((3,), -inf).scatter_reduce(0, classes, logs, "amax")
    scaled = (logs - most[classes]).exp()
    kl = torch.expm1(logs.clamp(max=LARGEST_LOG)) - logs
    columns = [torch.ones_like(logs), scaled, scaled.square(), kl, logs.abs()]
    sums = logs.new_zeros(3, len(columns)).index_add(0, classes, torch.stack(columns, 1))
    return torch.cat([sums[:, :3], least[:, None], most[:, None], sums[:, 3:]], 1)
