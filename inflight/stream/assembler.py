"""Turns frames into rollouts, and rollouts into groups."""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import repeat

import msgspec
import numpy as np

from inflight.core.columns import COLUMNS, SCORES, TOKENS, asked_columns
from inflight.core.errors import FrameError, TokenColumnError
from inflight.core.frames import GroupStart, TokenFrame
from inflight.core.rollout import Rollout, SamplingMask
from inflight.stream.row_index import RowIndex
from inflight.stream.token_store import TokenStore
from inflight.stream.unfinished import UnfinishedGroup, UnfinishedRequest, ids_of

_RAGGED = {name for name, column in COLUMNS.items() if column.dims[0] != TOKENS} | {"mask_cut_from"}
"""Columns that are not kept in the token store."""


class Assembler:
    """Assembles groups from frames in order. Each frame yields the groups that it completes.

    Incomplete data is not guessed: rows of requests whose start never arrived are counted in `num_orphan_tokens`; a
    request with missing tokens ends empty, with finish_reason "error".
    """

    def __init__(self) -> None:
        self.groups: dict[int, UnfinishedGroup] = {}
        """Groups that have started and not ended, by their ids."""
        self._requests: dict[int, UnfinishedRequest] = {}
        self._store = TokenStore()
        self._index = RowIndex()
        """Maps request ids to the places of their tokens in the store."""
        self.num_tokens = 0
        self.num_orphan_tokens = 0
        self.num_unfinished_tokens_at: Counter[str] = Counter()
        """Maps the id of an engine to the number of tokens stored here of its requests."""
        self.faults: dict[int, TokenColumnError] = {}
        """Maps groups to the errors of requests whose tokens lack a column that the request asked for. The reader of
        the frames removes them."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that unfinished requests take, without ragged data (sampling masks, experts)."""
        scores = (group.prompt_scores for group in self.groups.values())
        return self._store.nbytes + sum(each.nbytes for each in scores if each is not None)

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have started and not ended."""
        return len(self._requests)

    def partial(self, group_id: int) -> list[Rollout]:
        return self.groups[group_id].partial() if group_id in self.groups else []

    def restore(self, start: GroupStart, rollouts: Iterable[Rollout]) -> None:
        """Continue a group of another assembler, with these samples as that assembler had received them."""
        self._begin(start)
        for rollout in rollouts:
            request = self._requests[rollout.request_id]
            request.group.prompt_scores = rollout.prompt_scores or request.group.prompt_scores
            if rollout.finish_reason:
                self._drop(request)
                request.group.finished.append(rollout)
            else:
                request.restore(rollout)
                self.num_unfinished_tokens_at[request.group.engine_id] += len(rollout.token_ids)

    def forget(self, group_ids: Set[int]) -> None:
        """Delete these groups, of which nothing will arrive any more."""
        for group_id in self.groups.keys() & group_ids:
            for request in list(self.groups.pop(group_id).requests.values()):
                self._drop(request)

    def fail(self, group_id: int) -> list[Rollout]:
        """End the unfinished samples of a group as "error", with the tokens so far. Returns the group."""
        requests = list(self.groups[group_id].requests.values())
        [*_, group] = [self._end(request, "error") for request in requests]
        assert group is not None
        return group

    def abandon(self) -> list[list[Rollout]]:
        """End all unfinished samples as "error" after frames were lost, since any of them might lack tokens. Returns
        their groups."""
        ended = [self._end(request, None) for request in list(self._requests.values())]
        return [group for group in ended if group is not None]

    def add(self, frame: TokenFrame) -> list[list[Rollout]]:
        """Add a frame, and return the groups that it completes, each in sample order. Raises FrameError if it starts
        other requests under the ids of unfinished ones."""
        header = frame.header
        for start in header.groups:
            if (group := self.groups.get(start.group_id)) is None:
                self._begin(start, header.engine_id)
            elif ids_of(start) != group.ids:
                raise FrameError(f"group {start.group_id} has begun already, with other requests")
            else:  # another engine continues it
                num_tokens = sum(request.num_tokens for request in group.requests.values())
                self.num_unfinished_tokens_at[group.engine_id] -= num_tokens
                self.num_unfinished_tokens_at[header.engine_id] += num_tokens
                group.engine_id = header.engine_id
                group.start = msgspec.structs.replace(group.start, pin=start.pin)
        for part in header.taken_over:
            if (request := self._requests.get(part.request_id)) is not None:  # record the worst case
                request.prefix_tokens = max(part.num_tokens, request.prefix_tokens)
                known = request.prefix_version
                request.prefix_version = part.version if known is None else min(part.version, known)
        self._append(frame)
        complete = []
        for finish in header.finishes:
            request = self._requests.get(finish.request_id)
            if request is None:
                continue
            group = self._end(request, finish.reason if request.num_tokens == finish.num_tokens else None)
            if group is not None:
                complete.append(group)
        return complete

    def _begin(self, start: GroupStart, engine_id: str = "") -> None:
        group = UnfinishedGroup(start, np.array(start.prompt_token_ids, np.int32), engine_id)
        if not self._requests.keys().isdisjoint(group.ids):
            raise FrameError(
                f"group {start.group_id} has requests {group.ids[0]} to {group.ids[-1]}, some of another group"
            )
        columns = asked_columns(start.params)
        masked = start.params.return_sampling_mask and not start.params.greedy
        for i in group.ids:
            request = UnfinishedRequest(i, group, self._store, self._store.open(columns), [] if masked else None)
            self._requests[i] = group.requests[i] = request
        self.groups[start.group_id] = group
        self._index.add(group.ids[0], [request.tokens.row for request in group.requests.values()])

    def _end(self, request: UnfinishedRequest, reason: str | None) -> list[Rollout] | None:
        """Finish a request. Without a reason it ends as "error", without tokens. Returns its group if that is
        complete."""
        group = request.group
        group_id = group.start.group_id
        lacks = request.lacks() if reason not in (None, "error") else []  # a row with a NaN has no sampling mask
        if lacks:
            self.faults[group_id] = TokenColumnError(
                f"request {request.request_id} of group {group_id} asked for {', '.join(lacks)}, and the engine "
                "sent tokens without it. The sampler has to compute each column that the engine accepts; until then "
                "leave it out of SamplingParams"
            )
        rollout = request.rollout("error" if lacks else reason or "error", whole=reason is not None)
        self._drop(request)
        group.finished.append(rollout)
        if len(group.finished) < group.start.params.n:
            return None
        del self.groups[group_id]
        return sorted(group.finished, key=lambda rollout: rollout.sample)

    def _drop(self, request: UnfinishedRequest) -> None:
        """Free the place of an unfinished request."""
        del self._requests[request.request_id], request.group.requests[request.request_id]
        self.num_unfinished_tokens_at[request.group.engine_id] -= request.num_tokens
        self._store.close(request.tokens)
        self._index.remove(request.request_id)

    def _append(self, frame: TokenFrame) -> None:
        header, extras = frame.header, frame.extras
        self.num_tokens += header.num_tokens
        known, rows = self._index.find_again(header.engine_id, frame.request_ids)
        self.num_orphan_tokens += header.num_tokens - len(rows)
        self.num_unfinished_tokens_at[header.engine_id] += len(rows)
        columns = {"token_ids": frame.token_ids, "logprobs": frame.logprobs}
        columns |= {name: values for name, values in extras.items() if name not in _RAGGED}
        if len(rows) < header.num_tokens:
            columns = {name: values[known] for name, values in columns.items()}
        if extras:
            _add_extras(self._requests, frame)  # before its tokens are stored: no token depended on these experts yet
        self._store.append(rows, header.version, header.time_ns, columns)


def _add_extras(requests: Mapping[int, UnfinishedRequest], frame: TokenFrame) -> None:
    """Add sampling masks and experts of tokens to these requests, and scores of prompts to their groups."""
    extras = frame.extras
    if "routed_experts" in extras:
        ids, positions = extras["routed_request_ids"].tolist(), extras["routed_positions"].tolist()
        for request_id, position, experts in zip(ids, positions, extras["routed_experts"], strict=True):
            if (request := requests.get(request_id)) is not None:
                request.add_experts([(position, experts)])
    if "scored_logprobs" in extras:
        ids, places = extras["scored_request_ids"], extras["scored_positions"]
        for request_id in np.unique(ids).tolist():
            if (request := requests.get(request_id)) is not None:
                own = ids == request_id
                request.group.add_scores(places[own], {name: extras[f"scored_{name}"][own] for name in SCORES})
    if "mask_offsets" in extras:
        ids = SamplingMask(extras["mask_token_ids"], extras["mask_offsets"]).split()
        cut_from = extras["mask_cut_from"].tolist() if "mask_cut_from" in extras else repeat(0)
        for request_id, mask in zip(frame.request_ids.tolist(), zip(ids, cut_from, strict=False), strict=True):
            request = requests.get(request_id)
            if request is not None and request.masks is not None and (len(mask[0]) or mask[1]):
                request.masks.append(mask)  # an empty mask means that the token has none
