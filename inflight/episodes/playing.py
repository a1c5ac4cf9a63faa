"""Plays the episodes of a row: calls the rollout function, and settles the rewards when it has ended."""

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.core.failures import Failures, reason_of
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.workers import without_exit
from inflight.engine.loop.sequence import sample_seed
from inflight.episodes.limits import TIMEOUTS, AtEnd, EpisodeEnd, Limits, Reward
from inflight.episodes.session import Session
from inflight.episodes.turns import Turns
from inflight.stream.group_table import GroupRecord
from inflight.training.data.batch import given_rollout

logger = logging.getLogger(__name__)

RolloutFunction = Callable[[Session, Any], Coroutine[Any, Any, Reward]]
"""An async function of a session and of the row that was submitted. It returns the reward, which is added to the last
turn; several named parts, which are added up; or None, if `Session.reward` has set the rewards."""

_CHECK_S = 0.25
_NO_REWARD = "completed: no reward"
_RECENT = 256
"""Number of last episodes whose mean reward is recorded."""


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """The episodes of one row."""

    id: int
    row: Any
    metadata: Mapping[str, Any]
    params: SamplingParams

    @classmethod
    def of(cls, record: GroupRecord) -> "EpisodeGroup":
        """Return the group of an open record."""
        prompt = record.prompt
        assert prompt is not None
        return cls(record.group_id, prompt.metadata["row"], prompt.metadata["metadata"], prompt.params)

    def nothing(self, sample: int, finish_reason: str) -> Rollout:
        """Return the rollout of an episode that drew nothing."""
        nothing = given_rollout([], [], request_id=0, group_id=self.id, sample=sample)
        return replace(nothing, params=self.params, metadata=dict(self.metadata), finish_reason=finish_reason)


class Player:
    """Calls the rollout function for each episode of a group. One event loop uses it."""

    def __init__(
        self,
        rollout: RolloutFunction,
        turns: Turns,
        limits: Limits,
        failures: Failures,
        *,
        min_share: float,
        max_running: int,
    ):
        """The arguments are as for `Episodes`."""
        self._rollout, self._turns, self._limits, self._min_share = rollout, turns, limits, min_share
        self._counts = turns.counts
        self._failures = failures
        self._places = asyncio.Semaphore(max_running or 1 << 30)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """As `Episodes.seconds`."""
        self.num_running = 0
        """Number of episodes in progress."""
        self.rewards: deque[float] = deque(maxlen=_RECENT)
        """Rewards of the last episodes."""

    async def play(self, group: EpisodeGroup) -> list[Rollout]:
        """Play the episodes of a group, and return their rollouts, at least one for each. If this task is cancelled,
        the episodes are cancelled, and it returns their rollouts."""
        samples = range(group.params.n)
        running = [asyncio.ensure_future(self._play(group, sample)) for sample in samples]
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=self._limits.cleanup_s + _CHECK_S)
        episodes = [self._result(group, sample, task) for sample, task in zip(samples, running, strict=True)]
        num_scored = sum(episode[0].reward is not None for episode in episodes)
        rollouts = [rollout for episode in episodes for rollout in episode]
        if num_scored and num_scored / group.params.n < self._min_share:
            self._counts["groups with too few episodes"] += 1
            for rollout in rollouts:
                rollout.reward, rollout.finish_reason = None, "cancelled"
        return rollouts

    def _result(self, group: EpisodeGroup, sample: int, task: "asyncio.Future[list[Rollout]]") -> list[Rollout]:
        """Return the rollouts of an episode. The trainer waits for its group, so that it always gets one."""
        if not task.done() or task.cancelled():
            return [group.nothing(sample, "cancelled")]
        if (error := task.exception()) is not None:
            self._counts["error: internal"] += 1
            logger.error("an episode could not be recorded", exc_info=error)
            return [group.nothing(sample, "error")]
        return task.result()

    async def _play(self, group: EpisodeGroup, sample: int) -> list[Rollout]:
        """Play one episode, again after exceptions that allow it. Returns its rollouts, at least one."""
        attempts: Counter[type[Exception]] = Counter()
        async with self._places:
            while True:
                self._counts["attempts"] += 1
                session = Session(
                    self._turns,
                    group.params,
                    self._limits,
                    metadata=copied(group.metadata),
                    group_id=group.id,
                    sample=sample,
                    seed=sample_seed(group.params.seed or 0, sample),
                )
                self.num_running += 1
                try:
                    reason, value, error = await self._attempt(session, copied(group.row))
                finally:
                    self.num_running -= 1
                    self._turns.end(group.id, sample)
                self._counts["conversations rendered again"] += session.conversations.num_rendered_again
                for stage, seconds in session.seconds.items():
                    self.seconds[stage] += seconds
                if error is not None and self._failures.allow_retry(error, attempts):
                    self._turns.episodes.forget(group.id, sample)
                    continue
                reward, parts, reason = settle(session, value, reason, self._limits, self._failures)
                self._counts[reason] += 1
                if reward is not None:
                    self.rewards.append(reward)
                elif reason == "completed":
                    if not self._counts[_NO_REWARD]:
                        logger.warning(
                            "a rollout function returned None and has set no reward, so that its episode is not "
                            "trained; return a number, or call session.reward"
                        )
                    self._counts[_NO_REWARD] += 1
                ended = finish_reason(reason, reward)
                return session.rollouts(ended, reward, parts) or [group.nothing(sample, ended or "cancelled")]

    async def _attempt(self, session: Session, row: Any) -> tuple[str, Reward, Exception | None]:
        """Run the rollout function once. Returns the reason of its end, its result, and its exception."""
        task = asyncio.ensure_future(without_exit(self._rollout(session, row), "the rollout function"))
        reason = "cancelled"
        try:
            await asyncio.wait([task], timeout=self._limits.episode_s)
            reason = "episode_timeout"
        except asyncio.CancelledError:
            logger.debug("an episode of group %d is cancelled", session.group_id)
        if not task.done():
            await self._end(session, task, reason)
            return reason, None, None
        reason, is_served = session.ended or "completed", bool(session.at_close)
        session.close("closed")
        if task.cancelled() and reason != "completed":
            return "cancelled", None, None
        try:
            failure = _cause(task.exception())
        except asyncio.CancelledError as error:  # Nobody has cancelled the episode: a call has raised it.
            failure = error
        if isinstance(failure, EpisodeEnd):
            return failure.reason, None, None
        if failure is None:
            return reason, task.result(), None
        if is_served and reason != "completed":  # The agent has failed because its requests were refused.
            return reason, None, None
        reason = reason_of(failure)
        self._failures.log(failure, reason)
        return reason, None, failure if isinstance(failure, Exception) else None

    async def _end(self, session: Session, task: "asyncio.Future[Any]", reason: str) -> None:
        """Cancel the task of an episode, and give it time to clean up."""
        session.close(reason)
        task.cancel()
        await asyncio.wait([task], timeout=self._limits.cleanup_s)
        if not task.done():
            self._counts["episodes left behind"] += 1
            logger.warning(
                "an episode of group %d did not end within %g s after its cancellation; its group continues without it",
                session.group_id,
                self._limits.cleanup_s,
            )
        elif not task.cancelled():
            task.exception()  # else asyncio logs that nobody has read it


