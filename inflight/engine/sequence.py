"""A sequence: one request on its way through the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.core.frames import TakenOver
from inflight.core.sampling import SamplingParams
from inflight.engine.kv_cache import NO_VERSION, Holding

UNPINNED = None


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
    """params.max_tokens, or what the context leaves."""
    adapter: str | None = None
    pin: int | None = UNPINNED
    """The weight version that draws all of its tokens; None: whichever is live."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the prompt brought along, for an order of scheduling."""
    tokens: list[int] = field(default_factory=list)
    num_pending: int = 0
    """Tokens drawn on the device of which this process has not read the ids yet."""
    finished: bool = False
    started: bool = False
    """A pass has computed some of it."""
    followers: list["Sequence"] = field(default_factory=list)
    """Samples of the same prompt that wait for this one to compute it."""
    has_drawn_in_row: bool = False
    """Its last token is in the device state of its batch row."""
    batch_row: int = -1
    """Row of the per-sequence device state while it runs, −1 else."""
    holding: Holding = field(default_factory=Holding)
    """What it holds of the KV cache, which alone writes to it."""
    taken_over: int = 0
    """Leading tokens whose keys and values others had computed before: the prefix cache, or the parent of a fork."""
    taken_over_version: int = NO_VERSION
    """The oldest version that computed some of those."""

    prompt_scored: bool = False
    """Another sample of its group was computed, and scored, with the same prompt."""

    @property
    def scores_prompt(self) -> bool:
        """Passes that compute its prompt score it, too. Those that do it again later have nothing new to tell."""
        is_asked = self.params.prompt_logprobs is not None
        return is_asked and not self.prompt_scored and not self.tokens and not self.num_pending

    @property
    def num_known(self) -> int:
        """Tokens whose ids this process knows."""
        return len(self.prompt) + len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens so far, which is the position of the next one."""
        return len(self.prompt) + len(self.tokens) + self.num_pending

    def prefix_taken_over(self) -> TakenOver:
        """The part of the prompt that it took over."""
        return TakenOver(self.request_id, min(self.taken_over, len(self.prompt)), self.taken_over_version)

    def token_ids(self) -> list[int]:
        """All known tokens."""
        return self.prompt + self.tokens

    def token_slice(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens start … end − 1."""
        cut = len(self.prompt)
        if end <= cut:
            return tuple(self.prompt[start:end])
        return tuple(self.prompt[start:cut] + self.tokens[max(0, start - cut) : end - cut])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start … start + count − 1 of a sequence are computed in the pass."""

    sequence: Sequence
    start: int
    count: int
    num_scored: int = 0
    """Its first tokens whose logits tell how likely the next token of the prompt is."""


@dataclass(slots=True)
class Schedule:
    """One forward pass: chunks of one token first, then the longer ones."""

    version: int
    """The version of the weights that computes it."""
    stamp: int
    """The version that its tokens bear: `version`, or that of adapters published since."""
    chunks: list[Chunk] = field(default_factory=list)
    num_single: int = 0
    """Leading chunks that are the last token of a sequence; the others belong to prompts."""
    draws: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences that draw a token, each with the index of the chunk after whose last token it does."""
    starts: list[Sequence] = field(default_factory=list)
    """Sequences that take part in a pass for the first time."""
    taken_over: list[TakenOver] = field(default_factory=list)
    """Prompt tokens that did not have to be computed, of the sequences that joined."""
    num_scored: int = 0
    """Prompt tokens that are scored, of all chunks."""
