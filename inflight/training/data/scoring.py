"""Rewards, computed during generation and training: a separate thread runs an event loop that awaits coroutines, and
calls other functions in worker threads or processes."""

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any

from inflight.core.arguments import named
from inflight.core.rollout import Rollout
from inflight.core.workers import Workers, is_async
from inflight.stream.held_groups import Group
from inflight.training.data.score_processes import ProcessTimeout, ScoreProcesses

logger = logging.getLogger(__name__)

Reward = float | None
Score = Callable[[Rollout], Reward] | Callable[[Rollout], Awaitable[Reward]]
"""A function that returns the reward of a rollout; None or NaN if it has none."""
Rewards = Sequence[Reward]
BatchScore = Callable[[Sequence[Rollout]], Rewards] | Callable[[Sequence[Rollout]], Awaitable[Rewards]]
"""A function that returns the rewards of a group's rollouts, in their order."""
Prepare = Callable[[Group], object]
"""A function that is called with a group before it is scored."""

_TOO_LATE = float("nan")
"""The reward of a rollout if its score took too long."""
_QUICK_S = 1e-3
_REMEMBERED = 9
_CANCEL_S = 1.0


class GroupScorer(ABC):
    """Scores groups: a `Scorer`, or several as `Rewards`."""

    scores_cancelled = False
    """If true, cancelled samples get a reward too."""

    def wants(self, rollout: Rollout) -> bool:
        """Return True if the rollout gets a reward: it finished, or it was cancelled and such samples are scored."""
        reason = rollout.finish_reason
        return reason in ("stop", "length") or (self.scores_cancelled and reason == "cancelled")

    @abstractmethod
    def start(self, group: Group, *, prepare: Prepare = lambda group: None) -> "Future[list[Reward]]":
        """Start to score the wanted rollouts of a group. The future returns a reward for each rollout, None if it has
        none, or raises the exception of the function. prepare: called first, in the event loop's thread."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, without waiting for calls in progress."""


