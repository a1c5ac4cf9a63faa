"""Unfinished requests and groups, with the data that has arrived."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

from inflight.core.columns import COLUMNS, SCORES
from inflight.core.frames import GroupStart
from inflight.core.rollout import PromptScores, Rollout, SamplingMask
from inflight.core.sampling import SamplingParams
from inflight.stream.token_store import COLUMNS_OF_ALL, StoredTokens, TokenStore


@dataclass(slots=True)
class UnfinishedGroup:
    """A group of which some samples have not ended."""

    start: GroupStart
    prompt_token_ids: np.ndarray
    """i32[P], shared by its rollouts."""
    engine_id: str = ""
    """The engine that draws it."""
    requests: "dict[int, UnfinishedRequest]" = field(default_factory=dict)
    """Maps the ids of its unfinished requests to them."""
    finished: list[Rollout] = field(default_factory=list)
    prompt_routed_experts: dict[int, np.ndarray] = field(default_factory=dict)
    """Maps a position to its experts; the sample that computes the prompt does it for all."""
    prompt_scores: PromptScores | None = None
    """Scores of its prompt, if it asked for them; the sample that computes the prompt does it for all."""

    @property
    def ids(self) -> range:
        return ids_of(self.start)

    @property
    def has_drawn(self) -> bool:
        """True if some sample has a token or has ended."""
        return bool(self.finished) or any(request.num_tokens for request in self.requests.values())

    def partial(self) -> list[Rollout]:
        return [request.rollout("") for request in self.requests.values()]

    def drawn(self) -> dict[int, list[int]]:
        """Map the unfinished requests to their tokens so far."""
        return {i: request.store.read(request.tokens)["token_ids"].tolist() for i, request in self.requests.items()}

    def since(self, seen: Mapping[int, int]) -> list[Rollout]:
        """Return all samples without the tokens that the caller has, and without sampling masks and experts. seen: maps
        request ids to the number of those tokens; 0 for other requests."""
        ended = [rollout.since(seen.get(rollout.request_id, 0)) for rollout in self.finished]
        return ended + [request.columns_since(seen.get(i, 0)) for i, request in self.requests.items()]

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

    def add_scores(self, places: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Store scores of its prompt at these places. Until a token is drawn, later scores replace earlier ones, so
        that all scores of a prompt that new weights compute again are from those weights."""
        if (scores := self.open_scores()) is None:
            return
        chosen = (places >= 0) & (places < len(scores.logprobs))
        rows = places[chosen]
        new = (scores.ranks[rows] == 0) | (not self.has_drawn)
        for name in SCORES:
            known, told = getattr(scores, name), columns[name][chosen][new]
            if known.ndim > 1:
                told = told[:, : known.shape[1]]
                known[rows[new], : told.shape[1]] = told
            else:
                known[rows[new]] = told


@dataclass(slots=True)
class UnfinishedRequest:
    """Tokens and extras of one unfinished request."""

    request_id: int
    group: UnfinishedGroup
    store: TokenStore
    tokens: StoredTokens
    """Its tokens in the store."""
    masks: list[tuple[np.ndarray, int]] | None = None
    """The sampling mask of each token, if the request asked for it: its ids, and the size of the vocabulary that they
    were cut from, or 0."""
    routed_experts: dict[int, np.ndarray] = field(default_factory=dict)
    """Maps a position to its experts, as they were when the drawn token there was first computed."""
    prefix_tokens: int = 0
    prefix_version: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.store.length(self.tokens)

    def lacks(self) -> list[str]:
        """Return the names of the columns that the request asked for and some of its tokens do not have."""
        num_tokens = self.num_tokens
        lacks = [name for name, count in self.tokens.num_values.items() if count != num_tokens]
        num_masks = num_tokens if self.masks is None else len(self.masks)
        if num_masks != num_tokens and (num_masks or self.group.start.params.filtered):
            lacks.append("sampling_mask")
        return lacks

    def restore(self, rollout: Rollout) -> None:
        """Take the tokens and extras of this rollout as those that have arrived."""
        columns = {name: getattr(rollout, name) for name in COLUMNS_OF_ALL} | rollout.columns
        self.store.fill(self.tokens, columns)
        self.prefix_tokens, self.prefix_version = rollout.prefix_tokens, rollout.prefix_version
        if (mask := rollout.sampling_mask) is not None:
            cut_from = repeat(0) if mask.cut_from is None else mask.cut_from.tolist()
            self.masks = list(zip(mask.split(), cut_from, strict=False))
        if rollout.routed_experts is not None:
            self.add_experts(enumerate(rollout.routed_experts))

    def add_experts(self, experts: Iterable[tuple[int, np.ndarray]]) -> None:
        """Store experts: positions, and the experts of the tokens there. Until a token is drawn, the experts of a
        prompt that is computed again replace the earlier ones."""
        group = self.group
        for position, chosen in experts:
            if position >= len(group.prompt_token_ids):
                self.routed_experts.setdefault(position, chosen)
            elif position not in group.prompt_routed_experts or not group.has_drawn:
                group.prompt_routed_experts[position] = chosen

    def rollout(self, reason: str, *, whole: bool = True) -> Rollout:
        """Return the rollout so far; without its tokens if it is not whole."""
        rollout = self.columns_since(0, reason)
        if not whole:
            rollout = replace(rollout.since(len(rollout.token_ids)), columns={})
        num_tokens = len(rollout.token_ids)
        if num_tokens and self.masks is not None and len(self.masks) == num_tokens:
            rollout.sampling_mask = SamplingMask.join(*zip(*self.masks, strict=True))
        rollout.prompt_scores = self.group.known_scores()
        experts = self.group.prompt_routed_experts | self.routed_experts
        places = range(len(self.group.start.prompt_token_ids) + num_tokens - 1)
        if num_tokens and places and experts and all(place in experts for place in places):
            rows = [experts[place] for place in places]
            if len({row.shape for row in rows}) == 1:
                rollout.routed_experts = np.stack(rows)
        return rollout

    def columns_since(self, begin: int, reason: str = "") -> Rollout:
        """Return a rollout with the tokens from `begin` on, and the columns with one value per token."""
        start, columns = self.group.start, self.store.read(self.tokens, begin)
        return Rollout(
            request_id=self.request_id,
            group_id=start.group_id,
            sample=self.request_id - start.first_request_id,
            params=start.params,
            metadata=start.metadata,
            prompt_token_ids=self.group.prompt_token_ids,
            token_ids=columns.pop("token_ids"),
            logprobs=columns.pop("logprobs"),
            weight_versions=columns.pop("weight_versions"),
            sampled_at_ns=columns.pop("sampled_at_ns"),
            finish_reason=reason,
            columns={name: _narrow(name, column, start.params) for name, column in columns.items()},
            forked_from=start.forked_from,
            prefix_tokens=self.prefix_tokens,
            prefix_version=self.prefix_version,
            banned=start.banned,
            adapter=start.adapter,
        )


def ids_of(start: GroupStart) -> range:
    """Return the ids of the requests of a group."""
    return range(start.first_request_id, start.first_request_id + start.params.n)


def _narrow(name: str, values: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return a column with each row no longer than the request asked for."""
    column = COLUMNS.get(name)
    return values[:, : column.asked_by(params)] if column is not None and values.ndim > 1 else values
