"""The endpoints that steer an engine: weights, adapters, pauses, sleep. Their names and bodies are those of vLLM, and
of what prime-rl and AReaL put beside it.

An update is staged while decoding goes on and goes live between two forward passes; the answer comes when it is live.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight.server.bodies import always, answer
from inflight.server.errors import ApiError, as_api_error
from inflight.server.requests import read_body, read_fields
from inflight.server.served import Served
from inflight.weights.nccl.library import why_not
from inflight.weights.nccl.rendezvous import Rendezvous

logger = logging.getLogger("inflight.server")

_MOST_BYTES = 1 << 20
_MOST_NAMES_BYTES = 16 << 20
"""A mixture of experts has tens of thousands of tensors."""
_OTHER_WAYS = (
    'send a checkpoint directory that the server can read (POST /update_weights {"weight_dir": "/path"}), an adapter '
    "directory (POST /v1/load_lora_adapter), or publish from the trainer's own process (engine.publisher(model) beside "
    "engine.serve())"
)
_NO_NCCL = f"no tensors come over NCCL here, where no trainer was met in vLLM's way; {_OTHER_WAYS}"


class _Pause(msgspec.Struct):
    mode: str | None = None


class _InitInfo(msgspec.Struct):
    init_info: dict[str, Any] = {}


class _Update(msgspec.Struct):
    """`weight_dir` is prime-rl's, `model_path` AReaL's, `update_info` vLLM's."""

    weight_dir: str | None = None
    model_path: str | None = None
    update_info: dict[str, Any] | None = None
    weight_version: str | None = None


class _Finish(msgspec.Struct):
    weight_version: str | None = None


class _NewVersion(msgspec.Struct):
    new_version: str


class _Checker(msgspec.Struct):
    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


class _Abort(msgspec.Struct):
    request_ids: list[str] | None = None
    abort_all: bool | None = None


