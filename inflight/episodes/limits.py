"""Limits of an episode, and the reasons for its end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Any, Literal

from inflight.core.arguments import named
from inflight.core.rate_limit import RateLimit

AtEnd = float | Literal["keep", "exclude"]
"""The reward of an episode that reached a limit. keep: the rewards so far. exclude: none, so that it takes no part in
training, and not in the baseline of its group either. A number: this reward in addition to those so far."""

Reward = float | Mapping[str, float] | None
"""Result of a rollout function: a reward, its named parts, or None."""


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of each stage of an episode. 0: no limit, except for the times."""

    max_turns: int = 0
    """Maximum number of drawn turns."""
    max_tokens: int = 0
    """Maximum number of tokens that the policy draws in the episode. The last turn is cut. Turns that are drawn at the
    same time do not count for one another."""
    max_calls: int = 0
    """Maximum number of calls of tools and environments (`Session.call`)."""
    turn_s: float = 600.0
    """Maximum time of a turn, in seconds, from its request to its last token."""
    call_s: float = 60.0
    """Maximum time of a call of `Session.call`, in seconds. Afterwards the call raises TimeoutError."""
    rates: Mapping[Callable[..., Any], RateLimit] = field(default_factory=dict)
    """Rate limits of functions that `Session.call` and `Session.use_tools` call. A call waits for its turn as long as
    it may take, and this time is not a part of it."""
    episode_s: float = 3600.0
    """Maximum time of the episode, in seconds. Afterwards its task is cancelled."""
    cleanup_s: float = 30.0
    """Maximum time for the cleanup of a cancelled episode, in seconds. Then it is left behind, with a log line."""
    at_limit: AtEnd = "keep"
    """The reward of an episode that ended at a number of turns, tokens or calls, or at the end of the context. "keep":
    the rewards so far, or 0. "exclude": none; that favours tasks with short episodes. A number is added. A rollout
    function that catches EpisodeEnd can return a reward instead."""
    at_timeout: AtEnd = "exclude"
    """The same for an episode that ended at `turn_s` or `episode_s`."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_calls"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("turn_s", "call_s", "episode_s", "cleanup_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for function, rate in self.rates.items():
            if not (callable(function) and isinstance(rate, RateLimit)):
                raise TypeError(f"rates must map functions to RateLimits, got {function!r}: {rate!r}")
        for name in ("at_limit", "at_timeout"):
            value = getattr(self, name)
            if value not in ("keep", "exclude") and not (isinstance(value, Real) and isfinite(value)):
                raise ValueError(f'{name} must be "keep", "exclude" or a finite number, got {value!r}')


class EpisodeEnd(Exception):
    """The session has ended the episode: a limit was reached, or the episode was cancelled. A rollout function can
    catch it to clean up, or to return a reward; every later call of the session raises it again."""

    def __init__(self, reason: str):
        """reason: max_turns, max_tokens, max_calls, max_steps (an environment's own limit), context, turn_timeout,
        episode_timeout, cancelled or closed."""
        super().__init__(f"the episode has ended: {reason}")
        self.reason = reason


TIMEOUTS = ("turn_timeout", "episode_timeout")
