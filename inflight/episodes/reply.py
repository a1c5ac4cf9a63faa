"""A drawn turn, as a rollout function gets it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inflight.episodes.segment import Segment


class Request(NamedTuple):
    """What a turn answers."""

    num_prompt: int
    """Number of tokens before the turn."""
    max_tokens: int
    """Maximum number of tokens of the turn, and of a fork with the tokens that it shares."""
    digest: bytes | None = None
    """Digest of the messages; None for tokens."""
    schemas: list[dict[str, Any]] | None = None
    """The tools."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A drawn turn."""

    message: dict[str, Any]
    """The reply as a chat message: role, content, and if there are some, reasoning_content and tool_calls. Append it to
    the messages of the next `chat`. Empty after `complete`."""
    text: str
    """The tokens as text, special tokens as in `SamplingParams.skip_special_tokens`."""
    token_ids: list[int]
    """The tokens of the reply. A fork begins with tokens of the reply that it was forked from."""
    finish_reason: str
    """stop | length, or stopped by `watch`"""
    place: tuple[Segment, int]
    """Its segment, and its index among the drawn turns of the segment."""
    request: Request = field(repr=False)
    prefix_tokens: int = 0
    """Number of tokens before the turn whose keys and values were reused."""
    stop_reason: str | int | None = None
    """The stop string, or the one of `SamplingParams.stop_token_ids`, that ended a reply of `chat`. It is in the tokens
    and the text, and not in the message."""
    forks: Sequence["Reply"] = ()
    """Other continuations of its first tokens, which the `Feedback` of `watch` asked for."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the reply."""
        return self.request.num_prompt

    @property
    def content(self) -> str:
        """The content of the message."""
        return self.message.get("content") or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls of the message, as in the API of OpenAI."""
        return self.message.get("tool_calls") or []
