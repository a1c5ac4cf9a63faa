"""Serves sessions over HTTP: an agent draws the turns of an episode by the API of OpenAI or of Anthropic."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from inflight.core.http_thread import listen
from inflight.core.messages import shorten
from inflight.core.sampling import SamplingParams
from inflight.episodes.endpoint import Endpoint
from inflight.episodes.limits import EpisodeEnd
from inflight.episodes.reply import Reply
from inflight.episodes.session import Session
from inflight.server import answers
from inflight.server.anthropic import MessagesRequest, error_response, stream_events, whole_message
from inflight.server.options import ServerOptions
from inflight.server.prompts import plain_messages, template_kwargs
from inflight.server.request_log import RequestLog
from inflight.server.requests import ChatRequest, read_chat, read_request, unless_gone
from inflight.server.responses import DONE, ApiError, answer, as_api_error, event

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_GRACE_S, _CLOSE_S = 1, 3.0
_MOST_BYTES = int(ServerOptions().max_body_mib * 2**20)
_FIXED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("min_tokens", "ignore_eos", "stop", "stop_token_ids"),
)
"""Fields that must have the values of the session."""
_RECORDED = ("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_weight_versions")
_MODEL = "inflight"
_EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A session that agents can use."""

    session: Session
    token: str
    rewards: bool
    """Requests can set rewards."""
    draws: set[asyncio.Future[Reply]] = field(default_factory=set)
    """Turns in progress."""
    replies: list[Reply] = field(default_factory=list)
    """Drawn turns."""


_Handler = Callable[[_Open, Request], Awaitable[Response]]
_Parts = tuple[str, str, list[dict[str, Any]]]
"""Content, reasoning and tool calls."""


