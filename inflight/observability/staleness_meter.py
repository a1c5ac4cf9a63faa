"""Measures how old the tokens were, and the delay and the stall of each swap (docs/staleness.md defines the measures).

For the tokens of an adapter, only versions that changed this adapter count, and only steps that changed it.
"""

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from types import MappingProxyType
from typing import Protocol

import numpy as np

from inflight.core.clock import NS_PER_MS, now_ns
from inflight.core.frames import Swap, TokenFrame


@dataclass(frozen=True, slots=True)
class TokenStaleness:
    """Holds columns over the tokens of a batch, f64[n] in milliseconds; version_lag i64[n]."""

    weight_lag_ms: np.ndarray
    policy_age_ms: np.ndarray
    token_age_ms: np.ndarray
    version_lag: np.ndarray
    group_wait_ms: np.ndarray
    """Part of `token_age_ms` in which the token's whole group had been drawn and waited for the trainer's step."""

    @property
    def age_over_bound(self) -> float:
        """Mean age of the tokens, divided by the smallest mean that starting groups later could have reached with the
        same steps: each group would have ended exactly when the trainer began (docs/staleness.md#a-lower-bound)."""
        bound = self.token_age_ms.mean() - self.group_wait_ms.mean()
        return float(self.token_age_ms.mean() / bound) if bound > 0 else nan


class StalenessListener(Protocol):
    """Receives the events of a meter, in the thread that reports to the meter. Calls must be short. Subclasses ignore
    the events that they do not define."""

    def published(self, version: int, called_ns: int) -> None:
        """`publish()` was called for this version at this time."""

    def drawn(self, version: int, num_tokens: int) -> None:
        """A forward pass drew this many tokens."""

    def swapped(self, version: int, swap_ms: float, stall_ms: float) -> None:
        """The first token with this version arrived."""

    def taken(self, weight_versions: np.ndarray, in_loss: np.ndarray) -> None:
        """The trainer took tokens out of the stream. The versions i64[n] drew them. in_loss i64[m]: versions of the
        tokens that are in the loss of its batch; the other tokens are left out."""

    def consumed(self, weight_versions: np.ndarray, staleness: TokenStaleness, in_loss: np.ndarray) -> None:
        """An optimizer step consumed tokens that these versions i64[n] drew. in_loss bool[n]: True for tokens in the
        loss."""


class Histogram:
    """Counts of non-negative values in buckets 1 % apart: percentiles of any number of values in constant memory."""

    _LEAST = 1e-4
    _LOG_STEP = np.log(1.01)

    def __init__(self) -> None:
        self._counts = np.zeros(3200, np.int64)  # up to 1e-4 · 1.01^3199 ≈ 6.6e9; bucket 0 contains values below 1e-4

    def add(self, values: np.ndarray | Sequence[float]) -> None:
        clipped = np.maximum(np.asarray(values, np.float64), self._LEAST)
        buckets = np.ceil(np.log(clipped / self._LEAST) / self._LOG_STEP).astype(np.int64)
        self._counts += np.bincount(np.minimum(buckets, len(self._counts) - 1), minlength=len(self._counts))

    def percentiles(self) -> dict[str, float]:
        """Return {"p50": …, "p90": …, "p99": …}, each at most 1 % too high; empty without values."""
        total = int(self._counts.sum())
        if not total:
            return {}
        ranks = np.searchsorted(np.cumsum(self._counts), np.array([0.5, 0.9, 0.99]) * total)
        values = np.where(ranks == 0, 0.0, self._LEAST * np.exp(ranks * self._LOG_STEP))
        return {f"p{point}": float(f"{value:.4g}") for point, value in zip((50, 90, 99), values, strict=True)}


