"""Bodies of requests: fields that are read, and fields that are refused by name.

Names and meanings are the OpenAI API's and vLLM's. An unknown field is ignored, as by vLLM. A known field that is not
supported is refused unless it has its neutral value.
"""

import asyncio
import re
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from inflight.core.decoders import convert
from inflight.core.messages import shorten
from inflight.core.sampling import SamplingParams
from inflight.server.responses import ApiError

Body = TypeVar("Body", bound=msgspec.Struct)
Value = TypeVar("Value")

_PATH = re.compile(r" - at (?:`key` in )?`\$\.(.*?)`$")
"""The place of a wrong value in messages of msgspec."""
_THROWN_AWAY = 16
"""A body of up to this many times the bound is read to its end. On a larger one the connection is closed."""
_AS_GIVEN = (
    *("n", "max_tokens", "temperature", "top_p", "min_p", "min_tokens", "ignore_eos", "repetition_penalty"),
    *("skip_special_tokens", "cache_salt", "priority"),
)
"""Fields of SamplingParams with the same meaning. If they are not given, its defaults hold."""
_GUIDED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_REFUSED_BY_ALL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (0,),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "trace_decode_token_ids": (),
    "truncate_prompt_tokens": (-1,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    **dict.fromkeys(_GUIDED, ()),
}


class SamplingFields(msgspec.Struct, kw_only=True):
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_sampling_mask: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int | None = None

    def params(self, *, max_tokens: int, top_logprobs: int, echoed: int | None = None) -> SamplingParams:
        """Return the sampling parameters. Raises ApiError for a value that is out of range. max_tokens: the default.
        echoed: number of likeliest tokens that an echo needs at each token of the prompt; None: no echo."""
        if self.top_k is not None and self.top_k < -1:
            raise ApiError(400, f"top_k must be positive, or 0 or -1 for all tokens, got {self.top_k}", param="top_k")
        given: dict[str, Any] = {name: value for name in _AS_GIVEN if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            if not -(2**63) <= self.seed < 2**63:
                raise ApiError(400, f"seed must be in [−2**63, 2**63), got {self.seed}", param="seed")
            given["seed"] = self.seed % 2**63
        try:
            return SamplingParams(
                **{"max_tokens": max_tokens, **given},
                top_k=max(0, self.top_k or 0),
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logit_bias=self.logit_bias or {},
                top_logprobs=top_logprobs,
                return_sampling_mask=bool(self.return_sampling_mask),
                prompt_logprobs=max((n for n in (self.prompt_logprobs, echoed) if n is not None), default=None),
            )
        except ValueError as error:
            message = str(error)
            if not hasattr(self, "top_logprobs"):  # Completions have one field for both.
                message = message.replace("top_logprobs", "logprobs")
            raise ApiError(400, message, param=message.split(" ", 1)[0]) from error


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None


class CompletionRequest(OpenAIFields, kw_only=True):
    prompt: str | list[Any]
    """Text, token ids, or a list of these."""
    logprobs: int | bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatRequest(OpenAIFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenSampling(SamplingFields, kw_only=True):
    logprobs: int | bool | None = None
    routed_experts_prompt_start: int | None = None
    """Number of prompt tokens whose routed experts the client has."""


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Token ids in and out; `sampling_params` are vLLM's."""

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    token_ids: list[int]
    sampling_params: TokenSampling = msgspec.field(default_factory=TokenSampling)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_REFUSED: dict[type, dict[str, tuple[Any, ...]]] = {
    CompletionRequest: _REFUSED_BY_ALL
    | {"best_of": (1,), "suffix": ("",), "prompt_embeds": (), "response_format": ({"type": "text"},)},
    ChatRequest: _REFUSED_BY_ALL
    | {
        "echo": (False,),
        "response_format": ({"type": "text"},),
        "functions": ([],),
        "function_call": ("none",),
        "chat_template": (),
        "documents": ([],),
        "modalities": (["text"],),
        "audio": (),
        "mm_processor_kwargs": ({},),
    },
    GenerateRequest: {"features": (), "content_parts": ([],), "kv_transfer_params": ()},
    TokenSampling: _REFUSED_BY_ALL,
    TokenizeRequest: {"chat_template": ()},
}


async def read_body(request: Request, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object of a body; an empty one for an empty body. Raises ApiError for another value, for a larger
    body, and for one that does not arrive in time. Most clients read a reply only after they have sent all, so a part
    of a larger body is read and discarded."""
    body, num_bytes, timeout_s = bytearray(), 0, request.app.state.receive_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= most_bytes:
                    body += part
                else:
                    body.clear()
                if num_bytes > _THROWN_AWAY * most_bytes:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s (receive_timeout_s)") from None
    if num_bytes > most_bytes:
        raise ApiError(
            413,
            f"Request entity too large: the body has more than {most_bytes:,} bytes, the most that the server takes "
            "(max_body_mib)",
            code="request_too_large",
        )
    if not body.strip():
        return {}
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}")
    return value


async def read_request(request: Request, kind: type[Body], most_bytes: int) -> Body:
    """Return the fields of a request's body. Raises the errors of `read_body` and `read_fields`."""
    return read_fields(await read_body(request, most_bytes), kind)


async def read_chat(request: Request, most_bytes: int) -> ChatRequest:
    """Return the fields of a chat request. Raises the errors of `read_body` and `read_fields`."""
    fields = read_fields(await read_body(request, most_bytes), ChatRequest)
    if fields.max_completion_tokens is not None:
        if fields.max_completion_tokens < 1:
            message = f"max_completion_tokens must be at least 1, got {fields.max_completion_tokens}"
            raise ApiError(400, message, param="max_completion_tokens")
        fields.max_tokens = fields.max_completion_tokens
    return fields


def read_fields(value: Mapping[str, Any], kind: type[Body]) -> Body:
    """Return the fields of a request. Raises ApiError with the name of a field that is wrong or not supported."""
    _check_refused(value, kind)
    if kind is GenerateRequest and isinstance(sampling := value.get("sampling_params"), dict):
        _check_refused(sampling, TokenSampling)
    try:
        return convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        text = str(error)
        path = _PATH.search(text)
        param = path[1] if path else (text.split("`")[1] if "missing required field" in text else None)
        raise ApiError(400, shorten(text, 300), param=param) from error


def _check_refused(value: Mapping[str, Any], kind: type) -> None:
    for name, neutral in _REFUSED.get(kind, {}).items():
        given = value.get(name)
        if given is not None and given not in neutral:
            raise ApiError(
                400,
                f"{name} is not supported by this server"
                + (f"; leave it out, or send {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""),
                param=name,
            )


async def unless_gone(request: Request, work: Coroutine[Any, Any, Value] | asyncio.Future[Value]) -> Value:
    """Return the result of `work`. If the client leaves first, cancel it and raise ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection. The body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
