"""Serves sessions over HTTP: an agent draws the turns of an episode by the API of OpenAI or of Anthropic."""

import asyncio
import inspect
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inflight.core.errors import InflightError
from inflight.core.http_thread import listen
from inflight.core.messages import shorten
from inflight.core.sampling import SamplingParams
from inflight.episodes.endpoint import Endpoint
from inflight.episodes.limits import EpisodeEnd
from inflight.episodes.offers import Offer, Offers, ended, is_same, key_of, no_session
from inflight.episodes.reply import Reply
from inflight.episodes.session import Session
from inflight.server import answers
from inflight.server.anthropic import MessagesRequest, error_response, stream_events, whole_message
from inflight.server.http_server import uvicorn_options
from inflight.server.options import ServerOptions
from inflight.server.prompts import plain_messages, template_kwargs
from inflight.server.request_log import RequestLog
from inflight.server.requests import ChatRequest, read_chat, read_request, unless_gone
from inflight.server.responses import DONE, ApiError, answer, encode, event

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_GRACE_S, _CLOSE_S = 1, 3.0
_MOST_BYTES = int(ServerOptions().max_body_mib * 2**20)
_FIXED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("min_tokens", "ignore_eos", "stop", "stop_token_ids"),
)
"""Fields that must have the values of the session."""
_RECORDED = (
    *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_weight_versions"),
    "include_stop_str_in_output",
)
_OF_CHAT = inspect.signature(Session.chat).parameters.keys()
"""Names that are no variables of a chat template."""
_MODEL = "inflight"
_EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A session that agents can use."""

    session: Session
    token: str
    rewards: bool
    """Requests can set rewards."""
    offer: Offer | None = None
    """Of an episode that a worker plays."""
    replies: list[Reply] = field(default_factory=list)
    """Drawn turns."""


_Handler = Callable[[_Open, Request], Awaitable[Response]]
Address = tuple[socket.socket, str]
"""A socket that listens, and the URL that agents call."""
_Parts = tuple[str, str, list[dict[str, Any]]]
"""Content, reasoning and tool calls."""


class AgentServer:
    """Serves the sessions of one `Episodes` in its event loop, from the first session on."""

    def __init__(self, address: Address | None = None) -> None:
        """address: None is a free port of 127.0.0.1. Raises ListenError if none is free."""
        options = ServerOptions()
        self._open: dict[str, _Open] = {}
        self._accepted: dict[str, _Open] = {}
        """Sessions of the shared address by their X-Session-ID."""
        self._shared = secrets.token_urlsafe(24)
        self._offers = Offers(_MOST_BYTES)
        self._is_named = address is not None
        self._log = RequestLog()
        listening, self._url = address or open_address(f"{_HOST}:0", None)
        app = Starlette(
            routes=[
                Route("/sessions", self._claim, methods=["POST"]),
                self._route("/v1/chat/completions", chat),
                self._route("/v1/messages", messages, error_response),
                self._route("/reward", reward),
                self._route("/end", end),
            ],
            exception_handlers={HTTPException: _on_http_error},
        )
        app.state.receive_timeout_s = options.receive_timeout_s
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            **uvicorn_options(options),
        )
        self._server = uvicorn.Server(config)
        # Connections wait in the queue of the socket until the task has begun.
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))
        self._task.add_done_callback(lambda _: listening.close())

    def open(self, session: Session, *, rewards: bool, offer: Offer | None = None) -> Endpoint:
        """Serve a session until it is closed. offer: lets requests end the session. Raises EpisodeEnd."""
        if session.ended is not None:
            raise EpisodeEnd(session.ended)
        id, opened = secrets.token_hex(8), _Open(session, secrets.token_urlsafe(24), rewards, offer)
        self._open[id] = opened
        names: list[str] = []

        def accept(name: str) -> Sequence[Reply]:
            if name in self._accepted:
                raise ValueError(
                    f"the id {name!r} was accepted already, for an episode in progress: choose another one, such as "
                    f'f"{{id}}-{{session.sample}}" for the episodes of a row'
                )
            names.append(name)
            named = self._accepted[name] = replace(opened, replies=[])
            return named.replies

        def close() -> None:
            del self._open[id]
            for name in names:
                del self._accepted[name]
            if offer is not None:
                offer.end.cancel()

        session.at_close.append(close)
        own, shared = f"{self._url}/sessions/{id}", f"{self._url}/sessions/{self._shared}/v1"
        return Endpoint(own, opened.token, rewards, shared, accept)

    def offer(self, session: Session, row: Any, key: str) -> Offer:
        """Offer a session to the workers with this key. Raises EpisodeEnd, TypeError for a row that is not JSON-like,
        and InflightError if workers cannot have the address."""
        if not self._is_named:
            raise InflightError('workers need an address: Episodes(…, agents="HOST:PORT")')
        try:
            plain = msgspec.Raw(encode(row))
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"rows for RemoteAgents must be JSON-like: {error}") from error
        offer = Offer()
        endpoint = self.open(session, rewards=True, offer=offer)
        offer.task = encode(
            {
                "id": endpoint.root.rpartition("/")[2],
                "row": plain,
                "root": endpoint.root,
                "base_url": endpoint.url,
                "key": endpoint.token,
                "environment": endpoint.environment,
            }
        )
        self._offers.put(key, offer)
        return offer

    async def close(self) -> None:
        """End the server, within some seconds."""
        self._server.should_exit = True
        self._offers.close()
        self._log.flush()
        await asyncio.wait([self._task], timeout=_CLOSE_S)
        if not self._task.done():
            logger.warning("the server of episodes did not end within %g s, and is left behind", _CLOSE_S)

    def _route(self, path: str, handler: _Handler, refuse: Callable[[ApiError], Response] = ApiError.response) -> Route:
        """Return a route below the addresses of sessions."""

        async def respond(request: Request) -> Response:
            opened = self._opened(request)
            with nullcontext() if opened.offer is None else opened.offer.request():
                return await handler(opened, request)

        async def answered(request: Request) -> Response:
            return await self._log.answer(request, f"/sessions/…/{handler.__name__}", respond(request), refuse)

        return Route(f"/sessions/{{id}}{path}", answered, methods=["POST"])

    async def _claim(self, request: Request) -> Response:
        return await self._log.answer(request, "/sessions", self._offers.claim(request))

    def _opened(self, request: Request) -> _Open:
        """Return the session of a request. Raises ApiError."""
        id = request.path_params["id"]
        if is_same(id, self._shared):
            opened = self._accepted.get(request.headers.get("x-session-id", ""))
            if opened is None:
                raise ApiError(404, "no session has accepted this X-Session-ID, or its episode has ended")
            return opened
        opened = self._open.get(id)
        if opened is None or (opened.offer is not None and opened.offer.end.done()):
            raise no_session()
        if not is_same(key_of(request), opened.token):
            raise ApiError(401, "send the token of this session (Endpoint.token) as the API key")
        return opened


async def chat(opened: _Open, request: Request) -> Response:
    """Answer /sessions/ID/v1/chat/completions."""
    fields = await read_chat(request, _MOST_BYTES)
    parts, end, stop_reason, usage = await _draw(opened, request, fields)
    model = fields.model or _MODEL
    head: dict[str, Any] = {"id": answers.new_id("chatcmpl", None), "created": int(time.time()), "model": model}
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": end, "stop_reason": stop_reason}
    if not fields.stream:
        choice["message"] = answers.chat_message(*parts)
        return answer(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
    head["object"] = "chat.completion.chunk"
    delta = {"role": "assistant", "content": ""} | answers.chat_delta(*parts)
    chunks = [
        {"choices": [choice | {"delta": delta, "finish_reason": None, "stop_reason": None}]},
        {"choices": [choice | {"delta": {}}]},
    ]
    if fields.stream_options is not None and fields.stream_options.include_usage:
        chunks.append({"choices": [], "usage": usage})
    events = [*(event(head | chunk) for chunk in chunks), DONE]
    return Response(b"".join(events), headers=_EVENTS, media_type="text/event-stream")


async def messages(opened: _Open, request: Request) -> Response:
    """Answer /sessions/ID/v1/messages."""
    fields = await read_request(request, MessagesRequest, _MOST_BYTES)
    parts, end, stop_reason, usage = await _draw(opened, request, fields.chat())
    model = fields.model or _MODEL
    whole = whole_message(*parts, model=model, finish_reason=end, usage=usage, stop_reason=stop_reason)
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


class _End(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | dict[str, float] | None = None
    error: str | None = None


async def end(opened: _Open, request: Request) -> Response:
    """Answer /sessions/ID/end."""
    fields = await read_request(request, _End, _MOST_BYTES)
    if opened.offer is None:
        raise ApiError(403, "the rollout function ends this episode, not its agent")
    if fields.reward is not None and fields.error is not None:
        raise ApiError(400, "an episode with an error has no reward: send one of them", param="error")
    if fields.reward is not None and opened.session.last is None:
        raise ApiError(400, "a reward is added to the last drawn turn, and no turn has been drawn", param="reward")
    if opened.offer.end.done():
        raise no_session()
    error = None if fields.error is None else shorten(fields.error)
    opened.offer.end.set_result((fields.reward, error))
    return Response(status_code=204)


async def _draw(
    opened: _Open, request: Request, fields: ChatRequest
) -> tuple[_Parts, str | None, str | int | None, dict[str, Any]]:
    """Draw a turn. Returns its parts, its finish reason, its stop reason and its usage. Raises ApiError, also if the
    episode has ended, and ClientDisconnect."""
    session = opened.session
    _check(fields, session.params)
    plain, variables = plain_messages(fields.messages), template_kwargs(fields, _OF_CHAT)
    if not plain or plain[-1]["role"] == "assistant":
        raise ApiError(400, "messages must end with a message of a user or a tool", param="messages")
    draw = asyncio.ensure_future(session.chat(plain, tools=fields.tools, max_tokens=fields.max_tokens, **variables))
    try:
        reply = await unless_gone(request, draw)
    except EpisodeEnd as error:
        raise ended(error.reason) from error
    except asyncio.CancelledError:
        if draw.cancelled() and session.ended is not None:
            raise ended(session.ended) from None
        raise
    opened.replies.append(reply)
    parts = reply.content, reply.message.get("reasoning_content", ""), reply.calls
    usage = answers.usage(reply.prompt_tokens, len(reply.token_ids), reply.prefix_tokens)
    return parts, answers.chat_finish_reason(reply.finish_reason, reply.calls), reply.stop_reason, usage


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
    if fields.add_generation_prompt is False:
        raise ApiError(400, "a turn needs the beginning of an answer; leave this out", param="add_generation_prompt")
    if fields.parallel_tool_calls is False:
        raise ApiError(400, "a turn can have several tool calls; leave this out", param="parallel_tool_calls")
    if fields.tool_choice not in (None, "auto") and (fields.tools or fields.tool_choice != "none"):
        raise ApiError(400, 'tool_choice must be "auto"; leave the tools out instead of "none"', param="tool_choice")


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = (
        f"{request.method} {request.url.path[:200]}: there are POST /sessions for workers, and for an episode "
        "…/v1/chat/completions, …/v1/messages, …/reward and …/end"
    )
    return ApiError(status, message).response()


def open_address(agents: str, url: str | None) -> Address:
    """Listen for agents. agents: "HOST:PORT", port 0 for a free one. url: for agents; None is http://HOST:PORT. Raises
    ValueError, and ListenError."""
    host, _, port = agents.rpartition(":")
    plain = host[1:-1] if re.fullmatch(r"\[.*]", host) else host
    if not (plain and port.isdecimal() and int(port) < 1 << 16) or (":" in plain) == (plain == host):
        raise ValueError(f'agents must be "HOST:PORT", such as "10.0.0.5:8700", got {agents!r}')
    if url is not None and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise ValueError(f'agents_url must be an address such as "http://10.0.0.5:8700", got {url!r}')
    listening = listen(
        plain,
        int(port),
        host_advice='agents="HOST:PORT" takes an address of this machine, and agents_url the address for agents',
    )
    bound, port = listening.getsockname()[:2]
    if url is None and ipaddress.ip_address(bound.partition("%")[0]).is_unspecified:
        listening.close()
        raise ValueError(
            f"agents={agents!r} listens on all addresses of this machine, and agents cannot call {host}; pass the "
            'address that they call, such as agents_url="http://10.0.0.5:8700"'
        )
    return listening, (url or f"http://{host}:{port}").rstrip("/")