class _LoadAdapter(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    weight_version: str | None = None
    """What spans call the version that brings it; ours."""


class _UnloadAdapter(msgspec.Struct):
    lora_name: str


# ---- weights --------------------------------------------------------------------------------------------------------


async def init_weight_transfer(served: Served, request: Request) -> Response:
    """Meet a trainer that sends tensors by NCCL, unless it says that it names directories."""
    fields = await _fields(request, _InitInfo)
    served.broadcasts.give_up()  # what a client began that ended before it finished
    if not fields.init_info or fields.init_info.get("backend") == "directory":
        return _done("weights come from directories")
    reason = why_not(served.engine.info.device)
    if reason is not None:
        raise ApiError(501, f"no tensors are received: {reason}; {_OTHER_WAYS}", param="init_info")
    with _told_once():
        await served.broadcasts.meet(read_fields(fields.init_info, Rendezvous))
    return _done("the trainer was met; weights come by NCCL")


async def no_collectives(served: Served, request: Request) -> Response:
    """Refused: AReaL's and SkyRL's own names for tensors over NCCL."""
    raise ApiError(501, _NO_NCCL)


async def shut_down_transfer(served: Served, request: Request) -> Response:
    """Leave the trainer's group, and forget an update that was begun and not finished."""
    await served.broadcasts.leave()
    return _done("weights come from directories")


async def start_update(served: Served, request: Request) -> Response:
    """Directories and tensors that /update_weights names in its `update_info` make a version at /finish_weight_update,
    from now on."""
    served.broadcasts.begin()
    return _done("an update has begun")


async def update_weights(served: Served, request: Request) -> Response:
    """Publish a checkpoint directory. Between start and finish one in `update_info`, which only a client of these three
    steps sends, is noted for finish; so whoever began an update and ended keeps no other client from publishing.
    Tensors that `update_info` names are received now; whoever else publishes waits until that update is finished, or
    nothing came for two minutes."""
    fields = await _fields(request, _Update, _MOST_NAMES_BYTES)
    info = fields.update_info or {}
    if "names" in info and served.broadcasts.met:
        with _told_once():
            await served.broadcasts.receive(info)
        return _done("the tensors are here; /finish_weight_update publishes them")
    at_once = fields.weight_dir or fields.model_path
    directory = at_once or info.get("weight_dir") or info.get("path")
    if not isinstance(directory, str):
        raise ApiError(501 if fields.update_info else 400, _NO_NCCL, param="weight_dir")
    if not at_once and served.broadcasts.begun is not None:
        served.broadcasts.begun.directories.append(directory)
        return _done("noted; /finish_weight_update publishes it")
    version = await served.updates.publish_directory(directory, fields.weight_version)
    return _done("the weights are live", weight_version=served.updates.name_of(version), version=version)


@contextmanager
def _told_once() -> Iterator[None]:
    """What fails herein is told by a status after which no client sends the same once more, as TRL's do after 500, 502
    and 503: a trainer broadcasts once."""
    try:
        yield
    except Exception as error:
        told = as_api_error(error, "an update")
        if told.status not in (500, 502, 503):
            raise
        raise ApiError(424, told.message) from error


async def finish_update(served: Served, request: Request) -> Response:
    """Publish what was noted, and answer when it is live."""
    fields = await _fields(request, _Finish)
    update = served.broadcasts.take_begun()
    with _told_once():
        are_tensors = await update.publish_tensors(fields.weight_version)
    if not are_tensors and not update.directories and fields.weight_version is not None:
        version = await _live_version(served)
        served.updates.label(version, fields.weight_version)
    for directory in update.directories:
        await served.updates.publish_directory(directory, fields.weight_version)
    version = await _live_version(served)
    return _done("the weights are live", weight_version=served.updates.name_of(version), version=version)


async def update_version(served: Served, request: Request) -> Response:
    """Give the live version a name, which spans of weight versions have from now on."""
    fields = await _fields(request, _NewVersion)
    version = await _live_version(served)
    served.updates.label(version, fields.new_version)
    return _done(
        f"version {version} is called {fields.new_version}", weight_version=fields.new_version, version=version
    )


async def weight_info(served: Served, request: Request) -> Response:
    """The live version, and the name that it was given."""
    version = await _live_version(served)
    return answer({"weight_version": served.updates.name_of(version), "version": version})


async def weight_checker(served: Served, request: Request) -> Response:
    """checksum: SHA-256 of every tensor that is live, under Hugging Face's names, read beside the generator. compare:
    which of them differ from those of a baseline. reset: publish a version of zeros, so that a compare after the next
    update shows that it has arrived."""
    fields = await _fields(request, _Checker, _MOST_NAMES_BYTES)
    if fields.action == "reset":
        version = await served.updates.publish_zeros()
        return answer({"status": "reset", "version": version})
    baseline = fields.baseline
    if fields.action == "compare" and baseline is None:
        raise ApiError(400, "compare needs a baseline: the checksums that this server told before", param="baseline")
    found = await asyncio.to_thread(served.engine.digests)
    version = {"version": found.version, "weight_version": served.updates.name_of(found.version)}
    if fields.action == "checksum" or baseline is None:
        return answer({"checksums": found.tensors, **version})
    names = found.tensors.keys() | baseline.keys()
    mismatches = sorted(name for name in names if found.tensors.get(name) != baseline.get(name))
    return answer({"match": not mismatches, "mismatches": mismatches, **version})


# ---- adapters -------------------------------------------------------------------------------------------------------


async def load_adapter(served: Served, request: Request, *, replace: bool = False) -> Response:
    """vLLM's: one of this name must not be there, unless `load_inplace`. replace: prime-rl's and SkyRL's, which put it
    in the place of one of this name."""
    fields = await _fields(request, _LoadAdapter)
    in_place = replace or bool(fields.load_inplace)
    adapter = await served.adapters.load(
        fields.lora_name, fields.lora_path, in_place=in_place, label=fields.weight_version
    )
    return _done(f"the adapter {adapter.name} is live", version=adapter.version)


async def unload_adapter(served: Served, request: Request) -> Response:
    """What is being drawn with it goes on."""
    fields = await _fields(request, _UnloadAdapter)
    served.adapters.unload(fields.lora_name)
    return _done(f"the adapter {fields.lora_name} is not loaded any more")


# ---- pauses and sleep -----------------------------------------------------------------------------------------------


async def pause(served: Served, request: Request) -> Response:
    """mode=keep: nothing needs to stop, and nothing does, unless the server honours pauses. wait: what is being drawn
    ends first, within a bound. abort: it is cancelled."""
    value = await read_body(request, _MOST_BYTES) | dict(request.query_params)
    mode = read_fields(value, _Pause).mode or "abort"
    if mode not in ("keep", "wait", "abort"):
        raise ApiError(400, f"mode must be keep, wait or abort, got {mode!r}", param="mode")
    if mode == "wait":
        await served.drain()
    elif mode == "abort":
        await asyncio.to_thread(served.engine.pause)
        await served.abort(None)
    elif served.options.honor_pause:
        await asyncio.to_thread(served.engine.pause)
    served.paused = True
    return answer({"status": "paused", "generating": mode == "keep" and not served.options.honor_pause})


async def resume(served: Served, request: Request) -> Response:
    """Go on."""
    await asyncio.to_thread(served.engine.resume)
    served.paused = False
    return answer({"status": "resumed"})


async def is_paused(served: Served, request: Request) -> Response:
    """Whether a client has paused and not resumed, or the engine is paused."""
    status = await asyncio.to_thread(served.engine.status)
    return answer({"is_paused": served.paused or status.paused})


async def sleep(served: Served, request: Request) -> Response:
    """Give the memory of the KV cache back; the weights stay, whatever the level."""
    await asyncio.to_thread(served.engine.sleep)
    return answer({"status": "asleep"})


async def wake_up(served: Served, request: Request) -> Response:
    """Take it again."""
    await asyncio.to_thread(served.engine.wake)
    return answer({"status": "awake"})


async def is_sleeping(served: Served, request: Request) -> Response:
    """Whether the engine sleeps."""
    return answer({"is_sleeping": (await asyncio.to_thread(served.engine.status)).asleep})


async def abort_requests(served: Served, request: Request) -> Response:
    """Cancel requests by their ids, or all; their clients get what was drawn, with finish_reason "abort"."""
    fields = await _fields(request, _Abort)
    ids = None if fields.abort_all or fields.request_ids is None else fields.request_ids
    return answer({"status": "aborted", "num_aborted": await served.abort(ids)})


ENDPOINTS: Mapping[str, Callable[[Served, Request], Awaitable[Response]]] = {
    "POST /pause": pause,
    "POST /resume": resume,
    "POST /areal_pause_generation": pause,
    "POST /areal_continue_generation": resume,
    "POST /abort_requests": abort_requests,
    "POST /sleep": sleep,
    "POST /wake_up": wake_up,
    # There is nothing to do: what the cache remembers is never used under weights that did not compute it.
    "POST /reset_prefix_cache": always({"success": True}),
    "POST /init_weight_transfer_engine": init_weight_transfer,
    "POST /shutdown_weight_transfer_engine": shut_down_transfer,
    "POST /start_weight_update": start_update,
    "POST /update_weights": update_weights,
    "POST /areal_update_weights": update_weights,
    "POST /finish_weight_update": finish_update,
    "POST /update_weight_version": update_version,
    "POST /weight_checker": weight_checker,
    "POST /v1/load_lora_adapter": load_adapter,
    "POST /v1/unload_lora_adapter": unload_adapter,
    "POST /load_lora_adapter": partial(load_adapter, replace=True),
    "POST /unload_lora_adapter": unload_adapter,
    "POST /skyrl/v1/load_lora_adapter": partial(load_adapter, replace=True),
    "POST /collective_rpc": no_collectives,
    "POST /areal_init_weights_update_group": no_collectives,
    "POST /areal_set_update_weight_meta": no_collectives,
    "POST /areal_update_weights_xccl": no_collectives,
    "POST /areal_set_update_weight_meta_lora": no_collectives,
    "POST /areal_update_weights_lora_xccl": no_collectives,
}
"""Maps methods and paths to what answers them."""


async def _live_version(served: Served) -> int:
    return (await asyncio.to_thread(served.engine.status)).version


async def _fields(request: Request, kind: type[Any], most_bytes: int = _MOST_BYTES) -> Any:
    return read_fields(await read_body(request, most_bytes), kind)


def _done(message: str, **more: Any) -> Response:
    logger.info("%s%s", message, f" (version {more['version']})" if "version" in more else "")
    return answer({"message": message, **more})