class StalenessMeter:
    """Receives publishes and frames, and measures tokens and swaps by them, in constant memory. Safe to use from
    several threads at once.

    Version 0, the weights that the engine was launched with, is treated as published when the meter was made.
    """

    _REMEMBERED_VERSIONS = 4096

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._published: deque[tuple[int, int]] = deque([(0, now_ns())], maxlen=self._REMEMBERED_VERSIONS)
        self._changes: dict[int, frozenset[str]] = {}
        """Maps the remembered versions that changed some adapters alone to these adapters."""
        self._histograms = {
            name: Histogram() for name in ("weight_lag_ms", "token_age_ms", "policy_age_ms", "swap_ms", "stall_ms")
        }
        self._version_lags: Counter[int] = Counter()
        self._swaps: dict[str, Swap] = {}
        """Maps engines to their newest swap, until a token that the engine drew with its version has arrived."""
        self.listener: StalenessListener | None = None
        self.num_swaps = 0
        self.num_swaps_in_flight = 0
        """Number of swaps during which requests with tokens from older weights continued."""
        self.last_swap_ms: float | None = None
        self._trainer_version = 0
        self.unpublished_steps = 0
        """Optimizer steps of the trainer since the last publish."""
        self._stepped = frozenset[str]()
        """The adapters that these steps changed; empty: they changed everything."""

    @property
    def trainer_version(self) -> int:
        """Version of the trainer's weights: the last published one, or the next one if the optimizer has taken steps
        since. A publisher that delays versions sets it to the delayed version."""
        return self._trainer_version + (self.unpublished_steps > 0)

    @trainer_version.setter
    def trainer_version(self, version: int) -> None:
        self._trainer_version, self.unpublished_steps, self._stepped = version, 0, frozenset()

    @property
    def published_version(self) -> int:
        """The last version that was published."""
        return self._published[-1][0]

    def history(self, version: int) -> tuple[list[tuple[int, int]], dict[int, list[str]]]:
        """Return the remembered versions, each with its publish time, and the adapters of the versions that changed
        some adapters alone. If `version` is later than all of these, the trainer's weights are the weights of this
        version, published now."""
        with self._lock:
            times, changes = list(self._published), dict(self._changes)
            if version > self.published_version:
                times.append((version, now_ns()))
                changes |= {version: self._stepped} if self._stepped else {}
            return times, {number: sorted(adapters) for number, adapters in changes.items()}

    def restore(
        self, published: Sequence[tuple[int, int]], changes: Mapping[int, Collection[str]] = MappingProxyType({})
    ) -> None:
        """Restore versions from this process or an earlier one, as `history` returns them."""
        with self._lock:
            self._published = deque(published, maxlen=self._REMEMBERED_VERSIONS)
            self._changes = {version: frozenset(adapters) for version, adapters in changes.items()}

    def published(self, version: int, called_ns: int, adapters: Collection[str] = ()) -> None:
        """Note that `publish()` was called for this version. A publisher that replaces a dead one can continue from a
        lower number. The versions that the dead one announced and that were never drawn are then forgotten. adapters:
        the adapters that the version changes; empty: it changes everything."""
        with self._lock:
            while self._published and self._published[-1][0] >= version:
                self._published.pop()
            self._published.append((version, called_ns))
            oldest = self._published[0][0]
            self._changes = {number: names for number, names in self._changes.items() if oldest <= number < version}
            if adapters:
                self._changes[version] = frozenset(adapters)
            self.trainer_version = version
            if (listener := self.listener) is not None:
                listener.published(version, called_ns)

    def stepped(self, unpublished_steps: int, adapters: Collection[str] = ()) -> None:
        """Note optimizer steps since the last publish. A publisher reports the steps of `torch.optim` optimizers that
        hold its parameters; a trainer with another kind of optimizer calls it itself. adapters: the adapters that the
        steps changed; empty: they changed everything."""
        with self._lock:
            self.unpublished_steps, self._stepped = unpublished_steps, frozenset(adapters)

    def foreign_versions(self, adapter: str | None, weight_versions: np.ndarray) -> np.ndarray:
        """Return i64[n], the number of versions between these versions i64[n] and `trainer_version` that did not change
        the adapter; for None, the weights alone. It is positive for versions of other adapters alone."""
        with self._lock:
            foreign = np.array([v for v, names in self._changes.items() if adapter not in names], np.int64)
            not_stepped = bool(self.unpublished_steps and self._stepped and adapter not in self._stepped)
            upto = np.searchsorted(foreign, self._trainer_version, side="right") + not_stepped
        return upto - np.searchsorted(foreign, weight_versions, side="right")

    def frame(self, frame: TokenFrame) -> None:
        """Note the swap that a frame reports, and the first token drawn after it."""
        header = frame.header
        with self._lock:
            if header.swap is not None:
                self.num_swaps += 1
                self.num_swaps_in_flight += header.swap.num_in_flight > 0
                self._histograms["stall_ms"].add([header.swap.stall_ns / NS_PER_MS])
                self._swaps[header.engine_id] = header.swap
            if not header.num_tokens:
                return
            swap = self._swaps.get(header.engine_id)
            if swap is not None and header.version < swap.version:  # a pass for prompts of an older version
                swap = None
            if swap is not None:
                del self._swaps[header.engine_id]
                self.last_swap_ms = (header.time_ns - swap.published_ns) / NS_PER_MS
                self._histograms["swap_ms"].add([self.last_swap_ms])
            if (listener := self.listener) is not None:
                listener.drawn(header.version, header.num_tokens)
                if swap is not None and self.last_swap_ms is not None:
                    listener.swapped(swap.version, self.last_swap_ms, swap.stall_ns / NS_PER_MS)

    def consume(
        self,
        weight_versions: np.ndarray,
        sampled_at_ns: np.ndarray,
        *,
        consumed_ns: int,
        trainer_version: int,
        in_loss: np.ndarray | None = None,
        group_wait_ns: np.ndarray | None = None,
        version_lag: np.ndarray | None = None,
        adapters: np.ndarray | None = None,
    ) -> TokenStaleness:
        """Measure the tokens of one optimizer step. All columns are i64[n] over drawn tokens. in_loss: bool[n], True
        for tokens in the loss; None: all. The other tokens are measured, too. group_wait_ns: as in
        `TokenStaleness.group_wait_ms`; None: 0. version_lag: None if every version changed the policy of every token.
        adapters: object[n], the adapter that drew each token, or None; None: no adapter drew any."""
        own_ns, newer_ns = np.zeros_like(sampled_at_ns), np.zeros_like(sampled_at_ns)
        with self._lock:
            names = {None} if adapters is None or not self._changes else set(adapters)
            clocks = {name: _clock(self._published, self._changes, name) for name in names}
        for adapter, (versions, published) in clocks.items():
            of_it = adapters == adapter if len(clocks) > 1 else slice(None)
            own = np.maximum(np.searchsorted(versions, weight_versions[of_it], side="right") - 1, 0)
            newer = np.minimum(own + 1, len(versions) - 1)
            own_ns[of_it] = published[own]
            newer_ns[of_it] = np.where(newer > own, published[newer], sampled_at_ns[of_it])
        staleness = TokenStaleness(
            weight_lag_ms=np.maximum(sampled_at_ns - newer_ns, 0) / NS_PER_MS,
            policy_age_ms=(sampled_at_ns - own_ns) / NS_PER_MS,
            token_age_ms=(consumed_ns - sampled_at_ns) / NS_PER_MS,
            version_lag=trainer_version - weight_versions if version_lag is None else version_lag,
            group_wait_ms=np.zeros(len(weight_versions)) if group_wait_ns is None else group_wait_ns / NS_PER_MS,
        )
        with self._lock:
            for name in ("weight_lag_ms", "token_age_ms", "policy_age_ms"):
                self._histograms[name].add(getattr(staleness, name))
            self._version_lags.update(staleness.version_lag.tolist())
        if (listener := self.listener) is not None:
            every = np.ones(len(weight_versions), bool)
            listener.consumed(weight_versions, staleness, every if in_loss is None else in_loss)
        return staleness

    def summary(self) -> dict[str, dict[str, float]]:
        """Return {name: {p50, p90, p99}} over all consumed tokens and all swaps; version_lag as {p50, max}."""
        with self._lock:
            summary = {name: histogram.percentiles() for name, histogram in self._histograms.items()}
            lags, counts = np.array(sorted(self._version_lags.items())).reshape(-1, 2).T
        below = np.cumsum(counts)
        middle = np.searchsorted(below, len(lags) and below[-1] / 2)
        summary["version_lag"] = {"p50": float(lags[middle]), "max": float(lags[-1])} if len(lags) else {}
        return summary


def _clock(
    published: Iterable[tuple[int, int]], changes: Mapping[int, Collection[str]], adapter: str | None
) -> np.ndarray:
    """Return the versions that changed an adapter, and their times, i64[2, k]. The oldest remembered version is one of
    them."""
    oldest, *later = published
    return np.array([oldest, *((v, ns) for v, ns in later if adapter in changes.get(v, {adapter}))]).T
