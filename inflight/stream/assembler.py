"""Turns frames into rollouts, and rollouts into groups."""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

from inflight.core.columns import COLUMNS, SCORES, TOKENS, asked_columns
from inflight.core.errors import FrameError, TokenColumnError
from inflight.core.frames import GroupStart, TokenFrame
from inflight.core.rollout import PromptScores, Rollout, SamplingMask
from inflight.core.sampling import SamplingParams
from inflight.stream.row_index import Found, RowIndex
from inflight.stream.token_store import COLUMNS_OF_ALL, StoredTokens, TokenStore

_RAGGED = {name for name, column in COLUMNS.items() if column.dims[0] != TOKENS} | {"mask_cut_from"}
"""Columns that are not kept in the token store."""


@dataclass(slots=True)
class _Group:
    start: GroupStart
    prompt_token_ids: np.ndarray
    """i32[P], shared by its rollouts."""
    finished: list[Rollout] = field(default_factory=list)
    prompt_routed_experts: dict[int, np.ndarray] = field(default_factory=dict)
    """Maps a position to its experts; the sample that computes the prompt does it for all."""
    prompt_scores: PromptScores | None = None
    """Scores of its prompt, if it asked for them; the sample that computes the prompt does it for all."""
    engine_id: str = ""
    """The engine that draws it."""

    def open_scores(self) -> PromptScores | None:
        """Return the arrays for the scores of its prompt, or None if it did not ask for them."""
        top = self.start.params.prompt_logprobs
        if self.prompt_scores is None and top is not None:
            self.prompt_scores = PromptScores.unknown(max(0, len(self.prompt_token_ids) - 1), top)
        return self.prompt_scores

    def known_scores(self) -> PromptScores | None:
        """Return the scores of its prompt, if all have arrived; a prompt of one token has none to wait for."""
        scores = self.open_scores() if len(self.prompt_token_ids) <= 1 else self.prompt_scores
        return scores if scores is not None and scores.known else None


@dataclass(slots=True)
class _Partial:
    """Tokens and extras of one unfinished request."""

    group: _Group
    tokens: StoredTokens
    masks: list[tuple[np.ndarray, int]] | None = None
    """The sampling mask of each token, if the request asked for it: its ids, and the size of the vocabulary that they
    were cut from, or 0."""
    routed_experts: dict[int, np.ndarray] = field(default_factory=dict)
    """Maps a position to its experts, as they were when the drawn token there was first computed."""
    prefix_tokens: int = 0
    prefix_version: int | None = None


