"""How old the tokens were, in milliseconds. The names are defined here and used everywhere.

| name | per token |
|---|---|
| weight_lag_ms | time drawn − time at which a newer version than the token's was first published; 0 if none was |
| policy_age_ms | time drawn − time at which the token's version was published |
| token_age_ms | time consumed by an optimizer step − time drawn |
| version_lag | the trainer's version when consumed − the token's version |

and per swap: swap_ms, `publish()` called → first token drawn with that version; stall_ms, time in which the engine had
work and ran no forward because of the swap. All times are CLOCK_MONOTONIC of one machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inflight.core.clock import NS_PER_MS, now_ns
from inflight.core.frames import TokenFrame


@dataclass(frozen=True, slots=True)
class TokenStaleness:
    """Columns over the tokens of a batch, f64[n] in milliseconds; version_lag i64[n]."""

    weight_lag_ms: np.ndarray
    policy_age_ms: np.ndarray
    token_age_ms: np.ndarray
    version_lag: np.ndarray


@dataclass(slots=True)
class Swap:
    """One change of weights in the engine."""

    version: int
    stall_ms: float
    num_in_flight: int
    """Requests that had drawn tokens under older weights and went on."""
    swap_ms: float | None = None
    """None until the first token of the version was drawn."""


class StalenessMeter:
    """Learns of publishes and frames, and measures tokens and swaps against them.

    Version 0, the weights that the engine was launched with, counts as published when the meter was made.
    """

    def __init__(self) -> None:
        self._versions = [0]
        self._published_ns = [now_ns()]
        self._switch_published_ns = 0
        self.swaps: list[Swap] = []
        self.records: list[TokenStaleness] = []

    @property
    def newest_version(self) -> int:
        """The last version that was published: the trainer's own, between two optimizer steps."""
        return self._versions[-1]

    def published(self, version: int, called_ns: int) -> None:
        """`publish()` was called for this version; versions rise."""
        self._versions.append(version)
        self._published_ns.append(called_ns)

    def frame(self, frame: TokenFrame) -> None:
        """Note the swap that a frame reports, and the first token drawn after it."""
        header = frame.header
        if header.switch is not None:
            self.swaps.append(
                Swap(header.switch.version, header.switch.stall_ns / NS_PER_MS, header.switch.num_in_flight)
            )
            self._switch_published_ns = header.switch.published_ns
        if header.num_tokens and self.swaps and self.swaps[-1].swap_ms is None:
            self.swaps[-1].swap_ms = (header.time_ns - self._switch_published_ns) / NS_PER_MS

    def consume(
        self, weight_versions: np.ndarray, sampled_at_ns: np.ndarray, *, consumed_ns: int, trainer_version: int
    ) -> TokenStaleness:
        """Measure and keep the tokens of one optimizer step. Both columns are i64[n] over drawn tokens."""
        versions, published = np.array(self._versions), np.array(self._published_ns)
        own = np.searchsorted(versions, weight_versions, side="right") - 1
        newer = own + 1
        has_newer = newer < len(versions)
        newer_ns = np.where(has_newer, published[np.minimum(newer, len(versions) - 1)], sampled_at_ns)
        staleness = TokenStaleness(
            weight_lag_ms=np.maximum(sampled_at_ns - newer_ns, 0) / NS_PER_MS,
            policy_age_ms=(sampled_at_ns - published[own]) / NS_PER_MS,
            token_age_ms=(consumed_ns - sampled_at_ns) / NS_PER_MS,
            version_lag=trainer_version - weight_versions,
        )
        self.records.append(staleness)
        return staleness

    def summary(self) -> dict[str, dict[str, float]]:
        """{name: {p50, p90, p99}} over all consumed tokens and all swaps; version_lag as {p50, max}."""
        out = {}
        for name in ("weight_lag_ms", "token_age_ms", "policy_age_ms"):
            out[name] = percentiles(np.concatenate([getattr(r, name) for r in self.records] or [np.empty(0)]))
        out["swap_ms"] = percentiles([s.swap_ms for s in self.swaps if s.swap_ms is not None])
        out["stall_ms"] = percentiles([s.stall_ms for s in self.swaps])
        lags = np.concatenate([r.version_lag for r in self.records] or [np.zeros(0)])
        out["version_lag"] = {"p50": float(np.median(lags)), "max": float(lags.max())} if len(lags) else {}
        return out


def percentiles(values: Sequence[float] | np.ndarray, points: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """{"p50": …, "p90": …, "p99": …}; empty if there are no values."""
    if len(values) == 0:
        return {}
    return {f"p{point}": float(np.percentile(values, point)) for point in points}
