"""Turns frames into rollouts, and rollouts into groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from inflight.core.columns import COLUMNS, asked_columns
from inflight.core.frames import GroupStart, TokenFrame
from inflight.core.rollout import Rollout, SamplingMask
from inflight.core.sampling import SamplingParams

_MASK = "sampling mask"
"""The rows of the mask among those of columns; no column can have this name."""


@dataclass(slots=True)
class _Group:
    start: GroupStart
    finished: list[Rollout] = field(default_factory=list)
    prompt_routed_experts: dict[int, np.ndarray] = field(default_factory=dict)
    """Maps a position to its experts; whichever sample computed the prompt did it for all."""


@dataclass(slots=True)
class _Partial:
    """What has arrived of one request."""

    group: _Group
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Maps the name of each column that the request asked for to its rows."""
    routed_experts: dict[int, np.ndarray] = field(default_factory=dict)
    """Maps a position to its experts; the first time that a token was computed counts."""
    prefix_tokens: int = 0
    prefix_version: int | None = None


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
        """True if the group has started and not ended."""
        return group_id in self._groups

    def partial(self, group_id: int) -> list[Rollout]:
        """What has arrived of the unfinished samples of a group."""
        if group_id not in self._groups:
            return []
        start, known = self._groups[group_id].start, self._partials
        ids = range(start.first_request_id, start.first_request_id + start.params.n)
        return [_rollout(request_id, known[request_id], "") for request_id in ids if request_id in known]

    def abandon(self) -> list[list[Rollout]]:
        """After frames were lost: end what is unfinished as "error", since nobody can tell whether it is whole."""
        partials, self._partials = self._partials, {}
        ended = [self._end(request_id, _Partial(partial.group), "error") for request_id, partial in partials.items()]
        return [group for group in ended if group is not None]

    def add(self, frame: TokenFrame) -> list[list[Rollout]]:
        """Groups that this frame completes, each in sample order."""
        header = frame.header
        for start in header.groups:
            self._groups[start.group_id] = group = _Group(start)
            asked = _asked(start.params)
            for sample in range(start.params.n):
                partial = _Partial(group, columns={name: [] for name in asked})
                self._partials[start.first_request_id + sample] = partial
        for part in header.taken_over:
            if (partial := self._partials.get(part.request_id)) is not None:  # what it was, at the worst
                partial.prefix_tokens = max(part.num_tokens, partial.prefix_tokens)
                known = partial.prefix_version
                partial.prefix_version = part.version if known is None else min(part.version, known)
        self._append(frame)
        complete = []
        for finish in header.finishes:
            partial = self._partials.pop(finish.request_id, None)
            if partial is None:
                continue
            if len(partial.token_ids) == finish.num_tokens:
                group = self._end(finish.request_id, partial, finish.reason)
            else:
                group = self._end(finish.request_id, _Partial(partial.group), "error")
            if group is not None:
                complete.append(group)
        return complete

    def _end(self, request_id: int, partial: _Partial, reason: str) -> list[Rollout] | None:
        """Finish a request; returns its group if that is complete."""
        group = partial.group
        group.finished.append(_rollout(request_id, partial, reason))
        if len(group.finished) < group.start.params.n:
            return None
        del self._groups[group.start.group_id]
        return sorted(group.finished, key=lambda rollout: rollout.sample)

    def _append(self, frame: TokenFrame) -> None:
        version, time_ns = frame.header.version, frame.header.time_ns
        columns: Mapping[str, Any] = frame.extras
        if "mask_offsets" in columns:
            columns = {**columns, _MASK: _mask_rows(columns)}
        rows = zip(frame.request_ids.tolist(), frame.token_ids.tolist(), frame.logprobs.tolist(), strict=True)
        for row, (request_id, token_id, logprob) in enumerate(rows):
            partial = self._partials.get(request_id)
            if partial is None:
                self.num_orphan_tokens += 1
                continue
            partial.token_ids.append(token_id)
            partial.logprobs.append(logprob)
            partial.versions.append(version)
            partial.times_ns.append(time_ns)
            if columns:
                for name, values in partial.columns.items():
                    if name in columns:
                        values.append(columns[name][row])
        if "routed_experts" in frame.extras:
            self._append_routed_experts(frame.extras)
        self.num_tokens += frame.header.num_tokens

    def _append_routed_experts(self, extras: Mapping[str, np.ndarray]) -> None:
        ids, positions = extras["routed_request_ids"].tolist(), extras["routed_positions"].tolist()
        for row, (request_id, position) in enumerate(zip(ids, positions, strict=True)):
            partial = self._partials.get(request_id)
            if partial is not None:
                in_prompt = position < len(partial.group.start.prompt_token_ids)
                known = partial.group.prompt_routed_experts if in_prompt else partial.routed_experts
                known.setdefault(position, extras["routed_experts"][row])


def _asked(params: SamplingParams) -> list[str]:
    """Names of the columns that a group asked for, the sampling mask among them."""
    return asked_columns(params) + ([_MASK] if params.return_sampling_mask and params.filtered else [])


def _mask_rows(extras: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, int]]:
    """(token ids, the vocabulary that they were cut from or 0) of each row."""
    ids = SamplingMask(extras["mask_token_ids"], extras["mask_offsets"]).split()
    return list(zip(ids, extras["mask_cut_from"] if "mask_cut_from" in extras else repeat(0), strict=False))


def _stack(name: str, rows: list[Any], params: SamplingParams) -> np.ndarray:
    """The rows as one array, each no longer than the request asked for."""
    column = COLUMNS.get(name)
    width = column.asked_by(params) if column is not None and len(column.dims) > 1 else None
    return np.array(rows if width is None else [row[:width] for row in rows])


def _rollout(request_id: int, partial: _Partial, reason: str) -> Rollout:
    group = partial.group.start
    rollout = Rollout(
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
        forked_from=group.forked_from,
        prefix_tokens=partial.prefix_tokens,
        prefix_version=partial.prefix_version,
    )
    num_tokens = len(partial.token_ids)
    whole = {name: rows for name, rows in partial.columns.items() if num_tokens and len(rows) == num_tokens}
    if _MASK in whole:
        rollout.sampling_mask = SamplingMask.join(*zip(*whole.pop(_MASK), strict=True))
    rollout.columns = {name: _stack(name, rows, group.params) for name, rows in whole.items()}
    experts = partial.group.prompt_routed_experts | partial.routed_experts
    places = range(len(group.prompt_token_ids) + num_tokens - 1)
    if num_tokens and experts and all(place in experts for place in places):
        rollout.routed_experts = np.stack([experts[place] for place in places])
    return rollout
