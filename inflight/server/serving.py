"""The endpoints that draw: /v1/completions, /v1/chat/completions and /inference/v1/generate.

Each makes a Job of a request: prompts, parameters, and a Shape, which says how an answer of that endpoint looks. A job
is answered at once or as server-sent events; a client that goes away cancels it.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from inflight.server.answers import new_id
from inflight.server.bodies import answer
from inflight.server.errors import ApiError
from inflight.server.job import EventStream, Job
from inflight.server.prompts import chat_prompt, completion_prompts
from inflight.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    OpenAIFields,
    StreamOptions,
    read_body,
    read_fields,
)
from inflight.server.served import Served
from inflight.server.shapes import ChatShape, CompletionShape, Shape, TokenShape

Value = TypeVar("Value")
_COMPLETION_TOKENS = 16
"""Tokens of /v1/completions where a request does not say, as the OpenAI API has it."""


async def completions(served: Served, request: Request) -> Response:
    """/v1/completions"""
    fields = read_fields(await read_body(request, served.max_body_bytes), CompletionRequest)
    prompts = completion_prompts(
        fields.prompt, served.tokenizer, served.names[0], special=fields.add_special_tokens is not False
    )
    asked = fields.logprobs is not None and fields.logprobs is not False
    top = 0 if isinstance(fields.logprobs, bool) else fields.logprobs or 0
    echoed = top if fields.echo and asked else None
    params = fields.params(max_tokens=_COMPLETION_TOKENS, top_logprobs=top, echoed=echoed)
    shape = CompletionShape(served, fields, params, logprobs=asked, echo=bool(fields.echo), top=top)
    return await _respond(served, request, fields, shape, prompts)


async def chat(served: Served, request: Request) -> Response:
    """/v1/chat/completions"""
    value = await read_body(request, served.max_body_bytes)
    if value.get("max_completion_tokens") is not None:
        value["max_tokens"] = value["max_completion_tokens"]
    fields = read_fields(value, ChatRequest)
    choice = fields.tool_choice or ("auto" if fields.tools else "none")
    if choice not in ("auto", "none"):
        raise ApiError(400, 'tool_choice must be "auto" or "none"; drawing is not guided', param="tool_choice")
    if choice == "auto" and fields.tools and not served.reading.reads_tools:
        raise ApiError(400, "the chat template of this model has no tool calls that the server can read", param="tools")
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    prompt = chat_prompt(fields, served.tokenizer, served.names[0])
    params = fields.params(max_tokens=served.max_context, top_logprobs=fields.top_logprobs or 0)
    tools = fields.tools if fields.tools and choice == "auto" else []
    continued = fields.messages[-1].get("content") if fields.continue_final_message else None
    reading = served.reading.of(prompt, continued, tools)
    shape = ChatShape(served, fields, params, logprobs=bool(fields.logprobs), reading=reading)
    return await _respond(served, request, fields, shape, [prompt])


async def generate(served: Served, request: Request, *, experts_as_lists: bool = False) -> Response:
    """/inference/v1/generate. experts_as_lists: /skyrl/v1/generate, with another form of routed experts."""
    fields = read_fields(await read_body(request, served.max_body_bytes), GenerateRequest)
    sampling = fields.sampling_params
    sampling.cache_salt = fields.cache_salt or sampling.cache_salt
    asked = sampling.logprobs is not None and sampling.logprobs is not False
    # One log-probability is that of the drawn token, as in vLLM.
    top = 0 if isinstance(sampling.logprobs, bool) or sampling.logprobs in (None, 1) else sampling.logprobs
    params = sampling.params(max_tokens=_COMPLETION_TOKENS, top_logprobs=top)
    shape = TokenShape(served, sampling, params, logprobs=asked, experts_as_lists=experts_as_lists)
    return await _respond(served, request, fields, shape, [fields.token_ids])


async def _respond(
    served: Served, request: Request, fields: OpenAIFields | GenerateRequest, shape: Shape, prompts: list[list[int]]
) -> Response:
    if fields.stream and shape.params.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs, and echo with logprobs, are there without stream alone", param="stream")
    adapter = served.adapter_of(fields.model)
    request_id = new_id(shape.kind, fields.request_id or request.headers.get("x-request-id"))
    shape.prompts, began_s = prompts, time.monotonic()
    shape.check_size()
    beginning = served.begin(prompts, shape.params, adapter, request_id=request_id, priority=fields.priority)
    generation = await _unless_gone(request, beginning)
    job = Job(served, shape, generation, request_id, fields.model or served.names[0], adapter, began_s)
    if fields.stream:
        return EventStream(job, fields.stream_options or StreamOptions())
    try:
        return answer(job.whole(await _unless_gone(request, generation.whole())))
    finally:
        generation.end()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """What work returns; if the client goes away first, work is cancelled and ClientDisconnect is raised."""
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
