"""Scores the groups of a ledger as they finish, and returns them in the order in which their scorings end."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

from inflight.core.errors import ScoreError
from inflight.core.rollout import Rollout
from inflight.stream.group_table import GroupRecord
from inflight.stream.held_groups import Group
from inflight.stream.ledger import Ledger
from inflight.training.data.scored_groups import LEAST_MEMBERS, ScoredGroups
from inflight.training.data.scoring import GroupScorer, Prepare, Reward, Score, Scorer


@dataclass(slots=True, eq=False)
class _Scoring:
    """A group whose scoring is in progress or has ended."""

    record: GroupRecord
    scorer: GroupScorer
    done: bool = False
    error: BaseException | None = None
    """Set if the scorer was closed, or text could not be decoded."""

    @property
    def is_last(self) -> bool:
        """False if another scorer has replaced this one, or the group is not outstanding."""
        return self.record.scoring is self and self.record.is_finished


class GroupScoring:
    """Scores groups as they finish, with the scorer of the last request. Safe to use from several threads.

    The record of a group keeps its last scoring. prepare: called with a group before it is scored, by the scorer's
    thread, and before `next` returns it. in_order: return groups in the order in which the scorings began, regardless
    of their durations.
    """

    def __init__(self, ledger: Ledger, *, prepare: Prepare, in_order: bool = False):
        self._ledger, self._prepare, self._in_order = ledger, prepare, in_order
        self.on_next: Callable[[Group], None] = lambda group: None
        """Called with each group that `next` returns."""
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held while groups that are in order become ready."""
        self._queue: deque[_Scoring] = deque()
        """Scorings in the order in which they began, if groups leave in that order."""
        self._scorer: GroupScorer | None = None
        """The scorer of the last request."""
        self._again = False
        """The next request scores groups without a reward again."""
        self._own_scorer: Scorer | None = None
        """The scorer that was made here from a plain function."""
        self._busy: set[_Scoring] = set()
        """Scorings that have not ended."""

    def score_with(self, score: Score | GroupScorer) -> GroupScorer:
        """Score groups with this as they finish. Groups that another scorer is scoring are scored again. Returns the
        scorer."""
        with self._lock:
            if isinstance(score, GroupScorer):
                scorer = score
            elif self._own_scorer is not None and self._own_scorer.score is score:
                scorer = self._own_scorer
            else:
                if self._own_scorer is not None:
                    self._own_scorer.close()
                scorer = self._own_scorer = Scorer(score)
            self._scorer = scorer
            if self._again:
                self._again = False
                _forget_unrewarded(list(self._ledger.table.records.values()))
            overtaken = [s.record for s in self._busy if s.is_last and s.scorer is not scorer]
            scorings = [self._register(record, scorer) for record in overtaken]
        for scoring in scorings:
            self._begin(scoring)
        return scorer

    def start_if_wanted(self, record: GroupRecord) -> bool:
        """Start scoring a group that has just finished. Returns True if it gets no scores now, so that it is ready."""
        with self._lock:
            if self._scorer is None or not (self._in_order or _members(record.rollouts, self._scorer)):
                return True
            scoring = self._register(record, self._scorer)
        self._begin(scoring)
        return False

    def next(self, scorer: GroupScorer | None) -> "GroupRecord | Future[None] | None":
        """Lease the next group for training, with the rewards of this scorer if one is given. It stays outstanding
        until it is removed from the ledger. An unused group must be put back. Returns a future that completes when the
        caller should retry, or None at the end."""
        while isinstance(record := self._ledger.queue.next(), GroupRecord):
            try:
                if scorer is None or self.has_rewards(record, scorer):
                    self._prepare(record.rollouts)
                    self.on_next(record.rollouts)
                    return record
            except BaseException:
                self._ledger.queue.put_back([record.group_id])
                raise
            self._ledger.queue.hold(record)
            with self._lock:
                scoring = self._register(record, scorer)
            self._begin(scoring)
        return record

    def check(self, scored: ScoredGroups, least: int) -> None:
        """Raise ScoreError if the score function has failed, at least `least` groups of a batch were scored, and no
        rollout has a reward. The next request then scores outstanding groups without a reward again."""
        error = None if self._scorer is None else self._scorer.last_error
        if error is None or scored.groups or scored.dropped.num_unscored_groups < least:
            return
        self._again = True
        raise ScoreError(
            f"no rollout of a batch has a reward, because the score function has failed: {type(error).__name__}: "
            f"{error}; calls that failed: {dict(self.failures)}"
        ) from error

    @property
    def failures(self) -> Counter[str]:
        """The failures of the present scorer."""
        return Counter() if self._scorer is None else self._scorer.failures

    def has_rewards(self, record: GroupRecord, scorer: GroupScorer) -> bool:
        """Return True if the group has the rewards of this scorer, or gets none from any. Raises an error once that
        prevented the scoring; then the group is not scored."""
        with self._lock:
            scoring: _Scoring | None = record.scoring
            if scoring is not None and scoring.error is not None:
                record.scoring = None
        if scoring is not None and scoring.scorer is scorer:
            if scoring.error is not None:
                raise scoring.error
            return scoring.done
        return not _members(record.rollouts, scorer)

    def close(self) -> None:
        """End the threads of the scorer that was made here."""
        with self._lock:
            scorer, self._own_scorer = self._own_scorer, None
        if scorer is not None:
            scorer.close()

    def _register(self, record: GroupRecord, scorer: GroupScorer) -> _Scoring:
        record.scoring = scoring = _Scoring(record, scorer)
        self._busy.add(scoring)
        if self._in_order:
            self._queue.append(scoring)
        return scoring

    def _begin(self, scoring: _Scoring) -> None:
        group = scoring.record.rollouts
        if scoring.is_last and (members := _members(group, scoring.scorer)):
            rewards = scoring.scorer.start(members, prepare=lambda _: self._prepare(group))
            rewards.add_done_callback(partial(self._end, scoring, members))
        else:  # The group has no members to score and only waits for its turn.
            self._end(scoring)

    def _end(
        self, scoring: _Scoring, members: Sequence[Rollout] = (), rewards: "Future[list[Reward]] | None" = None
    ) -> None:
        """Mark this scoring as ended, and pass on its group and the groups whose turn follows."""
        with self._lock:
            if rewards is not None:
                scoring.error = CancelledError() if rewards.cancelled() else rewards.exception()
                if scoring.is_last and scoring.error is None:
                    for rollout, reward in zip(members, rewards.result(), strict=True):
                        rollout.reward = reward
            scoring.done = True
            self._busy.discard(scoring)
        if not self._in_order:
            self._pass_on(scoring)
            return
        with self._turn:
            while self._queue and self._queue[0].done:
                self._pass_on(self._queue.popleft())

    def _pass_on(self, scoring: _Scoring) -> None:
        if scoring.is_last:
            self._ledger.queue.ready(scoring.record)


def _forget_unrewarded(records: Sequence[GroupRecord]) -> None:
    """Forget that groups were scored, if they have no reward."""
    for record in records:
        is_scored = isinstance(record.scoring, _Scoring) and record.scoring.done
        if is_scored and all(rollout.reward is None for rollout in record.rollouts):
            record.scoring = None


def _members(group: Group, scorer: GroupScorer) -> Group:
    """Return the members of a group that get a reward: none if too few are left, or if they were drawn greedily.
    Episodes have their rewards, and most scorers get none of them."""
    members = [r for r in group if scorer.wants(r) and (scorer.scores_episodes or not r.is_of_episode)]
    return members if len(members) >= min(LEAST_MEMBERS, len(group)) and not group[0].params.greedy else []
