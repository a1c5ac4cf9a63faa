"""Rewards of several score functions, each with a weight."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from math import isfinite, isnan
from statistics import fmean

from inflight.core.arguments import named
from inflight.core.rollout import Rollout, samples_of
from inflight.stream.held_groups import Group
from inflight.training.data.scoring import BatchScore, GroupScorer, Prepare, Reward, Score, Scorer


@named()
class Rewards(GroupScorer):
    """Several score functions with weights; the reward is their weighted sum.

        Rewards({"correct": check, "format": tidy}, weights={"format": 0.2})
        Rewards({"judge": Scorer(ask, timeout_s=30), "length": short})

    Each is a function of a rollout, plain or `async`, or a `Scorer` with a separate time limit and batching. All are
    called at the same time. `rollout.rewards` contains the unweighted results by name; reports contain their means as
    "reward/NAME". A function that returns None does not count. The rollout has no reward if all return None, or if one
    fails or returns a number that is not finite.
    """

    def __init__(
        self, scores: Mapping[str, Score | BatchScore | Scorer], *, weights: Mapping[str, float] | None = None
    ):
        """scores: functions by their names. weights: weights other than 1. Raises ValueError for a weight that is not
        finite or belongs to no score."""
        weights = weights or {}
        if not isinstance(scores, Mapping):
            raise TypeError(
                f"Rewards takes a mapping of names to score functions, got {type(scores).__name__}: write "
                'Rewards({"name": function, …}); the names appear in reports'
            )
        if bad_names := [name for name in scores if not isinstance(name, str)]:
            raise TypeError(f"names of score functions must be strings, got {bad_names}")
        if not scores:
            raise ValueError("Rewards needs at least one score function")
        if unknown := sorted(set(weights) - set(scores)):
            raise ValueError(f"weights names {', '.join(unknown)}; the score functions are {', '.join(scores)}")
        if bad := {name: weight for name, weight in weights.items() if not isfinite(weight)}:
            raise ValueError(f"weights must be finite, got {bad}")
        self.weights = {name: float(weights.get(name, 1.0)) for name in scores}
        self._scorers = {name: s if isinstance(s, Scorer) else Scorer(s) for name, s in scores.items()}
        self.scores_cancelled = any(scorer.scores_cancelled for scorer in self._scorers.values())

    def start(self, group: Group, *, prepare: Prepare = lambda group: None) -> "Future[list[Reward]]":
        scorers = list(self._scorers.values())
        parts = [scorer.run(scorer.part(group, prepare)) for scorer in scorers]

        async def rewards() -> list[Reward]:
            await asyncio.gather(*map(asyncio.wrap_future, parts), return_exceptions=True)
            return self._sums(group, [part.result() for part in parts])

        return scorers[0].run(rewards())

    @property
    def failures(self) -> Counter[str]:
        return sum((scorer.failures for scorer in self._scorers.values()), Counter())

    @property
    def last_error(self) -> BaseException | None:
        return next((s.last_error for s in self._scorers.values() if s.last_error is not None), None)

    def close(self) -> None:
        """Close all scorers."""
        for scorer in self._scorers.values():
            scorer.close()

    def _sums(self, group: Group, of_parts: Sequence[Sequence[Reward]]) -> list[Reward]:
        """Return the reward of each rollout, and fill in its `rewards`. of_parts: for each score function, its part of
        the reward of each rollout."""
        sums: list[Reward] = []
        for rollout, parts in zip(group, zip(*of_parts, strict=True), strict=True):
            given = {name: part for name, part in zip(self._scorers, parts, strict=True) if part is not None}
            rollout.rewards = {name: part for name, part in given.items() if not isnan(part)}
            is_whole = given and len(given) == len(rollout.rewards)
            sums.append(sum(self.weights[name] * part for name, part in given.items()) if is_whole else None)
        return sums


def mean_parts(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the mean of each score function by its name, over the samples with a result of that function."""
    parts: dict[str, list[float]] = {}
    for first, *_ in samples_of(rollouts):  # All token sequences of an episode have its rewards.
        for name, part in first.rewards.items():
            parts.setdefault(name, []).append(part)
    return {name: fmean(values) for name, values in parts.items()}
