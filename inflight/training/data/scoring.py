"""Rewards, computed during generation and training: a separate thread runs an event loop that awaits coroutines, and
calls other functions in worker threads or processes."""

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from inflight.core.arguments import named
from inflight.core.failures import Failures, reason_of
from inflight.core.rate_limit import RateLimit
from inflight.core.rollout import Rollout
from inflight.core.workers import Workers, is_async, without_exit
from inflight.stream.held_groups import Group
from inflight.training.data.score_processes import ScoreProcesses

logger = logging.getLogger(__name__)

Reward = float | None
Score = Callable[[Rollout], Reward] | Callable[[Rollout], Awaitable[Reward]]
"""A function that returns the reward of a rollout; None or NaN if it has none."""
Rewards = Sequence[Reward]
BatchScore = Callable[[Sequence[Rollout]], Rewards] | Callable[[Sequence[Rollout]], Awaitable[Rewards]]
"""A function that returns the rewards of a group's rollouts, in their order."""
Prepare = Callable[[Group], object]
"""A function that is called with a group before it is scored."""

_QUICK_S = 1e-3
_IN_TURN_S = 5e-3
"""Time after which calls in one thread end, and the other rollouts of the group are scored at the same time."""
_REMEMBERED = 9
_CANCEL_S = 1.0


