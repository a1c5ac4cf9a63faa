"""Looks at a turn while an engine draws it."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from typing import Any, Literal

from inflight.core.arguments import named
from inflight.core.rollout import Rollout
from inflight.core.workers import without_exit
from inflight.stream.frame_bell import FrameBell

_PAUSE_S = 0.01
"""Minimum time between two looks at a turn, so that many turns can be watched."""


@named()
@dataclass(frozen=True, slots=True)
class Feedback:
    """The answer of a function that watches a turn. Raises ValueError for numbers out of range."""

    reward: float | None = None
    """A reward for the tokens between the last reward and the end of the unfinished turn that the function got. They
    become a separate turn in `Rollout.turns`."""
    stop: bool = False
    """End the turn."""
    forks: int = 0
    """Number of other continuations to draw, next to the turn. They are in `Reply.forks`, and are not watched."""
    at: int | None = None
    """Index of the token of the turn that a fork draws first. None: the next token after the unfinished turn; of a turn
    that has ended nothing is forked."""

    def __post_init__(self) -> None:
        if self.reward is not None and not isfinite(self.reward):
            raise ValueError(f"a reward must be finite, got {self.reward}")
        if self.forks < 0 or (self.at is not None and self.at < 0):
            raise ValueError(f"forks and at must be at least 0, got {self.forks} and {self.at}")


Answer = Feedback | bool | None
Watch = Callable[[Rollout], Answer] | Callable[[Rollout], Awaitable[Answer]]
"""A function of an unfinished turn, also async. True is `Feedback(stop=True)`; None and False are `Feedback()`."""
Every = int | Literal["line"]
"""A function watches a turn after each further number of tokens or more, or at the end of each line."""
TextOf = Callable[[int], str]
"""Returns the text of a token."""


async def feedback_of(watch: Watch, turn: Rollout) -> Feedback:
    """Return the answer of a function that watches a turn. Raises TypeError for another result."""
    answer: Any = await without_exit(_result_of(watch, turn), "the function that watches a turn")
    if getattr(answer, "shape", None) == ():  # of NumPy or PyTorch, such as a comparison of log-probabilities
        answer = answer.item()
    if answer is None or isinstance(answer, bool):
        return Feedback(stop=bool(answer))
    if not isinstance(answer, Feedback):
        raise TypeError(f"a function that watches a turn must return a bool, None or Feedback, got {answer!r}")
    return answer


async def _result_of(watch: Watch, turn: Rollout) -> Any:
    answer: Any = watch(turn)
    return await answer if inspect.isawaitable(answer) else answer


class Watcher:
    """Watches one turn, and keeps the feedback."""

    def __init__(self, watch: Watch, every: Every, fork: Callable[[list[int], int], "asyncio.Future[list[Any]]"]):
        """fork: begins a number of other continuations of the first tokens of the turn. Raises ValueError for `every`
        out of range."""
        if every != "line" and (not isinstance(every, Integral) or isinstance(every, bool) or every < 1):
            raise ValueError(f'every must be at least 1, or "line", got {every!r}')
        self.every: Every = every
        self._watch, self._fork = watch, fork
        self.rewards: list[tuple[int, float]] = []
        """Rewards of parts of the turn, each with the number of tokens up to the end of the part."""
        self.seen: list[int] = []
        """Lengths of the parts that the function got, in tokens."""
        self._forks: list[asyncio.Future[list[Any]]] = []

    async def look(self, turn: Rollout) -> bool:
        """Show the function the unfinished turn. Returns True if it ends the turn."""
        count = len(turn.token_ids)
        self.seen.append(count)
        feedback = await feedback_of(self._watch, turn)
        most = count - bool(turn.finish_reason)
        at = count if feedback.at is None else feedback.at
        if feedback.at is not None and at > most:
            raise ValueError(f"a fork of this turn can begin at token {most} or before, got at={at}")
        if feedback.reward is not None:
            self.rewards.append((count, float(feedback.reward)))
        if feedback.forks and at <= most:
            self._forks.append(self._fork(turn.token_ids[:at].tolist(), feedback.forks))
        return feedback.stop

    async def forks(self) -> list[Any]:
        """Return the forks when all of them have ended."""
        return [fork for forks in await asyncio.gather(*self._forks) for fork in forks]

    def cancel(self) -> None:
        """Cancel the forks in progress."""
        for forks in self._forks:
            forks.cancel()


def parts_of(turn: Rollout, every: Every, text_of: TextOf, seen: int = 0) -> Iterator[Rollout]:
    """Yield the parts of a turn, each from its beginning, that a function has to see after it has seen `seen`
    tokens. The last part of a turn that has ended is the whole turn, the only part with a finish_reason."""
    token_ids, ends = turn.token_ids.tolist(), []
    if every == "line":
        ends = [end for end in range(seen + 1, len(token_ids) + 1) if "\n" in text_of(token_ids[end - 1])]
    elif len(token_ids) >= seen + every:
        ends = [len(token_ids)]
    if turn.finish_reason and [seen, *ends][-1] < len(token_ids):
        ends.append(len(token_ids))
    yield from parts_until(turn, ends)


def parts_until(turn: Rollout, ends: Iterable[int]) -> Iterator[Rollout]:
    """Yield the parts of a turn that end after these numbers of tokens."""
    return (turn.until(end) if end < len(turn.token_ids) else turn for end in ends)


class TurnBell(FrameBell):
    """Wakes tasks that watch turns. It listens to the stream only while there are some."""

    async def parts(
        self, group_id: int, final: "asyncio.Future[Rollout]", every: Every, text_of: TextOf
    ) -> AsyncIterator[Rollout]:
        """Yield parts of the unfinished sample of a group of one until `final` is done, and then the parts of the
        finished sample that are left."""
        seen = 0
        self._follow(+1)
        try:
            while not final.done():
                woken = self.next
                for part in self._ledger.frames.partial(group_id):
                    for look in parts_of(part, every, text_of, seen):
                        seen = len(look.token_ids)
                        yield look
                await asyncio.wait({final, woken}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({final}, timeout=_PAUSE_S)
        finally:
            self._follow(-1)
        for part in parts_of(await final, every, text_of, seen):
            yield part

    def _follow(self, change: int) -> None:
        before, self.num_followers = self.num_followers, self.num_followers + change
        if not before:
            self._ledger.frames.listen(self._frame)
        elif not self.num_followers:
            self._ledger.frames.unlisten(self._frame)
