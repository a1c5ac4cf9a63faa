"""Rewards, computed beside generation and training: an event loop in a thread of its own awaits coroutines, and has
worker threads call other functions."""

import asyncio
import inspect
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from statistics import median
from time import perf_counter
from typing import Any

from inflight.core.rollout import Rollout
from inflight.core.spans import span

logger = logging.getLogger(__name__)

Reward = float | None
Score = Callable[[Rollout], Reward] | Callable[[Rollout], Awaitable[Reward]]
"""A function that returns the reward of a rollout; None or NaN if it has none."""
Rewards = Sequence[Reward]
BatchScore = Callable[[Sequence[Rollout]], Rewards] | Callable[[Sequence[Rollout]], Awaitable[Rewards]]
"""A function that returns the rewards of a group's rollouts, in their order."""

_QUICK_S = 1e-3
_REMEMBERED = 9


class Scorer:
    """A score function and how it is called.

        Scorer(score)                            # a function or a coroutine function of one rollout
        Scorer(score, batched=True)              # of the list of a group's rollouts; returns as many rewards
        Scorer(score, timeout_s=30, workers=16)

    A rollout without a reward takes no part in training and is counted: where the function returns None or a number
    that is not finite, and where it takes longer than `timeout_s`. (A thread cannot be ended: a function that hangs
    keeps its worker.) What the function raises is raised to the trainer, and its group is scored again when it is asked
    for again.
    """

    def __init__(
        self, score: Score | BatchScore, *, batched: bool = False, workers: int = 64, timeout_s: float = 600.0
    ):
        """workers: calls at the same time, of coroutines too. timeout_s: for one call."""
        if not callable(score):
            raise TypeError(f"score must be a function of a rollout, got {score!r}")
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.score: Callable[..., Any] = score
        self._batched, self._limit, self._timeout_s = batched, workers, timeout_s
        self._is_async = inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(
            getattr(score, "__call__", None)  # noqa: B004  an object may be called as a coroutine function
        )
        self._workers = _Workers()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: asyncio.Semaphore | None = None
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        """The times that the last calls took."""
        self.num_timeouts = 0
        """Number of calls that took longer than `timeout_s`."""

    def start(
        self, group: list[Rollout], *, prepare: Callable[[list[Rollout]], object] = lambda group: None
    ) -> "Future[list[Reward]]":
        """Begin to score a group; the future gives the rewards, None for a rollout that has none, or raises what the
        function raised. prepare: called first, in the event loop's thread."""
        return asyncio.run_coroutine_threadsafe(self._score_group(group, prepare), self._running_loop())

    def close(self) -> None:
        """Let the threads go. Calls that are under way are not waited for."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._places = asyncio.Semaphore(self._limit)
                threading.Thread(target=_run, args=(self._loop,), name="inflight-scores", daemon=True).start()
            return self._loop

    async def _score_group(self, group: list[Rollout], prepare: Callable[[list[Rollout]], object]) -> list[Reward]:
        prepare(group)
        if self._batched:
            rewards = await self._call(self.score, group)
            if rewards is None:
                return [None] * len(group)
            if len(rewards) != len(group):
                raise ValueError(
                    f"the score function returned {len(rewards)} rewards for the {len(group)} rollouts of a group"
                )
            return [_reward(value) for value in rewards]
        first = await self._score_in_turn(group) if self._is_quick() else []
        rest = await asyncio.gather(*(self._call(self._timed, rollout) for rollout in group[len(first) :]))
        return [_reward(value) for value in (*first, *rest)]

    def _is_quick(self) -> bool:
        """Whether handing a call to a thread would cost more than the call itself, judged by the last calls."""
        return not self._is_async and len(self._seconds) == _REMEMBERED and median(self._seconds) < _QUICK_S

    async def _score_in_turn(self, group: list[Rollout]) -> list[Any]:
        """Call the function for one rollout after another in one thread. Returns the rewards of all of them, or up to
        the call that took too long, whose reward is None."""
        rewards: list[Any] = []
        await self._call(lambda rollouts: rewards.extend(map(self._timed, rollouts)), group)
        return [*rewards, None][: len(group)]

    def _timed(self, rollout: Rollout) -> Any:
        began = perf_counter()
        reward = self.score(rollout)
        self._seconds.append(perf_counter() - began)
        return reward

    async def _call(self, function: Callable[..., Any], argument: Rollout | list[Rollout]) -> Any:
        """Call the function, in a worker thread unless it is async. Returns None if that takes too long."""
        assert self._places is not None
        async with self._places:
            if self._is_async:
                call = asyncio.ensure_future(self.score(argument))
            else:
                call = asyncio.wrap_future(self._workers.start(function, argument))
            done, _ = await asyncio.wait([call], timeout=self._timeout_s)
            if done:
                return call.result()
            call.cancel()
            self.num_timeouts += 1
            logger.warning("a score took longer than %g s: its rollouts have no reward", self._timeout_s)
            return None


class _Workers:
    """Daemon threads that call functions: a call that never returns does not keep the process from ending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], Any]] = SimpleQueue()
        self._num_idle = 0

    def start(self, function: Callable[..., Any], argument: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                threading.Thread(target=self._work, name="inflight-score", daemon=True).start()
        self._calls.put((future, function, argument))
        return future

    def _work(self) -> None:
        while True:
            future, function, argument = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    with span("score"):
                        result = function(argument)
                    future.set_result(result)
                except Exception as error:  # it is the trainer's to see
                    future.set_exception(error)
                except BaseException as error:  # SystemExit would end the event loop instead
                    future.set_exception(RuntimeError(f"the score function raised {error!r}"))
            future = function = argument = result = None  # nothing is kept while it waits
            with self._lock:
                self._num_idle += 1


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def _reward(value: Any) -> Reward:
    if value is None:
        return None
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the score function returned {value!r}, expected a number or None") from error
    return reward if math.isfinite(reward) else None
