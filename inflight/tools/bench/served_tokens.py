"""Responses of a server during weight updates, and measures of them.

The tokens reveal the version of their weights (`truth_teller`), so that the measures do not depend on reports of the
server. Times are times of this process: a token is drawn when it arrives here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from inflight.core.clock import NS_PER_MS
from inflight.observability.staleness_meter import StalenessMeter, TokenStaleness
from inflight.tools.bench.spread import percentiles, spread
from inflight.tools.bench.truth_teller import belong, versions_of

_ENDED_BY_ITSELF = ("stop", "length")
_AGES = ("weight_lag_ms", "token_age_ms", "policy_age_ms", "version_lag")


@dataclass(slots=True)
class Piece:
    """Tokens of one request that arrived together."""

    time_ns: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(slots=True)
class Answer:
    """Response to one request so far."""

    pieces: list[Piece] = field(default_factory=list)
    labels: list[str | None] | None = None
    """Version of each token as reported by the server, or None."""
    finish_reason: str = ""
    """Reason reported by the server; "error" if the response broke off, "" while it continues."""

    @property
    def ended_by_itself(self) -> bool:
        """Return whether the response stopped or reached its maximum length."""
        return self.finish_reason in _ENDED_BY_ITSELF

    @property
    def token_ids(self) -> np.ndarray:
        """i64[T]."""
        return np.array([token for piece in self.pieces for token in piece.token_ids], np.int64)

    @property
    def logprobs(self) -> np.ndarray:
        """f64[T]."""
        return np.array([logprob for piece in self.pieces for logprob in piece.logprobs], np.float64)

    @property
    def times_ns(self) -> np.ndarray:
        """i64[T]: arrival time of each token."""
        return np.array([piece.time_ns for piece in self.pieces for _ in piece.token_ids], np.int64)


@dataclass(slots=True)
class Update:
    """New weights for the server."""

    version: int
    called_ns: int
    """Time of the call."""
    answered_ns: int
    """Time of the last response of the update."""


class ServedTokens:
    """Collects answers, updates and optimizer steps, and measures them."""

    def __init__(self, *, exact: bool) -> None:
        """exact: logits of the server are float32."""
        self._exact = exact
        self._meter = StalenessMeter()
        self._ages: list[TokenStaleness] = []
        self.answers: list[Answer] = []
        self.updates: list[Update] = []
        """Return the finished updates."""

    def called(self, version: int, called_ns: int) -> None:
        """Record the call of an update to this version."""
        self._meter.published(version, called_ns)

    def consumed(self, answers: Sequence[Answer], *, time_ns: int, trainer_version: int) -> None:
        """Record an optimizer step that uses the tokens of these responses."""
        tokens = [answer.token_ids for answer in answers]
        versions = versions_of(np.concatenate(tokens)) if tokens else np.zeros(0, np.int64)
        known = (versions >= 0) & (versions <= trainer_version)
        if known.any():
            times = np.concatenate([answer.times_ns for answer in answers])
            ages = self._meter.consume(
                versions[known], times[known], consumed_ns=time_ns, trainer_version=trainer_version
            )
            self._ages.append(ages)

    def result(self) -> dict[str, Any]:
        """Return the measures. Each {p50, p90, p99, max} is in milliseconds, or empty without values.

        swap_ms: call of an update → first token drawn by its weights, or by newer ones. update_ms: call → response.
        stall_ms: the longest silence of all requests together between these moments, minus the median silence between
        updates. gap_ms, gap_across_ms: time between two tokens of a request, of one version and of two. weight_lag_ms,
        policy_age_ms, token_age_ms, version_lag: see `StalenessMeter`. Counts: requests aborted by the server, their
        discarded tokens, tokens of torn weights, tokens that the server attributes to a wrong version, and tokens with
        a log-probability of another version or of none. `spread` adds the distributions.
        """
        meter = self._meter.summary()
        aborted = [answer for answer in self.answers if answer.finish_reason and not answer.ended_by_itself]
        versions = [versions_of(answer.token_ids) for answer in self.answers]
        times = np.concatenate([np.zeros(0, np.int64), *(answer.times_ns for answer in self.answers)])
        within, across = self._gaps(versions)
        of_updates = {
            "swap_ms": self._swaps_ms(times, np.concatenate([np.zeros(0, np.int64), *versions])),
            "update_ms": [(u.answered_ns - u.called_ns) / NS_PER_MS for u in self.updates],
            "stall_ms": self._stalls_ms(np.unique(times)),
        }
        of_tokens = {name: [getattr(each, name) for each in self._ages] for name in _AGES}
        return {
            **{name: percentiles(values) for name, values in of_updates.items()},
            "gap_ms": percentiles(within),
            "gap_across_ms": percentiles(across),
            **{name: meter[name] for name in _AGES},
            "num_updates": len(self.updates),
            "num_requests": len(self.answers),
            "num_tokens": int(sum(len(each) for each in versions)),
            "num_aborted_requests": len(aborted),
            "num_tokens_thrown_away": int(sum(len(answer.token_ids) for answer in aborted)),
            "num_requests_across_updates": sum(len(np.unique(each)) > 1 for each in versions),
            "num_torn_tokens": int(sum((each < 0).sum() for each in versions)),
            "num_mislabeled_tokens": self._num_mislabeled(versions),
            "num_foreign_logprobs": int(
                sum((~belong(a.token_ids, a.logprobs, exact=self._exact)).sum() for a in self.answers)
            ),
            **spread(of_updates | of_tokens),
        }

    def _swaps_ms(self, times: np.ndarray, drawn_by: np.ndarray) -> list[float]:
        """times, drawn_by: i64[n], arrival time and version of each token."""
        firsts = ((update, times[drawn_by >= update.version]) for update in self.updates)
        return [(int(later.min()) - update.called_ns) / NS_PER_MS for update, later in firsts if len(later)]

    def _stalls_ms(self, arrivals: np.ndarray) -> list[float]:
        """arrivals: i64[n], arrival times of all tokens, in order."""
        if len(arrivals) < 2:
            return []
        silences = np.diff(arrivals)
        overlaps = [(arrivals[1:] > update.called_ns) & (arrivals[:-1] < update.answered_ns) for update in self.updates]
        quiet = silences[~np.any(overlaps, axis=0)] if overlaps else silences
        usual = float(np.median(quiet)) if len(quiet) else 0.0
        return [max(0.0, float(silences[each].max()) - usual) / NS_PER_MS for each in overlaps if each.any()]

    def _gaps(self, versions: list[np.ndarray]) -> tuple[list[float], list[float]]:
        """Return the milliseconds between consecutive tokens of a request, of one version and of two. Tokens that
        arrived together are one."""
        within: list[float] = []
        across: list[float] = []
        for answer, drawn_by in zip(self.answers, versions, strict=True):
            gaps = np.diff(answer.times_ns) / NS_PER_MS
            changed = np.diff(drawn_by) != 0
            within += gaps[(gaps > 0) & ~changed].tolist()
            across += gaps[changed].tolist()
        return within, across

    def _num_mislabeled(self, versions: list[np.ndarray]) -> int | None:
        """Return the number of tokens with a wrong reported version, or None if the server reports no versions."""
        labeled = [(a.labels, each) for a, each in zip(self.answers, versions, strict=True) if a.labels is not None]
        if not labeled:
            return None
        return sum(
            label != (str(version) if version is not None else None)
            for labels, each in labeled
            for label, version in zip_longest(labels, each.tolist())
        )
