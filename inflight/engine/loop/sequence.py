"""A sequence (one request in the engine), and the passes that advance sequences."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from inflight.core.frames import TakenOver
from inflight.core.messages import LIVE_VERSION, Ids, Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.blocks import NO_VERSION, Holding

UNPINNED = None


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of one sample of a group: SplitMix64's output function (Steele, Lea and Flood 2014), as i64."""
    x = (seed + (sample + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: a prompt, and the tokens drawn so far."""

    request_id: int
    group_id: int
    sample: int
    seed: int
    """The seed of this sample; its draws depend on (seed, position)."""
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    """params.max_tokens, or the rest of the context if that is less."""
    adapter: str | None = None
    pin: int | None = UNPINNED
    """The weight version that draws all of its tokens; None: the live version."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the prompt, for an order of scheduling."""
    tokens: list[int] = field(default_factory=list)
    num_unread: int = 0
    """Tokens drawn before the sequence lost its row. This process has not read their ids yet."""
    finished: bool = False
    started: bool = False
    """A pass has computed some of it."""
    followers: list["Sequence"] = field(default_factory=list)
    """Samples of the same prompt. They wait until this one has computed it."""
    rows: Any = None
    """The batch rows (`rows.Rows`), while it runs."""
    batch_row: int = -1
    """Row of the per-sequence device state while it runs, otherwise −1."""
    holding: Holding = field(default_factory=Holding)
    """Its blocks of the KV cache. Only the cache writes to it, except for `computed`."""
    taken_over: int = 0
    """Leading tokens that were computed before, for the prefix cache or for the parent of a fork."""
    taken_over_version: int = NO_VERSION
    """The oldest version that computed some of these tokens."""

    place: float = 0.0
    """Its last number in the order of scheduling."""
    num_restarts: int = 0
    """Swaps since it last drew a token that made its prefill start again."""
    prompt_scored: bool = False
    """Another sample of its group was computed, and scored, with the same prompt."""

    @classmethod
    def of(cls, prompt: Prompt, ids: Ids, sample: int, tokens: list[int], live: int, *, max_context: int) -> "Sequence":
        """Return one sample of a prompt whose params have a seed. live: the version of the live weights."""
        return cls(
            request_id=ids.first_request_id + sample,
            group_id=ids.group_id,
            sample=sample,
            seed=sample_seed(prompt.params.seed or 0, sample),
            prompt=prompt.token_ids,
            params=prompt.params,
            max_tokens=min(prompt.params.max_tokens, max_context - len(prompt.token_ids)),
            adapter=prompt.adapter,
            pin=live if prompt.version == LIVE_VERSION else prompt.version,
            metadata=prompt.metadata,
            tokens=tokens,
        )

    @property
    def scores_prompt(self) -> bool:
        """True if passes that compute its prompt score it. Passes that compute it again later do not."""
        is_asked = self.params.prompt_logprobs is not None
        return is_asked and not self.prompt_scored and not self.tokens and not self.num_pending

    @property
    def num_known(self) -> int:
        """Tokens whose ids this process knows."""
        return len(self.prompt) + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens drawn on the device of which this process has not read the ids yet."""
        return self.num_unread if self.rows is None else self.length - self.num_known

    @property
    def length(self) -> int:
        """Tokens so far. It is the position of the next one."""
        return self.num_known + self.num_unread if self.rows is None else int(self.rows.lengths[self.batch_row])

    def prefix_taken_over(self) -> TakenOver:
        """Return the part of the prompt that was computed before."""
        return TakenOver(self.request_id, min(self.taken_over, len(self.prompt)), self.taken_over_version)

    def token_ids(self) -> list[int]:
        """Return all known tokens."""
        return self.prompt + self.tokens

    def token_slice(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known tokens start … end − 1."""
        cut = len(self.prompt)
        if end <= cut:
            return tuple(self.prompt[start:end])
        if start >= cut:
            return tuple(self.tokens[start - cut : end - cut])
        return tuple(self.prompt[start:] + self.tokens[: end - cut])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start … start + count − 1 of a prompt, or of all before a preemption, are computed in the pass."""

    sequence: Sequence
    start: int
    count: int
    num_scored: int = 0
    """Number of its first tokens whose logits score the next token of the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """M sequences that draw together, in one pass or in many, and their constants during these passes."""

    epoch: int
    """Epoch of the batch rows (`Rows.epoch`). Until it changes, all sequences have their rows."""
    sequences: list[Sequence]
    appends: list[Callable[[int], None]]
    """The `append` of each sequence's tokens."""
    rows: np.ndarray
    """i64[M]: their batch rows."""
    request_ids: np.ndarray
    """u64[M]"""
    entered: np.ndarray
    """i64[M]: the epochs in which they entered their rows."""
    limits: np.ndarray
    """i64[M]: the maximum length of each."""
    stop_ids: np.ndarray
    """i64[…, M]: tokens that end them, and padding that is not a token."""
    watched: np.ndarray
    """bool[M]: any token can end them."""
    seeds: np.ndarray
    """i64[M]"""
    temperatures: np.ndarray
    """f32[M]"""
    special: list[int]
    """Sequences whose draws need more than a temperature and a seed."""

    def __len__(self) -> int:
        return len(self.rows)


class Draws(NamedTuple):
    """The tokens that a pass draws. Decoding sequences are first."""

    cohort: Cohort
    """The sequences that draw them."""
    chunks: np.ndarray
    """i64[M]: the chunk of the pass after whose last token each is drawn."""
    positions: np.ndarray
    """i64[M]: the place of each in its sequence."""


@dataclass(slots=True)
class Schedule:
    """One forward pass of S chunks: the last tokens of decoding sequences, then the chunks of prompts."""

    version: int
    """The version of the weights that computes it."""
    stamp: int
    """The version of its tokens: `version`, or a later publish of adapters."""
    rows: np.ndarray
    """i64[S]: the batch row of each chunk's sequence."""
    begins: np.ndarray
    """i64[S]: the place of each chunk's first token in its sequence."""
    counts: np.ndarray
    """i64[S]: its tokens."""
    prompts: list[Chunk]
    """The last of the chunks."""
    draws: Draws
    starts: list[Sequence] = field(default_factory=list)
    """Sequences that take part in a pass for the first time."""
    taken_over: list[TakenOver] = field(default_factory=list)
    """Prompt tokens that did not have to be computed, of the sequences that joined."""

    @property
    def num_single(self) -> int:
        """Leading chunks that are the last token of a sequence. The others belong to prompts."""
        return len(self.rows) - len(self.prompts)

    @property
    def request_ids(self) -> np.ndarray:
        """u64[S]: the request of each chunk."""
        of_prompts = np.array([chunk.sequence.request_id for chunk in self.prompts], np.uint64)
        return np.concatenate((self.draws.cohort.request_ids[: self.num_single], of_prompts))

    @property
    def num_scored(self) -> int:
        """Prompt tokens that are scored, of all chunks."""
        return sum(chunk.num_scored for chunk in self.prompts)


def places_of(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return i64[T], the place of each token in its sequence. begins: first places of chunks; counts: tokens."""
    return np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
