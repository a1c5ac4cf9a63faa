"""The application: the endpoint of each path, and its access check."""

import ipaddress
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inflight.core.version import __version__
from inflight.server import control, models, serving
from inflight.server.responses import ApiError, always
from inflight.server.served import Endpoint, Served

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")
"""Headers of requests that a loopback peer forwards for another machine: a proxy, or a web page."""


Access = Literal["everybody", "clients", "control"]
"""Clients that can use an endpoint. clients: with the token, if there is one. control: with the token; without a token,
peers on the loopback."""
ENDPOINTS: Mapping[Access, Mapping[str, Endpoint]] = {
    "everybody": {
        "GET /health": models.health,
        "GET /ping": models.health,
        "GET /liveness": always({"status": "ok"}),
    },
    "clients": {
        "GET /v1/models": models.list_models,
        "GET /v1/models/{name:path}": models.one_model,
        "GET /version": always({"version": __version__}),
        "GET /metrics": models.metrics,
        "GET /load": models.load,
        "GET /server_info": models.server_info,
        "GET /get_world_size": always({"world_size": 1}),  # several engines are one server
        "POST /tokenize": models.tokenize,
        "POST /detokenize": models.detokenize,
        "POST /v1/completions": serving.completions,
        "POST /v1/chat/completions": serving.chat,
        "POST /inference/v1/generate": serving.generate,
        "GET /weight_info": control.weight_info,
        "GET /is_paused": control.is_paused,
        "GET /is_sleeping": control.is_sleeping,
        "POST /skyrl/v1/generate": partial(serving.generate, experts_as_lists=True),
    },
    "control": {
        "POST /pause": control.pause,
        "POST /resume": control.resume,
        "POST /abort_requests": control.abort_requests,
        "POST /sleep": control.sleep,
        "POST /wake_up": control.wake_up,
        # A cached prefix serves only the weights that computed it.
        "POST /reset_prefix_cache": always({"success": True}),
        "POST /init_weight_transfer_engine": control.init_weight_transfer,
        "POST /shutdown_weight_transfer_engine": control.shut_down_transfer,
        "POST /start_weight_update": control.start_update,
        "POST /update_weights": control.update_weights,
        "POST /finish_weight_update": control.finish_update,
        "POST /update_weight_version": control.update_version,
        "POST /weight_checker": control.weight_checker,
        "POST /v1/load_lora_adapter": control.load_adapter,
        "POST /v1/unload_lora_adapter": control.unload_adapter,
        "POST /areal_pause_generation": control.pause,
        "POST /areal_continue_generation": control.resume,
        "POST /areal_update_weights": control.update_weights,
        # vLLM refuses a second adapter of one name. prime-rl and SkyRL replace the first.
        "POST /load_lora_adapter": partial(control.load_adapter, replace=True),
        "POST /unload_lora_adapter": control.unload_adapter,
        "POST /skyrl/v1/load_lora_adapter": partial(control.load_adapter, replace=True),
        # AReaL's and SkyRL's own ways to send tensors over NCCL.
        "POST /collective_rpc": control.refuse,
        "POST /areal_init_weights_update_group": control.refuse,
        "POST /areal_set_update_weight_meta{lora:path}": control.refuse,
        "POST /areal_update_weights_{way:path}": control.refuse,
    },
}
"""Maps methods and paths to their endpoints."""


def make_app(served: Served) -> Starlette:
    """Make the application of one engine."""
    routes = []
    for access, endpoints in ENDPOINTS.items():
        for name, endpoint in endpoints.items():
            method, _, path = name.partition(" ")
            routes.append(Route(path, _guarded(served, path, endpoint, access), methods=[method]))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with served.open():
            yield

    async def on_http_error(request: Request, error: Exception) -> Response:
        """Reply to an unknown path, or to a method that the path does not support."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        told = ApiError(status, f"{request.method} {request.url.path[:200]}: {getattr(error, 'detail', 'failed')}")
        served.log.note(request, request.url.path[:200], status, 0.0, told.message)
        return told.response()

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: on_http_error})
    app.state.receive_timeout_s = served.options.receive_timeout_s
    return app


def _guarded(served: Served, path: str, endpoint: Endpoint, access: Access) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        _check_access(served, request, access)
        return await endpoint(served, request)

    async def guarded(request: Request) -> Response:
        response = await served.log.answer(request, path, respond(request))
        if response.status_code == 499:
            served.metrics.cancelled.inc()
        served.metrics.requests.labels(path, response.status_code).inc()
        return response

    return guarded


def _check_access(served: Served, request: Request, access: Access) -> None:
    """Raise ApiError for a request without access."""
    if access == "everybody":
        return
    if token := served.options.token:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise ApiError(401, "this server has a token: send it as `Authorization: Bearer TOKEN`")
    elif access == "control" and served.options.control != "anyone" and not _is_local(request):
        raise ApiError(
            403,
            "control requests are obeyed from this machine alone; start the server with --token, or with --control "
            "anyone where everybody who reaches its port may change its weights",
        )


def _is_local(request: Request) -> bool:
    """Return whether a request is from a program on this machine that does not forward it."""
    if request.client is None or any(name in request.headers for name in _FORWARDED):
        return False
    try:
        address = ipaddress.ip_address(request.client.host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
