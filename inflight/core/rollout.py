"""A sample with the per-token values that the trainer needs to correct each token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from inflight.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The sampling mask of T tokens: token t was sampled from token_ids[offsets[t] : offsets[t + 1]], or from the whole
    vocabulary if that range is empty."""

    token_ids: np.ndarray
    """i32[…]"""
    offsets: np.ndarray
    """i64[T + 1]"""
    cut_from: np.ndarray | None = None
    """i32[T]: 0 if the ids are the kept tokens; otherwise the vocabulary size, and the ids are the removed tokens.
    None: 0 everywhere."""

    def split(self) -> list[np.ndarray]:
        """Return the part i32[…] of token_ids of each token."""
        return [self.token_ids[begin:end] for begin, end in pairwise(self.offsets.tolist())]

    @classmethod
    def join(cls, token_ids: Sequence[np.ndarray], cut_from: ArrayLike = ()) -> "SamplingMask":
        """Make a mask from the ids of each token. cut_from: one number per token; empty: all are 0."""
        return cls(
            np.concatenate([np.empty(0, np.int32), *token_ids]),
            np.cumsum([0, *map(len, token_ids)], dtype=np.int64),
            np.array(cut_from, np.int32) if np.any(cut_from) else None,
        )


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Likelihoods of the P prompt tokens, each given the tokens before it. Row t is for token t + 1."""

    logprobs: np.ndarray
    """f32[P − 1], at temperature 1 and unfiltered."""
    ranks: np.ndarray
    """i32[P − 1], 1 for the most likely token; 0 before the score arrives."""
    top_token_ids: np.ndarray
    """i32[P − 1, params.prompt_logprobs], the most likely tokens first."""
    top_logprobs: np.ndarray
    """f32[P − 1, params.prompt_logprobs]"""

    @classmethod
    def unknown(cls, num_rows: int, top: int) -> "PromptScores":
        """Make scores that have not arrived yet: NaN."""
        nothing = np.full((num_rows, top), np.nan, np.float32)
        ranks, ids = np.zeros(num_rows, np.int32), np.full((num_rows, top), -1, np.int32)
        return cls(np.full(num_rows, np.nan, np.float32), ranks, ids, nothing)

    @property
    def known(self) -> bool:
        """Whether all scores have arrived. Scores of logits that are not finite are NaN."""
        return bool((self.ranks > 0).all())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs))


class Turn(msgspec.Struct, frozen=True):
    """A range of a rollout's tokens: drawn by the policy, or given by an environment."""

    begin: int
    """Index of its first token in `token_ids`."""
    end: int
    """Index after its last token. A turn of the policy can be empty."""
    drawn: bool
    """True: the policy drew these tokens. False: they are context, such as the output of a tool."""
    reward: float | None = None
    """The reward of a drawn turn, or None."""
    finish_reason: str = ""
    """Of a drawn turn: stop | length, or stopped if a function that watched it ended it. "": the part of a turn up to
    a reward; the next turn continues it."""
    began_ns: int = 0
    """CLOCK_MONOTONIC when the turn was requested, or when the part before it was drawn; 0 for given tokens, and for
    turns that a score function has set."""
    ended_ns: int = 0
    """CLOCK_MONOTONIC when all of its tokens had arrived; 0 for given tokens."""
    prefix_tokens: int = 0
    """Number of tokens before the turn whose keys and values were reused."""
    prefix_version: int | None = None
    """The oldest version that computed some of these keys and values; None if none were reused."""

    def shifted(self, ns: int) -> "Turn":
        """Return the turn with its times, if it has any, moved by this number of ns."""
        moved = {"began_ns": self.began_ns + ns, "ended_ns": self.ended_ns + ns}
        return msgspec.structs.replace(self, **moved) if self.began_ns else self