def _cause(failure: BaseException | None) -> BaseException | None:
    """Return the exception in a group of one, or of several EpisodeEnd: `asyncio.TaskGroup` raises groups."""
    while isinstance(failure, BaseExceptionGroup):
        if len(failure.exceptions) > 1 and failure.split(EpisodeEnd)[1] is not None:
            break
        failure = next(iter(failure.exceptions))
    return failure


def copied(value: Any) -> Any:
    """Return a row with copies of its dicts and lists, so that an episode can change them without changing the rows of
    other episodes and attempts. Other objects in it are shared."""
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return type(value)(copied(each) for each in value) if type(value) in (list, tuple) else value


def settle(
    session: Session, value: Reward, reason: str, limits: Limits, failures: Failures
) -> tuple[float | None, dict[str, float], str]:
    """Return the reward of an ended episode, its named parts, and the reason of its end. value: the result of the
    rollout function. reason: "completed", the name of a limit, or an error. failures: logs a result that is not a
    reward; its reason is "error: reward"."""
    parts: dict[str, float] = {}
    is_limit = reason.startswith("max_") or reason == "context"
    if reason == "completed" or ((is_limit or reason in TIMEOUTS) and value is not None):
        try:
            if isinstance(value, Mapping):
                parts = {str(name): float(part) for name, part in value.items()}
                value = sum(parts.values())
            if value is not None:
                session.reward(value)
        except (TypeError, ValueError) as error:
            reason = "error: reward"
            failures.log(error, reason)
            return None, {}, reason
        return session.total_reward, parts, reason
    at_end: AtEnd = "exclude"
    if reason in TIMEOUTS:
        at_end = limits.at_timeout
    elif is_limit:
        at_end = limits.at_limit
    if at_end == "exclude" or session.last is None:
        return None, {}, reason
    if at_end != "keep":
        session.reward(at_end)
    return session.total_reward or 0.0, {}, reason


def finish_reason(reason: str, reward: float | None) -> str | None:
    """Return "length" for an episode that a limit has cut, "cancelled" for one that takes no part in training, "error"
    after an exception, and None if the ends of its turns decide."""
    if reason.startswith("error"):
        return "error"
    if reason != "completed":
        return "cancelled" if reward is None else "length"
    return None
