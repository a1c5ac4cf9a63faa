"""The reply to one generation request: its JSON at once, or event by event.

A reply has a choice for each sample. `Choice` takes the new tokens of a sample; the `Reply` of an endpoint turns them
into JSON.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.responses import StreamingResponse

from inflight.chat.readers import Read, Reader
from inflight.chat.text import SampleText
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.server import answers
from inflight.server.generation import Generation
from inflight.server.requests import ChatRequest, GenerateRequest, OpenAIFields, StreamOptions
from inflight.server.responses import DONE, ApiError, as_api_error, event
from inflight.server.served import Served

_MOST_ENTRIES, _MOST_ECHOED = 1 << 18, 1 << 22
"""Maximum number of log-probabilities of prompt tokens, and of tokens of echoed prompts, in one reply. No other client
is served while a reply is put together."""


class Choice:
    """One sample of a reply, with its newest part."""

    rollout: Rollout
    """The new tokens."""
    finish_reason: str | None
    read: Read
    """The new text, by its parts."""

    def __init__(self, reply: "Reply", index: int):
        self.index, self.prompt = index, reply.prompts[index // reply.params.n]
        self._reader = None if reply.reader is None else reply.reader()
        self._sample_text = SampleText(
            reply.served.decoder,
            reply.params,
            self.prompt,
            include_stop=reply.include_stop,
            skip_special_tokens=reply.skip_special_tokens,
        )
        self._versions: list[int] = []
        self.num_parts = 0
        self.num_characters = 0
        """Length of the texts of the tokens in earlier parts of a completion."""

    def push(self, rollout: Rollout) -> None:
        """Take the next part of the sample. Raises ApiError for a sample that failed."""
        self.num_parts += 1
        self.rollout, self.finish_reason = rollout, answers.finish_reason(rollout.finish_reason)
        text = self._sample_text.push(rollout.token_ids.tolist(), rollout.finish_reason)
        self.read = self._reader.feed(text, last=bool(rollout.finish_reason)) if self._reader else Read(content=text)
        self._versions += rollout.weight_versions.tolist()

    def chat_logprobs(self, reply: "Reply") -> dict[str, Any] | None:
        return answers.chat_logprobs(self.rollout, reply.token_name) if reply.with_logprobs else None

    def fields(self, reply: "Reply") -> dict[str, Any]:
        """Return the fields that the choices of all endpoints have."""
        fields: dict[str, Any] = {"finish_reason": self.finish_reason, "stop_reason": self._sample_text.stop_reason}
        if reply.with_versions and self.finish_reason is not None:
            fields["weight_versions"] = answers.version_spans(self._versions, reply.served.updates.labels)
        if reply.with_ids:
            fields["token_ids"] = self.rollout.token_ids.tolist()
        mask = answers.kept_tokens(self.rollout.sampling_mask)
        return fields if mask is None else fields | {"sampling_mask": mask}


class Reply(ABC):
    """The reply to one request."""

    kind: str
    """Prefix of its id."""
    object: str
    chunk: str
    """`object` of its events."""
    scores_choices = False
    """True if the log-probabilities of the prompt are in each choice instead of the reply."""

    def __init__(
        self,
        served: Served,
        fields: OpenAIFields | GenerateRequest,
        params: SamplingParams,
        prompts: list[list[int]],
        *,
        logprobs: bool,
    ):
        self.served, self.request, self.params, self.prompts = served, fields, params, prompts
        sampling = fields.sampling_params if isinstance(fields, GenerateRequest) else fields
        self.include_stop = bool(sampling.include_stop_str_in_output)
        self.skip_special_tokens = params.skip_special_tokens
        self.reader: Callable[[], Reader] | None = None
        self.with_logprobs, self.with_ids, self.with_versions = logprobs, True, True
        self.token_name = answers.token_id_name
        if isinstance(fields, OpenAIFields):
            self.with_ids = bool(fields.return_token_ids)
            self.with_versions = bool(fields.return_weight_versions)
            if not (served.options.tokens_as_ids or fields.return_tokens_as_token_ids):
                self.token_name = served.decoder.token
        self.num_likely = sampling.prompt_logprobs
        """Number of likeliest tokens at each token of the prompt; None: the prompt is not scored."""
        self.prompt_ids = {"prompt_token_ids": prompts[0]} if self.with_ids else {}
        self.began_s = time.monotonic()
        self.id = ""
        self.is_sent = False
        """All events were sent."""
        self._choices: dict[int, Choice] = {}

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return the JSON of a whole choice."""

    def delta(self, choice: Choice) -> dict[str, Any] | None:
        """Return the JSON of the newest part of a choice; None if it has nothing for the client."""
        return self.choice(choice)

    def beginning(self) -> Iterator[dict[str, Any]]:
        """Yield events before the first token."""
        yield from ()

    def check(self) -> None:
        """Raise ApiError for a reply that would contain too much of its prompts, or in a form that has no place for
        them."""
        if (top := self.params.prompt_logprobs) is None:
            return
        if self.request.stream:
            raise ApiError(
                400, "prompt_logprobs, and echo with logprobs, are there without stream alone", param="stream"
            )
        entries = (self.params.n if self.scores_choices else 1) * (top + 1) * sum(map(len, self.prompts))
        if entries > _MOST_ENTRIES:
            raise ApiError(
                400,
                f"the answer would hold {entries:,} log-probabilities of prompt tokens, and {_MOST_ENTRIES:,} are the "
                "most: ask for fewer of them, with n: 1, or in several requests",
                param="prompt_logprobs",
            )

    async def begin(self, header_id: str | None) -> Generation:
        """Submit the prompts. header_id: the request's X-Request-Id. The caller ends the generation. Raises the
        engine's errors."""
        fields = self.request
        self.check()
        adapter = self.served.adapter_of(fields.model)
        self.id = answers.new_id(self.kind, fields.request_id or header_id)
        return await self.served.begin(self.prompts, self.params, adapter, request_id=self.id)

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Return the JSON of the reply, of all samples."""
        choices = [self.choice(self._pushed(index, rollout)) for index, rollout in enumerate(rollouts)]
        drawn = sum(len(rollout.token_ids) for rollout in rollouts)
        cached = sum(rollout.prefix_tokens for rollout in rollouts if rollout.sample == 0)
        used = answers.usage(sum(map(len, self.prompts)), drawn, cached)
        self.served.metrics.count_reply(used, self.began_s)
        whole = self._head(self.object) | {"choices": choices, "usage": used}
        if self.scores_choices:  # and each choice has its prompt
            return whole
        return whole | self.prompt_ids | _scores(self, rollouts[0])

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield the reply part by part. A failure during generation is an event, too."""
        options, head = self.request.stream_options or StreamOptions(), self._head(self.chunk)
        num_prompt, drawn, cached = sum(map(len, self.prompts)), 0, {}
        try:
            for beginning in self.beginning():
                yield event(head | beginning)
            async for index, rollout in generation.parts():
                if not drawn and len(rollout.token_ids):
                    self.served.metrics.first_token_s.observe(time.monotonic() - self.began_s)
                drawn += len(rollout.token_ids)
                cached[index // self.params.n] = rollout.prefix_tokens
                if (delta := self.delta(self._pushed(index, rollout))) is None:
                    continue
                chunk = head | {"choices": [delta]}
                if options.continuous_usage_stats:
                    chunk["usage"] = answers.usage(num_prompt, drawn, sum(cached.values()))
                yield event(chunk)
            used = answers.usage(num_prompt, drawn, sum(cached.values()))
            self.served.metrics.count_reply(used, self.began_s)
            if options.include_usage:
                yield event(head | {"choices": [], "usage": used})
        except Exception as error:
            yield event(as_api_error(error, "a streamed answer").body)
        yield DONE
        self.is_sent = True

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _pushed(self, index: int, rollout: Rollout) -> Choice:
        if index not in self._choices:
            self._choices[index] = Choice(self, index)
        self._choices[index].push(rollout)
        return self._choices[index]

    def _head(self, object: str) -> dict[str, Any]:
        model = self.request.model or self.served.names[0]
        return {"id": self.id, "request_id": self.id, "object": object, "created": int(time.time()), "model": model}


def _scores(reply: Reply, rollout: Rollout) -> dict[str, Any]:
    """Return the log-probabilities of a sample's prompt, if they were requested."""
    if reply.num_likely is None:
        return {}
    return {"prompt_logprobs": answers.prompt_logprobs(rollout, reply.served.decoder, reply.num_likely)}


class CompletionReply(Reply):
    """The reply of /v1/completions."""

    kind, object, chunk = "cmpl", "text_completion", "text_completion"
    scores_choices = True

    def __init__(self, *args: Any, echo: bool, top: int, **kwargs: Any):
        """echo: the text of each choice begins with its prompt. top: number of likeliest tokens at each token."""
        super().__init__(*args, **kwargs)
        self._echo, self._top = echo, top

    def choice(self, choice: Choice) -> dict[str, Any]:
        text, skip = choice.read.content, self.params.skip_special_tokens
        if self._echo and choice.num_parts == 1:
            text = self.served.decoder.decode(choice.prompt, skip_special_tokens=skip) + text
        json = {"index": choice.index, "text": text, "logprobs": None} | choice.fields(self)
        if self.with_logprobs:
            before: dict[str, list[Any]] = {}
            if self._echo:  # A request with echo and logprobs has one part.
                before = answers.echoed_logprobs(choice.rollout, self.token_name, self._top)
                choice.num_characters = sum(map(len, before["tokens"]))
            drawn = answers.completion_logprobs(choice.rollout, self.token_name, offset=choice.num_characters)
            choice.num_characters += sum(map(len, drawn["tokens"]))
            json["logprobs"] = {name: [*before.get(name, ()), *values] for name, values in drawn.items()}
        if self.with_ids and choice.num_parts == 1:
            json["prompt_token_ids"] = choice.prompt
        return json | _scores(self, choice.rollout)

    def check(self) -> None:
        super().check()
        if self._echo and self.params.n * sum(map(len, self.prompts)) > _MOST_ECHOED:
            raise ApiError(400, f"n echoes of the prompts are more than {_MOST_ECHOED:,} tokens", param="echo")


class ChatReply(Reply):
    """The reply of /v1/chat/completions."""

    kind, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, reader: Callable[[], Reader] | None, **kwargs: Any):
        """reader: makes a reader for each choice; None if the text of a choice is its content."""
        super().__init__(*args, **kwargs)
        self.reader, self.skip_special_tokens = reader, self.skip_special_tokens and reader is None
        self._only_first_call = isinstance(self.request, ChatRequest) and self.request.parallel_tool_calls is False

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self._json(choice, "message", answers.chat_message(*self._parts(choice.read)))

    def beginning(self) -> Iterator[dict[str, Any]]:
        for index in range(self.params.n):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {"choices": [choice]} | self.prompt_ids

    def delta(self, choice: Choice) -> dict[str, Any] | None:
        delta = answers.chat_delta(*self._parts(choice.read))
        if not delta and choice.finish_reason is None and not self.with_logprobs and not self.with_ids:
            return None
        return self._json(choice, "delta", delta)

    def _json(self, choice: Choice, name: str, message: dict[str, Any]) -> dict[str, Any]:
        json = {"index": choice.index, name: message, "logprobs": choice.chat_logprobs(self)} | choice.fields(self)
        return json | {"finish_reason": answers.chat_finish_reason(choice.finish_reason, choice.read.calls)}

    def _parts(self, read: Read) -> tuple[str, str, list[dict[str, Any]]]:
        return read.content, read.reasoning, read.calls[:1] if self._only_first_call else read.calls


