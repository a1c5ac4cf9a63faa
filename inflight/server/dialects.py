"""Paths for a single trainer: another form of an endpoint, or a way to send weights that this server refuses."""

from collections.abc import Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from inflight.server import control, serving
from inflight.server.errors import ApiError
from inflight.server.served import Endpoint, Served

DRAWING: Mapping[str, Endpoint] = {
    "POST /skyrl/v1/generate": partial(serving.generate, experts_as_lists=True),
}
"""Maps methods and paths to their endpoints."""
STEERING: Mapping[str, Endpoint] = {
    "POST /areal_pause_generation": control.pause,
    "POST /areal_continue_generation": control.resume,
    "POST /areal_update_weights": control.update_weights,
    # vLLM refuses a second adapter of one name. prime-rl and SkyRL replace the first.
    "POST /load_lora_adapter": partial(control.load_adapter, replace=True),
    "POST /unload_lora_adapter": control.unload_adapter,
    "POST /skyrl/v1/load_lora_adapter": partial(control.load_adapter, replace=True),
}
_COLLECTIVES = (
    "collective_rpc",
    "areal_init_weights_update_group",
    "areal_set_update_weight_meta",
    "areal_update_weights_xccl",
    "areal_set_update_weight_meta_lora",
    "areal_update_weights_lora_xccl",
)
"""AReaL's and SkyRL's own names for tensors over NCCL."""


async def _refuse(served: Served, request: Request) -> Response:
    raise ApiError(501, control.NO_NCCL)


REFUSED: Mapping[str, Endpoint] = dict.fromkeys((f"POST /{name}" for name in _COLLECTIVES), _refuse)