class GroupScorer(ABC):
    """Scores groups: a `Scorer`, or several as `Rewards`."""

    scores_cancelled = False
    """If true, cancelled samples get a reward too."""
    scores_episodes = False
    """If true, `start` also receives the rollouts of episodes, however they ended. They have their rewards, and `start`
    returns these."""

    def wants(self, rollout: Rollout) -> bool:
        """Return True if the rollout gets a reward: it finished, or it was cancelled and such samples are scored, or it
        is of an episode and these are scored."""
        reasons = ("stop", "length", "cancelled") if self.scores_cancelled else ("stop", "length")
        return rollout.finish_reason in reasons or (self.scores_episodes and rollout.is_of_episode)

    @abstractmethod
    def start(self, group: Group, *, prepare: Prepare = lambda group: None) -> "Future[list[Reward]]":
        """Start to score the wanted rollouts of a group. The future returns a reward for each rollout, None if it has
        none. prepare: called first, in the event loop's thread."""

    @property
    def failures(self) -> "Counter[str]":
        """Number of calls that failed, "error: NAME", and of repeated calls, "retries: NAME", by exception class."""
        return Counter()

    @property
    def last_error(self) -> BaseException | None:
        """Exception of the newest failed call, or None if a call has succeeded since."""
        return None

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
        Scorer(judge, retries={ConnectionError: 2}, rate=RateLimit(per_second=5))

    A rollout has no reward if the function returns None or a number that is not finite, or raises an exception, or
    takes longer than `timeout_s`: a TimeoutError. Such a rollout is left out of training and counted. (A thread cannot
    be ended: a function that hangs keeps its worker. A process is ended and replaced.) Exceptions are counted in
    `failures`, and the first of each class is logged with its traceback. They reach the trainer only as a ScoreError if
    no rollout of a batch gets a reward.
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
        retries: Mapping[type[Exception], int] | None = None,
        rate: RateLimit | None = None,
    ):
        """workers: simultaneous calls, including coroutines. timeout_s: limit of one call. processes: number of
        processes that call the function, one call each at a time, instead of threads of one interpreter. They import
        the function by its name, so that it must be a plain function of a module or of the program's file. 0: threads.
        cancelled: cancelled samples get a reward too and are trained on, such as samples that a process reward ended
        early; their finish_reason is "cancelled". False: their groups continue without them. retries: maximum number of
        further calls for a rollout, or a batched group, after an exception of a class. Processes raise ScoreError.
        rate: a limit of calls per second and at the same time. A call waits for it for at most `timeout_s`, and this
        time is not a part of the call.
        Raises ValueError for numbers out of range and for a function that other processes cannot import."""
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
        self._workers = Workers("score")
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: asyncio.Semaphore | None = None
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        """Durations of the last calls."""
        self._function = partial(_timed, self._processes or score, self._seconds)
        self._failures = Failures("a score", logger, retries)
        self._rate = rate
        self.on_failure: Callable[[Rollout | list[Rollout], Exception], object] = lambda argument, error: None
        """Called with the argument and the exception of a call that failed and is not repeated, in the scorer's
        thread."""

    @property
    def failures(self) -> Counter[str]:
        return Counter(self._failures.counts)

    @property
    def last_error(self) -> BaseException | None:
        return self._failures.last

    def start(self, group: Group, *, prepare: Prepare = lambda group: None) -> "Future[list[Reward]]":
        async def rewards() -> list[Reward]:
            return [None if r is None or math.isnan(r) else r for r in await self.part(group, prepare)]

        return self.run(rewards())

    async def part(self, group: Group, prepare: Prepare) -> list[Reward]:
        """Score a group as one of several functions. The reward is None for a rollout that is not wanted or that the
        function excludes, and NaN for a number that is not finite or a call that failed."""
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
            rewards = await self._score(group, lambda values: _rewards(values, len(group)))
            return [math.nan] * len(group) if rewards is None else rewards
        # Passing a quick call to a thread would cost more than the call itself.
        may_be_quick = not self._is_async and self._rate is None and len(self._seconds) == _REMEMBERED
        is_quick = may_be_quick and median(self._seconds) < _QUICK_S
        known = await self._score_in_turn(group) if is_quick else []
        calls = (self._score(r, _reward, known[i : i + 1]) for i, r in enumerate(group))
        return [math.nan if reward is None else reward[0] for reward in await asyncio.gather(*calls)]

    async def _score(
        self, argument: Rollout | list[Rollout], read: Callable[[Any], list[Reward]], known: Sequence[Any] = ()
    ) -> list[Reward] | None:
        """Call the function, again after exceptions that allow it. Returns None if it has failed. read: converts the
        result. known: the result, or the exception, of a first call that was made before."""
        attempts: Counter[type[Exception]] = Counter()
        while True:
            try:
                result = known[0] if known else await self._call(self._function, argument)
                if isinstance(result, Exception):
                    raise result
                rewards = read(result)
            except Exception as error:  # Score functions can raise anything.
                reason = reason_of(error)
                self._failures.log(error, reason)
                if not self._failures.allow_retry(error, attempts):
                    self._failures.counts[reason] += 1
                    self.on_failure(argument, error)
                    return None
                known = ()
            else:
                self._failures.last = None
                return rewards

    async def _score_in_turn(self, group: Group) -> list[Any]:
        """Call the function for the rollouts in one thread, for a short time and up to the first exception. Returns
        results, and then it."""
        results: list[Any] = []
        limit_s = min(_IN_TURN_S, self._timeout_s / 2)  # The time limit is for one call.

        def call_each(rollouts: Group) -> None:
            began_s = perf_counter()
            for rollout in rollouts:  # `map` would take a StopIteration for its end.
                results.append(self._function(rollout))
                if perf_counter() - began_s > limit_s:
                    return

        try:
            await self._call(call_each, group)
        except Exception as error:  # Score functions can raise anything.
            return [*results, error][: len(group)]
        return results

    async def _call(self, function: Callable[..., Any], argument: Rollout | list[Rollout]) -> Any:
        """Call the function, in a worker thread unless it is async. Raises its exceptions, and TimeoutError."""
        assert self._places is not None
        async with self._places:
            if self._rate is not None:
                await self._rate.take(self._timeout_s)
            try:
                if self._is_async:
                    call = asyncio.ensure_future(without_exit(self.score(argument), "the score function"))
                else:
                    call = asyncio.wrap_future(self._workers.start(function, argument))
                # Processes measure the time themselves.
                done, _ = await asyncio.wait([call], timeout=None if self._processes else self._timeout_s)
                if done:
                    try:
                        return call.result()
                    except (asyncio.CancelledError, CancelledError) as error:  # This task's own would end the wait.
                        raise RuntimeError("the score function was cancelled") from error
                call.cancel()
                raise TimeoutError(f"a score took longer than {self._timeout_s:g} s")
            finally:
                if self._rate is not None:
                    self._rate.give_back()


def _timed(function: Callable[..., Any], seconds: "deque[float]", argument: Any) -> Any:
    """Call the function, and append the duration of the call."""
    began = perf_counter()
    result = function(argument)
    seconds.append(perf_counter() - began)
    return result


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
    loop.close()


def _rewards(values: Any, count: int) -> list[Reward]:
    """Return the rewards of a batched function, None for each rollout if it returned None."""
    if values is None:
        return [None] * count
    if not hasattr(values, "__len__"):
        raise TypeError(f"a batched score function returns a reward for each rollout of a group, got {values!r}")
    if len(values) != count:
        raise ValueError(f"the score function returned {len(values)} rewards for the {count} rollouts of a group")
    return [reward for value in values for reward in _reward(value)]


def _reward(value: Any) -> list[Reward]:
    """Return a list of None, a finite number, or NaN for a number that is not finite."""
    if value is None:
        return [None]
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the score function returned {value!r}, expected a number or None") from error
    return [reward if math.isfinite(reward) else math.nan]