class TokenReply(Reply):
    """The reply of vLLM's /inference/v1/generate: token ids, always with prompt and versions."""

    kind, object, chunk = "gen", "inference.generate", "inference.generate"

    def __init__(self, *args: Any, experts_from: int, experts_as_lists: bool, **kwargs: Any):
        """experts_from: the first token whose routed experts the client wants. experts_as_lists: SkyRL's form of routed
        experts; otherwise a NumPy file in base64, as in vLLM."""
        super().__init__(*args, **kwargs)
        self._experts_from, self._experts_as_lists = experts_from, experts_as_lists

    def choice(self, choice: Choice) -> dict[str, Any]:
        json = {"index": choice.index, "logprobs": choice.chat_logprobs(self), "sampling_mask": None}
        return json | choice.fields(self) | {"routed_experts": self._experts(choice.rollout.routed_experts)}

    def _experts(self, experts: np.ndarray | None) -> str | list[Any] | None:
        if experts is None:
            return None
        wanted = experts[self._experts_from :]
        return wanted.tolist() if self._experts_as_lists else answers.npy(wanted)


class EventStream(StreamingResponse):
    """The events of a reply. Its generation is cancelled if they cannot be sent."""

    def __init__(self, reply: Reply, generation: Generation):
        self._generation, self._reply, self._served = generation, reply, reply.served
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(reply.events(generation), media_type="text/event-stream", headers=headers)

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        except asyncio.CancelledError:  # The server ends, and the client does not read.
            if not self._served.ending:
                raise
        finally:
            if not self._reply.is_sent and not self._served.ending:
                self._served.metrics.cancelled.inc()
            self._generation.end()