@dataclass(slots=True)
class Rollout:
    """One sample of a prompt, or one token sequence of an episode. Arrays have one row per token after the prompt,
    except for the experts."""

    request_id: int
    group_id: int
    sample: int
    """Index within the group, 0 … params.n − 1. The token sequences of an episode share it."""
    params: SamplingParams
    metadata: dict[str, Any]
    """The submitter's mapping for the prompt."""
    prompt_token_ids: np.ndarray
    """i32[P]"""
    token_ids: np.ndarray
    """i32[T], including a sampled stop token."""
    logprobs: np.ndarray
    """f32[T], behavior log-probabilities, recorded when each token was sampled."""
    weight_versions: np.ndarray
    """i64[T], the version of the weights that sampled each token."""
    sampled_at_ns: np.ndarray
    """i64[T], CLOCK_MONOTONIC."""
    finish_reason: str
    """stop | length | cancelled | error, or "" while the sample is unfinished"""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Maps the name of each requested column to its values, one row per token: entropies f32[T]; top_token_ids
    i32[T, k] and top_logprobs f32[T, k], the most likely tokens first; [T] for each custom column
    (`EngineOptions.columns`)."""
    sampling_mask: SamplingMask | None = None
    """The tokens that top-k, top-p and min-p kept at each position, if params.return_sampling_mask is set."""
    routed_experts: np.ndarray | None = None
    """u8 or u16[P + T − 1, layers, k]: the experts of every token but the last, if the engine records them."""
    prompt_scores: PromptScores | None = None
    """Likelihoods of the prompt's tokens, if params.prompt_logprobs is set."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode, in order, one after another. Empty: the policy drew all tokens. Log-probabilities,
    versions, times and columns of given tokens are 0."""
    forked_from: tuple[int, int] | None = None
    """(request id, k) if the prompt is another request's prompt and its first k tokens."""
    prefix_tokens: int = 0
    """Number of prompt tokens whose keys and values were reused from the prefix cache or from a forked sample."""
    prefix_version: int | None = None
    """The oldest version that computed some of the reused keys and values; None if none were reused."""
    banned: tuple[tuple[int, int], ...] = ()
    """Ranges [begin, end) of token ids, in order, that the engine never draws: the tokenizer lacks them, or they are
    placeholders of images or sound. The log-probabilities are of the distribution without them."""
    adapter: str | None = None
    """Name of the LoRA adapter that drew its tokens; None: the weights alone drew them."""
    prompt: str = ""
    """The prompt as text, if there is a tokenizer; special tokens as in `text`."""
    text: str = ""
    """The sampled tokens as text that continues the prompt's, if there is a tokenizer. Special tokens are left out
    unless params.skip_special_tokens is False."""
    reward: float | None = None
    """The score function's result."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The results of several score functions by their names (`inflight.Rewards`)."""

    @property
    def is_of_episode(self) -> bool:
        """True if an episode made its turns. A score function can set `turns`, too, without times."""
        return any(turn.began_ns for turn in self.turns)

    @property
    def drawn(self) -> np.ndarray:
        """bool[T], true for the tokens that the policy drew."""
        mask = np.ones(len(self.token_ids), bool)
        for turn in self.turns:
            mask[turn.begin : turn.end] = turn.drawn
        return mask

    @property
    def drawn_versions(self) -> list[int | None]:
        """The weight version of each token, None for given tokens."""
        versions = self.weight_versions.tolist()
        return [version if is_drawn else None for version, is_drawn in zip(versions, self.drawn, strict=True)]

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the policy drew."""
        return len(self.token_ids) - sum(turn.end - turn.begin for turn in self.turns if not turn.drawn)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays without `prompt_scores`, which all samples of a prompt share."""
        mask, fixed = self.sampling_mask, (self.prompt_token_ids, self.token_ids, self.logprobs)
        arrays = [*fixed, self.weight_versions, self.sampled_at_ns, *self.columns.values(), self.routed_experts]
        arrays += [] if mask is None else [mask.token_ids, mask.offsets, mask.cut_from]
        return sum(array.nbytes for array in arrays if array is not None)

    def until(self, end: int) -> "Rollout":
        """Return the first `end` tokens with their columns, as an unfinished sample without sampling masks, experts and
        text."""
        return self._part(slice(end), sampling_mask=None, routed_experts=None, finish_reason="", text="")

    def since(self, begin: int) -> "Rollout":
        """Return the tokens from `begin` on with their columns, without the prompt's scores and the text. A finished
        sample keeps the whole sampling mask and all experts; an unfinished one has neither."""
        ragged: dict[str, Any] = {} if self.finish_reason else {"sampling_mask": None, "routed_experts": None}
        return self._part(slice(begin, None), prompt_scores=None, prompt="", text="", **ragged)

    def _part(self, tokens: slice, **others: Any) -> "Rollout":
        """Return these tokens with their columns. others: further fields that change."""
        names = ("token_ids", "logprobs", "weight_versions", "sampled_at_ns")
        arrays = {name: getattr(self, name)[tokens] for name in names}
        columns = {name: column[tokens] for name, column in self.columns.items()}
        return replace(self, **arrays, columns=columns, **others)


def samples_of(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts of each sample, in order: one rollout, or the token sequences of one episode."""
    samples: dict[int | tuple[int, int], list[Rollout]] = {}
    for rollout in rollouts:
        # Only rollouts with turns can share a sample, so that rollouts made by hand need no index.
        key = (rollout.group_id, rollout.sample) if rollout.turns else id(rollout)
        samples.setdefault(key, []).append(rollout)
    return list(samples.values())
