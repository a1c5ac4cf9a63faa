"""Settles the reward of an episode when it has ended."""

from collections.abc import Mapping

from inflight.core.failures import Failures
from inflight.episodes.limits import TIMEOUTS, AtEnd, Limits
from inflight.episodes.session import Session

Reward = float | Mapping[str, float] | None
"""Result of a rollout function."""


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
    if at_end == "exclude" or not session.has_drawn:
        return None, {}, reason
    if at_end != "keep":
        session.reward(at_end)
    return session.total_reward or 0.0, {}, reason


def finish_reason(session: Session, reason: str, reward: float | None) -> str:
    """Return "length" for an episode that was cut by a limit or in its last turn, "cancelled" for one that takes no
    part in training, and "error" after an exception."""
    if reason.startswith("error"):
        return "error"
    if reason != "completed":
        return "cancelled" if reward is None else "length"
    last = [segment.last_finish_reason for segment in session.segments if segment.num_turns]
    return last[-1] if last else "stop"