@named()
class Scorer(GroupScorer):
    """A score function and the way it is called.

        Scorer(score)                            # a function or a coroutine function of one rollout
        Scorer(score, batched=True)              # of the list of a group's rollouts; returns as many rewards
        Scorer(score, timeout_s=30, workers=16)
        Scorer(check, processes=4)               # of a module or file, if Python computes for long
        Scorer(progress, cancelled=True)         # of samples that you cancel, too

    A rollout has no reward if the function returns None or a number that is not finite, or takes longer than
    `timeout_s`. Such a rollout takes no part in training and is counted. (A thread cannot be ended: a function that
    hangs keeps its worker. A process is ended and replaced.) Exceptions are raised to the trainer; the group is scored
    again when it is requested again.
    """

    def __init__(
        self,
        score: Score | BatchScore,
        *,
        batched: bool = False,
        workers: int = 64,
        timeout_s: float = 600.0,
        processes: int = 0,
        cancelled: bool = False,
    ):
        """workers: simultaneous calls, including coroutines. timeout_s: limit of one call. processes: number of
        processes that call the function, one call each at a time, instead of threads of one interpreter. They import
        the function by its name, so that it must be a plain function of a module or of the program's file. 0: threads.
        cancelled: cancelled samples get a reward too and are trained on, such as samples that a process reward ended
        early; their finish_reason is "cancelled". False: their groups continue without them. Raises ValueError for
        numbers out of range and for a function that other processes cannot import."""
        if not callable(score):
            raise TypeError(f"score must be a function of a rollout, got {score!r}")
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        if processes < 0:
            raise ValueError(f"processes must be at least 0, got {processes}")
        self.score: Callable[..., Any] = score
        self.scores_cancelled = cancelled
        self._batched, self._limit, self._timeout_s = batched, processes or workers, timeout_s
        self._is_async = is_async(score)
        if processes and self._is_async:
            raise ValueError("an async score function waits rather than computes: leave processes out")
        self._processes = ScoreProcesses(score, batched=batched, timeout_s=timeout_s) if processes else None
        self._function: Callable[..., Any] = self._processes or score
        self._workers = Workers("score")
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: asyncio.Semaphore | None = None
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        """Durations of the last calls."""
        self.num_timeouts = 0
        """Number of calls that took longer than `timeout_s`."""

    def start(self, group: Group, *, prepare: Prepare = lambda group: None) -> "Future[list[Reward]]":
        async def rewards() -> list[Reward]:
            return [None if r is None or math.isnan(r) else r for r in await self.part(group, prepare)]

        return self.run(rewards())

    async def part(self, group: Group, prepare: Prepare) -> list[Reward]:
        """Score a group as one of several functions. The reward is None for a rollout that is not wanted or that the
        function excludes, and NaN for a number that is not finite or a call that took too long."""
        wanted = [rollout for rollout in group if self.wants(rollout)]
        rewards = iter(await self._score_group(wanted, prepare) if wanted else ())
        return [next(rewards) if self.wants(rollout) else None for rollout in group]

    def run(self, rewards: Coroutine[Any, Any, list[Reward]]) -> "Future[list[Reward]]":
        """Await these rewards in the event loop."""
        return asyncio.run_coroutine_threadsafe(rewards, self._running_loop())

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        if self._processes is not None:
            self._processes.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._places = asyncio.Semaphore(self._limit)
                threading.Thread(target=_run, args=(self._loop,), name="inflight-scores", daemon=True).start()
            return self._loop

    async def _score_group(self, group: Group, prepare: Prepare) -> list[Reward]:
        prepare(group)
        if self._batched:
            rewards = await self._call(self._function, group)
            if rewards is None or rewards is _TOO_LATE:
                return [rewards] * len(group)
            if len(rewards) != len(group):
                raise ValueError(
                    f"the score function returned {len(rewards)} rewards for the {len(group)} rollouts of a group"
                )
            return [_reward(value) for value in rewards]
        first = await self._score_in_turn(group) if self._is_quick() else []
        rest = await asyncio.gather(*(self._call(self._timed, rollout) for rollout in group[len(first) :]))
        return [_reward(value) for value in (*first, *rest)]

    def _is_quick(self) -> bool:
        """Return True if, judged by the last calls, passing a call to a thread would cost more than the call itself."""
        return not self._is_async and len(self._seconds) == _REMEMBERED and median(self._seconds) < _QUICK_S

    async def _score_in_turn(self, group: Group) -> list[Any]:
        """Call the function for one rollout after another in one thread, up to the first call that takes too long."""
        rewards: list[Any] = []
        await self._call(lambda rollouts: rewards.extend(map(self._timed, rollouts)), group)
        return [*rewards, _TOO_LATE][: len(group)]

    def _timed(self, rollout: Rollout) -> Any:
        began = perf_counter()
        reward = self._function(rollout)
        self._seconds.append(perf_counter() - began)
        return reward

    async def _call(self, function: Callable[..., Any], argument: Rollout | list[Rollout]) -> Any:
        """Call the function, in a worker thread unless it is async. Returns `_TOO_LATE` if that takes too long."""
        assert self._places is not None
        async with self._places:
            if self._is_async:
                call = asyncio.ensure_future(self.score(argument))
            else:
                call = asyncio.wrap_future(self._workers.start(function, argument))
            done, _ = await asyncio.wait([call], timeout=None if self._processes else self._timeout_s)
            with suppress(ProcessTimeout):  # Processes measure the time themselves.
                if done:
                    return call.result()
            call.cancel()
            self.num_timeouts += 1
            logger.warning("a score took longer than %g s: its rollouts have no reward", self._timeout_s)
            return _TOO_LATE


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
    loop.close()


def _reward(value: Any) -> Reward:
    """Return None, a finite number, or NaN for a number that is not finite."""
    if value is None:
        return None
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the score function returned {value!r}, expected a number or None") from error
    return reward if math.isfinite(reward) else math.nan
