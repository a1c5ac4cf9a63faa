"""How answers look: the choices of each endpoint, whole, or piece by piece in a stream."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.server.answers import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    kept_tokens,
    npy,
    prompt_logprobs,
)
from inflight.server.errors import ApiError
from inflight.server.readers import Read, Reader, Reading
from inflight.server.requests import OpenAIFields, SamplingFields
from inflight.server.served import Served
from inflight.server.text import TextRules
from inflight.server.tools import ToolCall

_MOST_ENTRIES, _MOST_ECHOED = 1 << 18, 1 << 22
"""Log-probabilities of prompt tokens, and tokens of echoed prompts, in one answer at most: while it is put together, no
other client gets anything."""


@dataclass(slots=True)
class Piece:
    """What is new of one choice, or all of it."""

    index: int
    rollout: Rollout
    """Its tokens that are new."""
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    first: bool
    versions: list[dict[str, Any]] | None
    """The spans of all of its tokens, with the last piece."""


class Shape(ABC):
    """How the answers of an endpoint look."""

    kind: str
    """What ids begin with."""
    object: str

    scores_choices = False
    """The likelihood of a prompt is told by each of its choices, and not by the answer."""

    def __init__(self, served: Served, fields: SamplingFields, params: SamplingParams, *, logprobs: bool):
        self.served, self.params, self.with_logprobs = served, params, logprobs
        self.rules = TextRules(params, bool(fields.include_stop_str_in_output), params.skip_special_tokens)
        self.with_versions = self.with_ids = False
        self.num_likely = fields.prompt_logprobs
        """How many of the likeliest tokens are told of each token of the prompt; None: its tokens are not scored."""
        self.prompts: list[list[int]] = []

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """What is new of a choice, or None if that is nothing to tell."""

    def beginning(self) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        yield from ()

    def extras(self) -> dict[str, Any]:
        """More fields of a whole answer."""
        return {"prompt_token_ids": self.prompts[0]} if self.with_ids else {}

    def check_size(self) -> None:
        """Raises ApiError for an answer that would say too much of its prompts."""
        if (top := self.params.prompt_logprobs) is None:
            return
        entries = (self.params.n if self.scores_choices else 1) * (top + 1) * sum(map(len, self.prompts))
        if entries > _MOST_ENTRIES:
            raise ApiError(
                400,
                f"the answer would hold {entries:,} log-probabilities of prompt tokens, and {_MOST_ENTRIES:,} are the "
                "most: ask for fewer of them, with n: 1, or in several requests",
                param="prompt_logprobs",
            )

    def scores(self, rollout: Rollout) -> dict[str, Any]:
        """What is said of the likelihood of the prompt of a sample."""
        if self.num_likely is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(rollout, self.served.decoder, self.num_likely)}

    def common(self, piece: Piece) -> dict[str, Any]:
        fields: dict[str, Any] = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if self.with_versions and piece.finish_reason is not None:
            fields["weight_versions"] = piece.versions
        if self.with_ids:
            fields["token_ids"] = piece.rollout.token_ids.tolist()
        return fields

    def chat_logprobs(self, piece: Piece, *, as_ids: bool) -> dict[str, Any] | None:
        return chat_logprobs(piece.rollout, self.served.decoder, as_ids=as_ids) if self.with_logprobs else None


class _OpenAIShape(Shape):
    def __init__(self, served: Served, fields: OpenAIFields, params: SamplingParams, *, logprobs: bool):
        super().__init__(served, fields, params, logprobs=logprobs)
        self.with_ids = bool(fields.return_token_ids)
        self.with_versions = bool(fields.return_weight_versions)
        self.as_ids = served.options.tokens_as_ids or bool(fields.return_tokens_as_token_ids)

    def common(self, piece: Piece) -> dict[str, Any]:
        mask = kept_tokens(piece.rollout.sampling_mask)
        return super().common(piece) | ({} if mask is None else {"sampling_mask": mask})


class CompletionShape(_OpenAIShape):
    kind, object = "cmpl", "text_completion"
    scores_choices = True

    def __init__(self, *args: Any, echo: bool, top: int, **kwargs: Any):
        """echo: the text of each choice begins with its prompt. top: how many of the likeliest tokens are told."""
        super().__init__(*args, **kwargs)
        self._echo, self._top = echo, top
        self._lengths: Counter[int] = Counter()
        """Characters of the tokens that were given, by choice."""

    def choice(self, piece: Piece) -> dict[str, Any]:
        text = self._prompt_text(piece.index) + piece.text if self._echo and piece.first else piece.text
        choice = {"index": piece.index, "text": text, "logprobs": None} | self.common(piece)
        if self.with_logprobs:
            given = self._lengths[piece.index]
            before: dict[str, list[Any]] = {}
            if self._echo:  # and the piece is the whole
                before = echoed_logprobs(piece.rollout, self.served.decoder, self._top, as_ids=self.as_ids)
                given = sum(map(len, before["tokens"]))
            told = completion_logprobs(piece.rollout, self.served.decoder, as_ids=self.as_ids, offset=given)
            self._lengths[piece.index] += sum(map(len, told["tokens"]))
            choice["logprobs"] = {name: [*before.get(name, ()), *values] for name, values in told.items()}
        if self.with_ids and piece.first:
            choice["prompt_token_ids"] = self.prompts[piece.index // self.params.n]
        return choice | self.scores(piece.rollout)

    delta = choice

    def extras(self) -> dict[str, Any]:
        return {}  # each choice has its prompt

    def check_size(self) -> None:
        super().check_size()
        if self._echo and self.params.n * sum(map(len, self.prompts)) > _MOST_ECHOED:
            raise ApiError(400, f"n echoes of the prompts are more than {_MOST_ECHOED:,} tokens", param="echo")

    def _prompt_text(self, index: int) -> str:
        prompt = self.prompts[index // self.params.n]
        return self.served.decoder.decode(prompt, skip_special_tokens=self.params.skip_special_tokens)


class ChatShape(_OpenAIShape):
    kind, object = "chatcmpl", "chat.completion"

    def __init__(self, *args: Any, reading: Reading | None, **kwargs: Any):
        """reading: None if the text of an answer is its content."""
        super().__init__(*args, **kwargs)
        self._reading = reading
        self._readers: dict[int, Reader] = {}
        if reading is not None:
            self.rules = replace(self.rules, skip_special_tokens=False)

    def choice(self, piece: Piece) -> dict[str, Any]:
        read = self._read(piece)
        message: dict[str, Any] = {"role": "assistant", "content": read.content or (None if read.calls else "")}
        message |= _reasoned(read.reasoning)
        if read.calls:
            message["tool_calls"] = [call.body for call in read.calls]
        choice = {"index": piece.index, "message": message, "logprobs": self.chat_logprobs(piece, as_ids=self.as_ids)}
        return choice | self.common(piece) | _called(piece, read.calls)

    def beginning(self) -> Iterator[dict[str, Any]]:
        for index in range(self.params.n):
            delta = {"role": "assistant", "content": ""}
            yield {
                "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
            } | self.extras()

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        read = self._read(piece)
        delta: dict[str, Any] = _reasoned(read.reasoning) | ({"content": read.content} if read.content else {})
        if read.calls:
            delta["tool_calls"] = [call.body | {"index": i} for i, call in enumerate(read.calls)]
        if not delta and piece.finish_reason is None and not self.with_logprobs and not self.with_ids:
            return None
        choice = {"index": piece.index, "delta": delta, "logprobs": self.chat_logprobs(piece, as_ids=self.as_ids)}
        return choice | self.common(piece) | _called(piece, read.calls)

    def _read(self, piece: Piece) -> Read:
        """The parts of an answer that are new."""
        if self._reading is None:
            return Read(content=piece.text)
        if piece.index not in self._readers:
            self._readers[piece.index] = self._reading.reader()
        read = self._readers[piece.index].feed(piece.text, last=piece.finish_reason is not None)
        if self.params.skip_special_tokens:
            read.content, read.reasoning = (
                self._reading.hidden.sub("", part) for part in (read.content, read.reasoning)
            )
        return read


def _reasoned(reasoning: str) -> dict[str, str]:
    """Under both names that clients read."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def _called(piece: Piece, calls: Sequence[ToolCall]) -> dict[str, Any]:
    return {"finish_reason": "tool_calls"} if calls and piece.finish_reason == "stop" else {}


class TokenShape(Shape):
    """Token ids in and out: vLLM's /inference/v1/generate, with prompt and versions always."""

    kind, object = "gen", "inference.generate"

    def __init__(self, *args: Any, experts_as_lists: bool, **kwargs: Any):
        """experts_as_lists: SkyRL's form of routed experts; else they are a file of NumPy's in base64, as in vLLM."""
        super().__init__(*args, **kwargs)
        self.with_ids = self.with_versions = True
        self._experts_as_lists = experts_as_lists

    def choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = self.chat_logprobs(piece, as_ids=True)
        experts = piece.rollout.routed_experts
        as_lists = experts.tolist() if self._experts_as_lists and experts is not None else None
        return {"index": piece.index, "logprobs": logprobs} | self.common(piece) | {
            "routed_experts": as_lists or npy(experts),
            "sampling_mask": kept_tokens(piece.rollout.sampling_mask),
        }  # fmt: skip

    delta = choice
