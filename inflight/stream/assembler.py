"""Turns frames into rollouts, and rollouts into groups."""

from dataclasses import dataclass, field

import numpy as np

from inflight.core.frames import GroupStart, TokenFrame
from inflight.core.rollout import Rollout


@dataclass(slots=True)
class _Partial:
    """What has arrived of one request."""

    group: GroupStart
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    start: GroupStart
    finished: list[Rollout] = field(default_factory=list)


class Assembler:
    """Feed it frames in order; it returns the groups that each completes.

    What it cannot account for it does not guess at: rows of requests whose start it never saw are counted in
    `num_orphan_tokens`; a request of which tokens are missing comes out empty, with finish_reason "error".
    """

    def __init__(self) -> None:
        self._partials: dict[int, _Partial] = {}
        self._groups: dict[int, _Group] = {}
        self.num_tokens = 0
        self.num_orphan_tokens = 0

    def knows(self, group_id: int) -> bool:
        """Whether the group has started and not ended."""
        return group_id in self._groups

    def abandon(self) -> list[list[Rollout]]:
        """After frames were lost: end what is unfinished as "error", since nobody can tell whether it is whole."""
        for request_id, partial in self._partials.items():
            rollout = _rollout(request_id, _Partial(partial.group), "error")
            self._groups[partial.group.group_id].finished.append(rollout)
        groups = [sorted(group.finished, key=lambda rollout: rollout.sample) for group in self._groups.values()]
        self._partials.clear()
        self._groups.clear()
        return groups

    def add(self, frame: TokenFrame) -> list[list[Rollout]]:
        """Groups that this frame completes, each in sample order."""
        header = frame.header
        for group in header.groups:
            self._groups[group.group_id] = _Group(group)
            for sample in range(group.params.n):
                self._partials[group.first_request_id + sample] = _Partial(group)
        self._append(frame)
        complete = []
        for finish in header.finishes:
            partial = self._partials.pop(finish.request_id, None)
            if partial is None:
                continue
            if len(partial.token_ids) == finish.num_tokens:
                rollout = _rollout(finish.request_id, partial, finish.reason)
            else:
                rollout = _rollout(finish.request_id, _Partial(partial.group), "error")
            group_state = self._groups[partial.group.group_id]
            group_state.finished.append(rollout)
            if len(group_state.finished) == group_state.start.params.n:
                del self._groups[partial.group.group_id]
                complete.append(sorted(group_state.finished, key=lambda rollout: rollout.sample))
        return complete

    def _append(self, frame: TokenFrame) -> None:
        version, time_ns = frame.header.version, frame.header.time_ns
        rows = zip(frame.request_ids.tolist(), frame.token_ids.tolist(), frame.logprobs.tolist(), strict=True)
        for request_id, token_id, logprob in rows:
            partial = self._partials.get(request_id)
            if partial is None:
                self.num_orphan_tokens += 1
                continue
            partial.token_ids.append(token_id)
            partial.logprobs.append(logprob)
            partial.versions.append(version)
            partial.times_ns.append(time_ns)
        self.num_tokens += frame.header.num_tokens


def _rollout(request_id: int, partial: _Partial, reason: str) -> Rollout:
    group = partial.group
    return Rollout(
        request_id=request_id,
        group_id=group.group_id,
        sample=request_id - group.first_request_id,
        params=group.params,
        metadata=group.metadata,
        prompt_token_ids=np.array(group.prompt_token_ids, np.int32),
        token_ids=np.array(partial.token_ids, np.int32),
        logprobs=np.array(partial.logprobs, np.float32),
        weight_versions=np.array(partial.versions, np.int64),
        sampled_at_ns=np.array(partial.times_ns, np.int64),
        finish_reason=reason,
    )
