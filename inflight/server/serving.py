"""The generation endpoints: /v1/completions, /v1/chat/completions and /inference/v1/generate.

Each makes a Reply of a request. It is sent at once or as server-sent events; a client that leaves cancels it.
"""

from starlette.requests import Request
from starlette.responses import Response

from inflight.server.prompts import chat_prompt, completion_prompts, plain_messages
from inflight.server.replies import ChatReply, CompletionReply, EventStream, Reply, TokenReply
from inflight.server.requests import CompletionRequest, GenerateRequest, read_chat, read_request, unless_gone
from inflight.server.responses import ApiError, answer
from inflight.server.served import Served

_COMPLETION_TOKENS = 16
"""The OpenAI API's default of max_tokens at /v1/completions."""


async def completions(served: Served, request: Request) -> Response:
    """/v1/completions"""
    fields = await read_request(request, CompletionRequest, served.max_body_bytes)
    special = fields.add_special_tokens is not False
    prompts = completion_prompts(fields.prompt, served.tokenizer, served.names[0], special=special)
    logprobs = fields.logprobs is not None and fields.logprobs is not False
    top = 0 if isinstance(fields.logprobs, bool) else fields.logprobs or 0
    echoed = top if fields.echo and logprobs else None
    params = fields.params(max_tokens=_COMPLETION_TOKENS, top_logprobs=top, echoed=echoed)
    reply = CompletionReply(served, fields, params, prompts, logprobs=logprobs, echo=bool(fields.echo), top=top)
    return await _respond(reply, request)


async def chat(served: Served, request: Request) -> Response:
    """/v1/chat/completions"""
    fields = await read_chat(request, served.max_body_bytes)
    choice = fields.tool_choice or ("auto" if fields.tools else "none")
    if choice not in ("auto", "none"):
        raise ApiError(400, 'tool_choice must be "auto" or "none"; drawing is not guided', param="tool_choice")
    if choice == "auto" and fields.tools and not served.readers.reads_tools:
        raise ApiError(400, "the chat template of this model has no tool calls that the server can read", param="tools")
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    prompt = chat_prompt(fields, served.tokenizer, served.names[0])
    params = fields.params(max_tokens=served.max_context, top_logprobs=fields.top_logprobs or 0)
    tools = fields.tools if fields.tools and choice == "auto" else []
    continued = plain_messages(fields.messages[-1:])[0]["content"] if fields.continue_final_message else None
    reader = served.readers.of(prompt, continued, tools, skip_special_tokens=params.skip_special_tokens)
    reply = ChatReply(served, fields, params, [prompt], logprobs=bool(fields.logprobs), reader=reader)
    return await _respond(reply, request)


async def generate(served: Served, request: Request, *, experts_as_lists: bool = False) -> Response:
    """/inference/v1/generate. experts_as_lists: /skyrl/v1/generate, with another form of routed experts."""
    fields = await read_request(request, GenerateRequest, served.max_body_bytes)
    sampling = fields.sampling_params
    sampling.cache_salt = fields.cache_salt or sampling.cache_salt
    sampling.priority = fields.priority if sampling.priority is None else sampling.priority
    logprobs = sampling.logprobs is not None and sampling.logprobs is not False
    # One log-probability is the drawn token's, as in vLLM.
    top = 0 if isinstance(sampling.logprobs, bool) or sampling.logprobs in (None, 1) else sampling.logprobs
    params = sampling.params(max_tokens=_COMPLETION_TOKENS, top_logprobs=top)
    start, most = sampling.routed_experts_prompt_start or 0, len(fields.token_ids)
    if not 0 <= start <= most:
        message = f"routed_experts_prompt_start must be in [0, {most}] (the prompt's length), got {start}"
        raise ApiError(400, message, param="routed_experts_prompt_start")
    options = {"experts_from": start, "experts_as_lists": experts_as_lists}
    return await _respond(TokenReply(served, fields, params, [fields.token_ids], logprobs=logprobs, **options), request)


async def _respond(reply: Reply, request: Request) -> Response:
    generation = await unless_gone(request, reply.begin(request.headers.get("x-request-id")))
    if reply.request.stream:
        return EventStream(reply, generation)
    try:
        return answer(reply.whole(await unless_gone(request, generation.whole())))
    finally:
        generation.end()