class AgentServer:
    """Serves the sessions of one `Episodes` in its event loop, from the first session on."""

    def __init__(self) -> None:
        """Raises ListenError if no port is free."""
        options = ServerOptions()
        self._open: dict[str, _Open] = {}
        self._accepted: dict[str, _Open] = {}
        """Sessions of the shared address by their X-Session-ID."""
        self._shared = secrets.token_urlsafe(24)
        self._log = RequestLog()
        listening = listen(_HOST, 0)
        self._url = f"http://{_HOST}:{listening.getsockname()[1]}"
        app = Starlette(
            routes=[
                Route("/sessions/{id}/v1/chat/completions", self._guarded(chat), methods=["POST"]),
                Route("/sessions/{id}/v1/messages", self._guarded(messages, error_response), methods=["POST"]),
                Route("/sessions/{id}/reward", self._guarded(reward), methods=["POST"]),
            ],
            exception_handlers={HTTPException: _on_http_error},
        )
        app.state.receive_timeout_s = options.receive_timeout_s
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(options.keep_alive_s),
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        # Connections wait in the queue of the socket until the task has begun.
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))
        self._task.add_done_callback(lambda _: listening.close())

    def open(self, session: Session, *, rewards: bool) -> Endpoint:
        """Serve a session until it is closed. Then its turns in progress are cancelled. Raises EpisodeEnd."""
        if session.ended is not None:
            raise EpisodeEnd(session.ended)
        id, opened = secrets.token_hex(8), _Open(session, secrets.token_urlsafe(24), rewards)
        self._open[id] = opened
        names: list[str] = []

        def accept(name: str) -> Sequence[Reply]:
            names.append(name)
            named = self._accepted[name] = replace(opened, replies=[])
            return named.replies

        def close() -> None:
            del self._open[id]
            for name in names:
                del self._accepted[name]
            for draw in list(opened.draws):
                draw.cancel()

        session.at_close.append(close)
        own, shared = f"{self._url}/sessions/{id}", f"{self._url}/sessions/{self._shared}/v1"
        return Endpoint(own, opened.token, rewards, shared, accept)

    async def close(self) -> None:
        """End the server, within some seconds."""
        self._server.should_exit = True
        self._log.flush()
        await asyncio.wait([self._task], timeout=_CLOSE_S)
        if not self._task.done():
            logger.warning("the server of episodes did not end within %g s, and is left behind", _CLOSE_S)

    def _guarded(
        self, handler: _Handler, refuse: Callable[[ApiError], Response] = ApiError.response
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            began_s, reason, path = time.monotonic(), "", f"/sessions/…/{handler.__name__}"
            try:
                response = await handler(self._opened(request), request)
            except ClientDisconnect:
                response, reason = Response(status_code=499), "the client closed the connection"
            except Exception as error:
                told = as_api_error(error, f"a request for {path}")
                response, reason = refuse(told), told.message
            seconds, reason = time.monotonic() - began_s, shorten(reason.replace("\n", " "), 400)
            self._log.note(request.method[:20], path, response.status_code, seconds, "an agent", reason)
            return response

        return guarded

    def _opened(self, request: Request) -> _Open:
        """Return the session of a request. Raises ApiError."""
        id = request.path_params["id"]
        if secrets.compare_digest(id.encode(), self._shared.encode()):
            opened = self._accepted.get(request.headers.get("x-session-id", ""))
            if opened is None:
                raise ApiError(404, "no session has accepted this X-Session-ID, or its episode has ended")
            return opened
        opened = self._open.get(id)
        if opened is None:
            raise ApiError(404, "there is no such session, or its episode has ended")
        given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        if not secrets.compare_digest(given.encode(), opened.token.encode()):
            raise ApiError(401, "send the token of this session (Endpoint.token) as the API key")
        return opened


async def chat(opened: _Open, request: Request) -> Response:
    """Answer /sessions/ID/v1/chat/completions."""
    fields = await read_chat(request, _MOST_BYTES)
    parts, end, usage = await _draw(opened, request, fields)
    model = fields.model or _MODEL
    head: dict[str, Any] = {"id": answers.new_id("chatcmpl", None), "created": int(time.time()), "model": model}
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": end}
    if not fields.stream:
        choice["message"] = answers.chat_message(*parts)
        return answer(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
    head["object"] = "chat.completion.chunk"
    delta = {"role": "assistant", "content": ""} | answers.chat_delta(*parts)
    chunks = [{"choices": [choice | {"delta": delta, "finish_reason": None}]}, {"choices": [choice | {"delta": {}}]}]
    if fields.stream_options is not None and fields.stream_options.include_usage:
        chunks.append({"choices": [], "usage": usage})
    events = [*(event(head | chunk) for chunk in chunks), DONE]
    return Response(b"".join(events), headers=_EVENTS, media_type="text/event-stream")


async def messages(opened: _Open, request: Request) -> Response:
    """Answer /sessions/ID/v1/messages."""
    fields = await read_request(request, MessagesRequest, _MOST_BYTES)
    parts, end, usage = await _draw(opened, request, fields.chat())
    whole = whole_message(*parts, model=fields.model or _MODEL, finish_reason=end, usage=usage)
    if not fields.stream:
        return answer(whole)
    return Response(stream_events(whole), headers=_EVENTS, media_type="text/event-stream")


class _Reward(msgspec.Struct):
    reward: float


async def reward(opened: _Open, request: Request) -> Response:
    """Answer /sessions/ID/reward."""
    fields = await read_request(request, _Reward, _MOST_BYTES)
    if not opened.rewards:
        raise ApiError(403, "this session takes no rewards over HTTP: call session.endpoint(rewards=True)")
    try:
        opened.session.reward(fields.reward)
    except ValueError as error:
        raise ApiError(400, str(error), param="reward") from error
    return answer({"total_reward": opened.session.total_reward})


async def _draw(opened: _Open, request: Request, fields: ChatRequest) -> tuple[_Parts, str | None, dict[str, Any]]:
    """Draw a turn. Returns its parts, its finish reason and its usage. Raises ApiError, also if the episode has ended,
    and ClientDisconnect."""
    session = opened.session
    _check(fields, session.params)
    plain, variables = plain_messages(fields.messages), template_kwargs(fields)
    if not plain or plain[-1]["role"] == "assistant":
        raise ApiError(400, "messages must end with a message of a user or a tool", param="messages")
    draw = asyncio.ensure_future(session.chat(plain, tools=fields.tools, max_tokens=fields.max_tokens, **variables))
    opened.draws.add(draw)
    draw.add_done_callback(opened.draws.discard)
    try:
        reply = await unless_gone(request, draw)
    except EpisodeEnd as error:
        raise _ended(error.reason) from error
    except asyncio.CancelledError:
        if draw.cancelled() and session.ended is not None:
            raise _ended(session.ended) from None
        raise
    opened.replies.append(reply)
    parts = reply.content, reply.message.get("reasoning_content", ""), reply.calls
    usage = answers.usage(reply.prompt_tokens, len(reply.token_ids), reply.prefix_tokens)
    return parts, answers.chat_finish_reason(reply.finish_reason, reply.calls), usage


def _ended(reason: str) -> ApiError:
    # Clients repeat a request after 409.
    return ApiError(410, f"the episode has ended: {reason}", code=reason)


def _check(fields: ChatRequest, params: SamplingParams) -> None:
    """Raise ApiError for a field that the session does not support."""
    asked = fields.params(max_tokens=params.max_tokens, top_logprobs=0)
    for name in _FIXED:
        own = getattr(params, name)
        if getattr(fields, name) is not None and getattr(asked, name) != own:
            raise ApiError(
                400,
                f"{name} must be {own!r} as in the SamplingParams of this episode, because the trainer computes with "
                "them; leave it out",
                param=name,
            )
    for name in _RECORDED:
        if getattr(fields, name):
            raise ApiError(400, f"{name} is not supported here: the rollouts of the episode record it", param=name)
    if fields.n not in (None, 1):
        raise ApiError(400, "n must be 1; requests with the same messages draw further replies", param="n")
    if fields.continue_final_message:
        raise ApiError(400, "an episode continues no message of the client", param="continue_final_message")
    if fields.tool_choice not in (None, "auto") and (fields.tools or fields.tool_choice != "none"):
        raise ApiError(400, 'tool_choice must be "auto"; leave the tools out instead of "none"', param="tool_choice")


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = (
        f"{request.method} {request.url.path[:200]}: an episode has …/v1/chat/completions, …/v1/messages and …/reward"
    )
    return ApiError(status, message).response()
