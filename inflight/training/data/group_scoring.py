"""Which scorer scores which finished group, and what came of it."""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

from inflight.stream.inbox import Group
from inflight.training.data.scored_groups import ended_by_itself
from inflight.training.data.scoring import Reward, Score, Scorer


@dataclass(slots=True)
class _Scoring:
    """One group that is being scored, or has been."""

    group: Group
    scorer: Scorer
    done: bool = False
    error: BaseException | None = None
    """What the score function raised."""


class GroupScoring:
    """Has groups scored as they finish, by the scorer that was asked for last. Safe to use from several threads.

    prepare: called with a group before it is scored, by the scorer's thread. ready: called with a group whose scoring
    has ended; returns False if nobody wants the group any more.
    """

    def __init__(self, *, prepare: Callable[[Group], object], ready: Callable[[Group], bool]):
        self._prepare, self._ready = prepare, ready
        self._lock = threading.Lock()
        self._scorer: Scorer | None = None
        """The one that was asked for last."""
        self._own_scorer: Scorer | None = None
        """The scorer that was made here, of a plain function."""
        self._scorings: dict[int, _Scoring] = {}
        """Maps group ids to the last scoring of each group."""

    def score_with(self, score: Score | Scorer) -> Scorer:
        """From now on score groups with this as they finish, also those that another scorer is busy with. Returns the
        scorer."""
        with self._lock:
            if isinstance(score, Scorer):
                scorer = score
            elif self._own_scorer is not None and self._own_scorer.score is score:
                scorer = self._own_scorer
            else:
                if self._own_scorer is not None:
                    self._own_scorer.close()
                scorer = self._own_scorer = Scorer(score)
            self._scorer = scorer
            overtaken = [s.group for s in self._scorings.values() if not s.done and s.scorer is not scorer]
        for group in overtaken:
            self.start(group, scorer)
        return scorer

    def start_if_wanted(self, group: Group) -> bool:
        """Begin to score a group that has just finished. Returns True if there is nothing to wait for: nobody has asked
        for scores, or the group gets none."""
        scorer = self._scorer
        if scorer is None or not _gets_rewards(group):
            return True
        self.start(group, scorer)
        return False

    def start(self, group: Group, scorer: Scorer) -> None:
        """Begin to score a group; `ready` is called at the end."""
        scoring = _Scoring(group, scorer)
        with self._lock:
            self._scorings[group[0].group_id] = scoring
        scorer.start(group, prepare=self._prepare).add_done_callback(partial(self._end, scoring))

    def has_rewards(self, group: Group, scorer: Scorer) -> bool:
        """Whether the group has the rewards that this scorer gave it, or gets none from anybody. Raises what the score
        function raised, once; after that the group counts as not scored."""
        with self._lock:
            scoring = self._scorings.get(group[0].group_id)
            if scoring is not None and scoring.error is not None:
                del self._scorings[group[0].group_id]
        if scoring is not None and scoring.scorer is scorer:
            if scoring.error is not None:
                raise scoring.error
            return scoring.done
        return not _gets_rewards(group)

    def forget(self, group_ids: Collection[int]) -> None:
        """These groups are in somebody's hands; nobody asks about them again."""
        with self._lock:
            for group_id in group_ids:
                self._scorings.pop(group_id, None)

    def close(self) -> None:
        """Let the threads of the own scorer go."""
        with self._lock:
            scorer, self._own_scorer = self._own_scorer, None
        if scorer is not None:
            scorer.close()

    def _end(self, scoring: _Scoring, rewards: "Future[list[Reward]]") -> None:
        group_id = scoring.group[0].group_id
        with self._lock:
            if self._scorings.get(group_id) is not scoring:  # another scorer has taken over, or nobody wants it
                return
            scoring.error = CancelledError() if rewards.cancelled() else rewards.exception()
            scoring.done = True
            if scoring.error is None:
                for rollout, reward in zip(scoring.group, rewards.result(), strict=True):
                    rollout.reward = reward
        if not self._ready(scoring.group):
            self.forget([group_id])


def _gets_rewards(group: Group) -> bool:
    """Whether a group takes part in training at all: it did not fail, and was not drawn greedily."""
    return ended_by_itself(group) and not group[0].params.greedy
