"""The choice of a lead, and its state: records of the lead controller for reports, logs and the live page."""

from dataclasses import dataclass
from enum import IntEnum
from math import isnan
from typing import Any, Literal

WAIT_SHARE = 0.02
"""Largest share of its time that the trainer should wait for groups."""


class Rule(IntEnum):
    """Rules that decide when the next group starts."""

    FIXED = 0
    FIRST_STEPS = 1
    JUST_IN_TIME = 2
    GROWING = 3
    GENERATOR = 4
    BOUND = 5
    SCORES = 6


_REASONS = {
    Rule.FIXED: "a fixed number of batches ahead",
    Rule.FIRST_STEPS: "one batch until the times of steps are known",
    Rule.JUST_IN_TIME: "the smallest lead with which the trainer hardly waits",
    Rule.GROWING: "the trainer waited too long, and the lead grows",
    Rule.GENERATOR: "the generator is the slower half, and more groups would not speed it up",
    Rule.BOUND: "the bound on groups in flight",
    Rule.SCORES: "more groups in flight do not shorten the waits: scores or tools are the slower half",
}


@dataclass(frozen=True, slots=True)
class LeadState:
    """The lead after a step, and its reason."""

    seconds: float
    """The lead; NaN in the first steps, and with a fixed bound."""
    groups: int
    """Groups in flight: started, and not taken by the trainer."""
    wait_share: float
    """Share of the time of the last steps in which the trainer waited for groups; NaN before the first."""
    rule: Rule
    """The rule that decides when the next group starts."""

    @property
    def reason(self) -> str:
        """The rule in words."""
        return _REASONS[self.rule]

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name; "rule" is the number of the `Rule`."""
        numbers = {"seconds": self.seconds, "groups": float(self.groups), "wait_share": self.wait_share}
        return numbers | {"rule": float(self.rule)}

    def __str__(self) -> str:
        lead = "" if isnan(self.seconds) else f"lead {self.seconds:.3g} s, "
        wait = "" if isnan(self.wait_share) else f"the trainer waited {self.wait_share:.1%} of the time, "
        return f"{lead}{wait}{self.groups} groups in flight: {self.reason}"


def check_ahead(ahead: int | str) -> None:
    """Raise ValueError unless it is "auto" or a number of batches."""
    if ahead != "auto" and not (isinstance(ahead, int) and not isinstance(ahead, bool) and ahead >= 0):
        raise ValueError(f'ahead must be "auto" or a number of batches of at least 0, got {ahead!r}')


def read_ahead(text: str) -> int | Literal["auto"]:
    """Return the value of `--ahead`: "auto", or a number. Raises ValueError."""
    ahead: Any = int(text) if text.isdecimal() else text
    check_ahead(ahead)
    return ahead