class Assembler:
    """Assembles groups from frames in order. Each frame yields the groups that it completes.

    Incomplete data is not guessed: rows of requests whose start never arrived are counted in `num_orphan_tokens`; a
    request with missing tokens ends empty, with finish_reason "error".
    """

    def __init__(self) -> None:
        self._partials: dict[int, _Partial] = {}
        self._groups: dict[int, _Group] = {}
        self._store = TokenStore()
        self._index = RowIndex()
        """Maps request ids to the places of their tokens in the store."""
        self._last: dict[str, tuple[bytes, Found]] = {}
        """Maps each engine to the request ids of its last frame and the result of their lookup."""
        self.num_tokens = 0
        self.num_orphan_tokens = 0
        self.num_unfinished_tokens_at: Counter[str] = Counter()
        """Maps the id of an engine to the number of tokens stored here of its requests."""
        self.next_request_id = 0
        """All announced requests have smaller ids."""
        self.faults: dict[int, TokenColumnError] = {}
        """Maps groups to the errors of requests whose tokens lack a column that the request asked for. The reader of
        the frames removes them."""

    @property
    def num_unfinished_tokens(self) -> int:
        """Number of tokens stored here."""
        return self.num_unfinished_tokens_at.total()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that unfinished requests take, without ragged data (sampling masks, experts)."""
        scores = (group.prompt_scores for group in self._groups.values())
        return self._store.nbytes + sum(each.nbytes for each in scores if each is not None)

    def knows(self, group_id: int) -> bool:
        """True if the group has started and not ended."""
        return group_id in self._groups

    def partial(self, group_id: int) -> list[Rollout]:
        """Return the unfinished samples of a group, with the tokens so far."""
        if group_id not in self._groups:
            return []
        unfinished = self._unfinished(self._groups[group_id])
        return [self._rollout(request_id, partial, "") for request_id, partial in unfinished.items()]

    def drawn(self, group_id: int) -> dict[int, list[int]] | None:
        """Map the unfinished requests of a group to their tokens so far; None if nothing is known of the group."""
        if group_id not in self._groups:
            return None
        group = self._groups[group_id]
        tokens = {i: self._store.read(partial.tokens)["token_ids"] for i, partial in self._unfinished(group).items()}
        return {request_id: ids.tolist() for request_id, ids in tokens.items()}

    def known(self, group_id: int) -> list[Rollout]:
        """Return all samples of an unfinished group: the ended ones, and the others with the tokens so far."""
        return [*self._groups[group_id].finished, *self.partial(group_id)]

    def since(self, group_id: int, seen: Mapping[int, int]) -> list[Rollout]:
        """Return the samples of `known` without the tokens that the caller has, and without sampling masks and experts.
        seen: maps request ids to the number of those tokens; 0 for other requests."""
        group = self._groups[group_id]
        ended = [rollout.since(seen.get(rollout.request_id, 0)) for rollout in group.finished]
        unfinished = self._unfinished(group).items()
        return ended + [self._columns_since(i, partial, seen.get(i, 0)) for i, partial in unfinished]

    def restore(self, start: GroupStart, rollouts: Iterable[Rollout]) -> None:
        """Continue a group of another assembler, with these samples as that assembler had received them."""
        self._begin(start)
        for rollout in rollouts:
            partial = self._partials[rollout.request_id]
            partial.group.prompt_scores = rollout.prompt_scores or partial.group.prompt_scores
            if rollout.finish_reason:
                self._drop(rollout.request_id)
                partial.group.finished.append(rollout)
            else:
                self._restore(partial, rollout)

    def _restore(self, partial: _Partial, rollout: Rollout) -> None:
        self._store.fill(partial.tokens, {name: getattr(rollout, name) for name in COLUMNS_OF_ALL} | rollout.columns)
        self.num_unfinished_tokens_at[partial.group.engine_id] += len(rollout.token_ids)
        partial.prefix_tokens, partial.prefix_version = rollout.prefix_tokens, rollout.prefix_version
        if (mask := rollout.sampling_mask) is not None:
            cut_from = repeat(0) if mask.cut_from is None else mask.cut_from.tolist()
            partial.masks = list(zip(mask.split(), cut_from, strict=False))
        if rollout.routed_experts is not None:
            self._know_experts(partial, enumerate(rollout.routed_experts))

    def forget(self, group_ids: Set[int]) -> None:
        """Delete these groups, of which nothing will arrive any more."""
        for group_id in self._groups.keys() & group_ids:
            for request_id in self._unfinished(self._groups.pop(group_id)):
                self._drop(request_id)

    def fail(self, group_id: int) -> list[Rollout]:
        """End the unfinished samples of a group as "error", with the tokens so far. Returns the group."""
        unfinished = self._unfinished(self._groups[group_id])
        [*_, group] = [self._end(request_id, partial, "error") for request_id, partial in unfinished.items()]
        assert group is not None
        return group

    def abandon(self) -> list[list[Rollout]]:
        """End all unfinished samples as "error" after frames were lost, since any of them might lack tokens. Returns
        their groups."""
        ended = [self._end(request_id, partial, None) for request_id, partial in self._partials.copy().items()]
        return [group for group in ended if group is not None]

    def add(self, frame: TokenFrame) -> list[list[Rollout]]:
        """Add a frame, and return the groups that it completes, each in sample order. Raises FrameError if it starts
        other requests under the ids of unfinished ones."""
        header = frame.header
        for start in header.groups:
            if start.group_id not in self._groups:
                self._begin(start, header.engine_id)
            elif _ids(start) != _ids(self._groups[start.group_id].start):
                raise FrameError(f"group {start.group_id} has begun already, with other requests")
            else:  # another engine continues it
                self._hand_to(header.engine_id, self._groups[start.group_id])
        for part in header.taken_over:
            if (partial := self._partials.get(part.request_id)) is not None:  # record the worst case
                partial.prefix_tokens = max(part.num_tokens, partial.prefix_tokens)
                known = partial.prefix_version
                partial.prefix_version = part.version if known is None else min(part.version, known)
        self._append(frame)
        complete = []
        for finish in header.finishes:
            partial = self._partials.get(finish.request_id)
            if partial is None:
                continue
            whole = self._store.length(partial.tokens) == finish.num_tokens
            group = self._end(finish.request_id, partial, finish.reason if whole else None)
            if group is not None:
                complete.append(group)
        return complete

    def _unfinished(self, group: _Group) -> dict[int, _Partial]:
        """Return the unfinished requests of a group by their ids."""
        return {i: self._partials[i] for i in _ids(group.start) if i in self._partials}

    def _begin(self, start: GroupStart, engine_id: str = "") -> None:
        ids, columns = _ids(start), asked_columns(start.params)
        if not self._partials.keys().isdisjoint(ids):
            raise FrameError(f"group {start.group_id} has requests {ids[0]} to {ids[-1]}, some of another group")
        self._groups[start.group_id] = group = _Group(
            start, np.array(start.prompt_token_ids, np.int32), engine_id=engine_id
        )
        masked = start.params.return_sampling_mask and not start.params.greedy
        opened = [_Partial(group, self._store.open(columns), [] if masked else None) for _ in ids]
        self._partials.update(zip(ids, opened, strict=True))
        self._index.add(ids[0], [partial.tokens.row for partial in opened])
        self.next_request_id = max(self.next_request_id, ids[-1] + 1)
        self._last.clear()

    def _hand_to(self, engine_id: str, group: _Group) -> None:
        """Note that this engine draws the group from now on."""
        num_tokens = sum(self._store.length(partial.tokens) for partial in self._unfinished(group).values())
        self.num_unfinished_tokens_at[group.engine_id] -= num_tokens
        self.num_unfinished_tokens_at[engine_id] += num_tokens
        group.engine_id = engine_id

    def _end(self, request_id: int, partial: _Partial, reason: str | None) -> list[Rollout] | None:
        """Finish a request. Without a reason it ends as "error", without tokens. Returns its group if that is
        complete."""
        group = partial.group
        lacks = self._lacks(partial) if reason is not None else []
        if lacks:
            self.faults[group.start.group_id] = TokenColumnError(
                f"request {request_id} of group {group.start.group_id} asked for {', '.join(lacks)}, and the engine "
                "sent tokens without it. The sampler has to compute each column that the engine accepts; until then "
                "leave it out of SamplingParams"
            )
        rollout = self._rollout(request_id, partial, "error" if lacks else reason or "error", whole=reason is not None)
        self._drop(request_id)
        group.finished.append(rollout)
        if len(group.finished) < group.start.params.n:
            return None
        del self._groups[group.start.group_id]
        return sorted(group.finished, key=lambda rollout: rollout.sample)

    def _lacks(self, partial: _Partial) -> list[str]:
        """Return the names of the columns that a request asked for and some of its tokens do not have."""
        num_tokens = self._store.length(partial.tokens)
        lacks = [name for name, count in partial.tokens.num_values.items() if count != num_tokens]
        num_masks = num_tokens if partial.masks is None else len(partial.masks)
        if num_masks != num_tokens and (num_masks or partial.group.start.params.filtered):
            lacks.append("sampling_mask")
        return lacks

    def _drop(self, request_id: int) -> None:
        """Free the place of an unfinished request."""
        partial = self._partials.pop(request_id)
        num_tokens = self._store.length(partial.tokens)
        self.num_unfinished_tokens_at[partial.group.engine_id] -= num_tokens
        self._store.close(partial.tokens)
        self._index.remove(request_id)
        self._last.clear()

    def _append(self, frame: TokenFrame) -> None:
        header, extras = frame.header, frame.extras
        self.num_tokens += header.num_tokens
        known, rows = self._find(header.engine_id, frame.request_ids)
        self.num_orphan_tokens += header.num_tokens - len(rows)
        self.num_unfinished_tokens_at[header.engine_id] += len(rows)
        columns = {"token_ids": frame.token_ids, "logprobs": frame.logprobs}
        columns |= {name: values for name, values in extras.items() if name not in _RAGGED}
        if len(rows) < header.num_tokens:
            columns = {name: values[known] for name, values in columns.items()}
        if "routed_experts" in extras:  # before this pass's tokens are stored: no token depended on these experts yet
            self._append_routed_experts(extras)
        if "scored_logprobs" in extras:
            self._append_prompt_scores(extras)
        self._store.append(rows, header.version, header.time_ns, columns)
        if "mask_offsets" in extras:
            self._append_masks(frame.request_ids.tolist(), extras)

    def _find(self, engine_id: str, request_ids: np.ndarray) -> Found:
        """Return which of these requests are known, and the rows of the known ones in the store. A request that is
        named twice counts once; the token count at its end will then differ."""
        key, last = request_ids.tobytes(), self._last.get(engine_id)
        if last is None or last[0] != key:
            self._last[engine_id] = last = key, self._index.find(request_ids)
        return last[1]

    def _append_masks(self, request_ids: list[int], extras: Mapping[str, np.ndarray]) -> None:
        ids = SamplingMask(extras["mask_token_ids"], extras["mask_offsets"]).split()
        cut_from = extras["mask_cut_from"].tolist() if "mask_cut_from" in extras else repeat(0)
        for request_id, mask in zip(request_ids, zip(ids, cut_from, strict=False), strict=True):
            partial = self._partials.get(request_id)
            if partial is not None and partial.masks is not None and (len(mask[0]) or mask[1]):
                partial.masks.append(mask)  # an empty mask means that the token has none

    def _append_routed_experts(self, extras: Mapping[str, np.ndarray]) -> None:
        ids, positions = extras["routed_request_ids"].tolist(), extras["routed_positions"].tolist()
        for request_id, position, experts in zip(ids, positions, extras["routed_experts"], strict=True):
            if (partial := self._partials.get(request_id)) is not None:
                self._know_experts(partial, [(position, experts)])

    def _append_prompt_scores(self, extras: Mapping[str, np.ndarray]) -> None:
        """Store scores of prompts. Until a token is drawn, later scores replace earlier ones, so that all scores of a
        prompt that new weights compute again are from those weights."""
        ids, places = extras["scored_request_ids"], extras["scored_positions"]
        for request_id in np.unique(ids).tolist():
            partial = self._partials.get(request_id)
            scores = None if partial is None else partial.group.open_scores()
            if partial is None or scores is None:
                continue
            chosen = (ids == request_id) & (places >= 0) & (places < len(scores.logprobs))
            rows = places[chosen]
            new = (scores.ranks[rows] == 0) | (not self._has_drawn(partial.group))
            for name in SCORES:
                known, told = getattr(scores, name), extras[f"scored_{name}"][chosen][new]
                if known.ndim > 1:
                    told = told[:, : known.shape[1]]
                    known[rows[new], : told.shape[1]] = told
                else:
                    known[rows[new]] = told

    def _know_experts(self, partial: _Partial, experts: Iterable[tuple[int, np.ndarray]]) -> None:
        """Store experts of a request. experts: positions, and the experts of the tokens there. Until a token is drawn,
        the experts of a prompt that is computed again replace the earlier ones."""
        num_prompt_tokens = len(partial.group.prompt_token_ids)
        for position, chosen in experts:
            if position >= num_prompt_tokens:
                partial.routed_experts.setdefault(position, chosen)
            elif position not in partial.group.prompt_routed_experts or not self._has_drawn(partial.group):
                partial.group.prompt_routed_experts[position] = chosen

    def _has_drawn(self, group: _Group) -> bool:
        """True if some sample of a group has a token or has ended."""
        unfinished = self._unfinished(group).values()
        return bool(group.finished) or any(self._store.length(partial.tokens) for partial in unfinished)

    def _rollout(self, request_id: int, partial: _Partial, reason: str, *, whole: bool = True) -> Rollout:
        """Return the rollout of a request so far; without its tokens if it is not whole."""
        start = partial.group.start
        rollout = self._columns_since(request_id, partial, 0, reason)
        if not whole:
            rollout = replace(rollout.since(len(rollout.token_ids)), columns={})
        num_tokens = len(rollout.token_ids)
        if num_tokens and partial.masks is not None and len(partial.masks) == num_tokens:
            rollout.sampling_mask = SamplingMask.join(*zip(*partial.masks, strict=True))
        rollout.prompt_scores = partial.group.known_scores()
        experts = partial.group.prompt_routed_experts | partial.routed_experts
        places = range(len(start.prompt_token_ids) + num_tokens - 1)
        if num_tokens and places and experts and all(place in experts for place in places):
            rows = [experts[place] for place in places]
            if len({row.shape for row in rows}) == 1:
                rollout.routed_experts = np.stack(rows)
        return rollout

    def _columns_since(self, request_id: int, partial: _Partial, begin: int, reason: str = "") -> Rollout:
        """Return a rollout with the tokens of a request from `begin` on, and the columns with one value per token."""
        start, columns = partial.group.start, self._store.read(partial.tokens, begin)
        return Rollout(
            request_id=request_id,
            group_id=start.group_id,
            sample=request_id - start.first_request_id,
            params=start.params,
            metadata=start.metadata,
            prompt_token_ids=partial.group.prompt_token_ids,
            token_ids=columns.pop("token_ids"),
            logprobs=columns.pop("logprobs"),
            weight_versions=columns.pop("weight_versions"),
            sampled_at_ns=columns.pop("sampled_at_ns"),
            finish_reason=reason,
            columns={name: _narrow(name, column, start.params) for name, column in columns.items()},
            forked_from=start.forked_from,
            prefix_tokens=partial.prefix_tokens,
            prefix_version=partial.prefix_version,
            banned=start.banned,
        )


def _ids(start: GroupStart) -> range:
    """Return the ids of the requests of a group."""
    return range(start.first_request_id, start.first_request_id + start.params.n)


def _narrow(name: str, values: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return a column with each row no longer than the request asked for."""
    column = COLUMNS.get(name)
    return values[:, : column.asked_by(params)] if column is not None and values.ndim > 1 else values
