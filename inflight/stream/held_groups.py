"""Groups of the ledger: the size of one, and the totals of several."""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from inflight.core.messages import Ids, Prompt
from inflight.core.rollout import Rollout

Group = list[Rollout]
Sample = TypeVar("Sample")


class SavedCall(msgspec.Struct, frozen=True):
    """A call of a tool or an environment in an episode in progress."""

    sample: int
    env: int
    """0 for functions without a state; otherwise the number of the environment in the episode."""
    number: int
    """Index among the calls of the same environment, in the order of their requests."""
    digest: bytes
    """Digest of the name of the function and its arguments; b"" if they cannot be stored."""
    result: bytes | None = None
    """The encoded result or exception; None for a call in progress, or if it cannot be stored."""
    state: bytes | None = None
    """The encoded state of the environment after the call, if it is kept."""


class SavedGroup(msgspec.Struct, Generic[Sample], frozen=True):
    """An outstanding group, with its samples so far: rollouts, or their headers in a file."""

    ids: Ids
    reserved: bool
    """Only callers that name it get it."""
    prompt: Prompt
    """The submitted prompt, with a seed."""
    forked_from: tuple[int, int] | None
    """The request that it is forked from, and the number of tokens of that request."""
    rollouts: list[Sample]
    """Its samples; the finish_reason of an unfinished one is "". The drawn turns of episodes in progress."""
    is_open: bool = False
    """It is a group of episodes in progress."""
    calls: list[SavedCall] = []
    """Calls of tools and environments of episodes in progress."""
    cancelled: list[int] = []
    """Ids of requests that have to end, on any engine that draws them."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Tokens, rollouts and bytes of a finished group."""

    num_tokens: int
    num_rollouts: int
    nbytes: int
    oldest: int | None
    """The oldest version of a token, if there is one."""

    @classmethod
    def of(cls, group: Group) -> "GroupSize":
        scores = group[0].prompt_scores
        drawn = [rollout.weight_versions[rollout.drawn] for rollout in group]
        return cls(
            num_tokens=sum(len(rollout.token_ids) for rollout in group),
            num_rollouts=len(group),
            nbytes=sum(rollout.nbytes for rollout in group) + (0 if scores is None else scores.nbytes),
            oldest=min((int(versions.min()) for versions in drawn if len(versions)), default=None),
        )


class HeldGroups:
    """Totals of the tokens, rollouts and bytes of finished groups."""

    def __init__(self) -> None:
        self.num_tokens = self.num_rollouts = self.nbytes = 0
        self._versions: Counter[int] = Counter()
        """Maps the oldest version of a token of a group to the number of such groups."""

    @property
    def oldest(self) -> int | None:
        return min(self._versions, default=None)

    def add(self, size: GroupSize, sign: int = 1) -> None:
        """sign: −1 removes a group."""
        self.num_tokens += sign * size.num_tokens
        self.num_rollouts += sign * size.num_rollouts
        self.nbytes += sign * size.nbytes
        if size.oldest is not None:
            self._versions[size.oldest] += sign
            if not self._versions[size.oldest]:
                del self._versions[size.oldest]
