"""The endpoints that steer an engine: weights, adapters, pauses, sleep. Their names and bodies are vLLM's; `weight_dir`
is prime-rl's, and `model_path` AReaL's.

An update is staged while decoding continues, and goes live between two forward passes. Its reply follows when it is
live.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight.server.nccl_protocol import Rendezvous
from inflight.server.requests import read_body, read_fields, read_request, unless_gone
from inflight.server.responses import ApiError, answer, as_api_error
from inflight.server.served import Served
from inflight.weights.nccl import why_not

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
    wait_for_inflight_requests: bool | Literal["true", "True", "1", "false", "False", "0"] | None = None
    """True means mode=wait, as in earlier versions of vLLM. A query has text."""


class _Update(msgspec.Struct):
    init_info: dict[str, Any] = {}
    weight_dir: str | None = None
    model_path: str | None = None
    update_info: dict[str, Any] | None = None
    weight_version: str | None = None
    """Name of the new version in spans."""


class _NewVersion(msgspec.Struct):
    new_version: str


class _Checker(msgspec.Struct):
    action: str


class _Abort(msgspec.Struct):
    request_ids: list[str] | None = None
    abort_all: bool | None = None


class _Unload(msgspec.Struct):
    lora_name: str


class _Load(_Unload):
    lora_path: str
    load_inplace: bool | None = None
    weight_version: str | None = None


# ---- weights --------------------------------------------------------------------------------------------------------


async def init_weight_transfer(served: Served, request: Request) -> Response:
    """Meet a trainer that sends tensors by NCCL, unless it sends directories."""
    fields = await read_request(request, _Update, _MOST_BYTES)
    served.broadcasts.give_up()  # An earlier client did not finish its update.
    if not fields.init_info or fields.init_info.get("backend") == "directory":
        return _done("weights come from directories")
    if reason := why_not(served.engine.info.device):
        raise ApiError(501, f"no tensors are received: {reason}; {_OTHER_WAYS}", param="init_info")
    with _never_sent_again():
        await served.broadcasts.meet(read_fields(fields.init_info, Rendezvous))
    return _done("the trainer was met; weights come by NCCL")


async def shut_down_transfer(served: Served, request: Request) -> Response:
    """Leave the trainer's group, and forget an unfinished update."""
    await served.broadcasts.leave()
    return _done("weights come from directories")


async def start_update(served: Served, request: Request) -> Response:
    """Begin a version of the directories and tensors that follow. /finish_weight_update publishes it."""
    served.broadcasts.begin()
    return _done("an update has begun")


async def update_weights(served: Served, request: Request) -> Response:
    """Publish a checkpoint directory, or receive the tensors that `update_info` names. Between start and finish a
    directory in `update_info` waits for finish. While tensors arrive, other updates wait."""
    fields = await read_request(request, _Update, _MOST_NAMES_BYTES)
    info = fields.update_info or {}
    if "names" in info and served.broadcasts.group is not None:
        with _never_sent_again():
            await served.broadcasts.receive(info)
        return _done("the tensors are here; /finish_weight_update publishes them")
    at_once = fields.weight_dir or fields.model_path
    directory = at_once or info.get("weight_dir") or info.get("path")
    if directory and not isinstance(directory, str):
        raise ApiError(400, f"a directory must be text, got {directory!r}", param="update_info")
    if not directory:
        raise ApiError(501 if fields.update_info else 400, _NO_NCCL, param="weight_dir")
    if not at_once and served.broadcasts.begun is not None:
        served.broadcasts.begun.directories.append(directory)
        return _done("noted; /finish_weight_update publishes it")
    version = await served.updates.publish_directory(directory, fields.weight_version)
    return _done("the weights are live", **_version(served, version))


@contextmanager
def _never_sent_again() -> Iterator[None]:
    """Raise failures with a status after which clients do not repeat the request. TRL does after 500, 502 and 503, but
    a trainer broadcasts once."""
    try:
        yield
    except Exception as error:
        told = as_api_error(error, "an update")
        if told.status not in (500, 502, 503):
            raise
        raise ApiError(424, told.message) from error


async def finish_update(served: Served, request: Request) -> Response:
    """Publish the update that was begun."""
    fields = await read_request(request, _Update, _MOST_BYTES)
    update = served.broadcasts.take_begun()
    with _never_sent_again():
        are_tensors = await update.publish_tensors(fields.weight_version)
    if not are_tensors and not update.directories and fields.weight_version is not None:
        served.updates.label(await _live_version(served), fields.weight_version)
    for directory in update.directories:
        await served.updates.publish_directory(directory, fields.weight_version)
    return _done("the weights are live", **_version(served, await _live_version(served)))


async def update_version(served: Served, request: Request) -> Response:
    """Name the live version."""
    fields = await read_request(request, _NewVersion, _MOST_BYTES)
    version = await _live_version(served)
    served.updates.label(version, fields.new_version)
    return _done(f"version {version} is called {fields.new_version}", **_version(served, version))


async def weight_info(served: Served, request: Request) -> Response:
    """Return the live version and its name."""
    return answer(_version(served, await _live_version(served)))


async def weight_checker(served: Served, request: Request) -> Response:
    """Return the SHA-256 of every live tensor under its Hugging Face name."""
    fields = await read_request(request, _Checker, _MOST_BYTES)
    if fields.action != "checksum":
        raise ApiError(400, f'action must be "checksum", got {fields.action[:100]!r}', param="action")
    found = await asyncio.to_thread(served.engine.digests)
    return answer({"checksums": found.tensors, **_version(served, found.version)})


async def refuse(served: Served, request: Request) -> Response:
    """Refuse another way to send tensors, and name the ways that work."""
    raise ApiError(501, _NO_NCCL)


# ---- adapters -------------------------------------------------------------------------------------------------------


async def load_adapter(served: Served, request: Request, *, replace: bool = False) -> Response:
    """Load an adapter. An adapter of the same name is an error unless `load_inplace` or replace."""
    fields = await read_request(request, _Load, _MOST_BYTES)
    in_place = replace or bool(fields.load_inplace)
    if not fields.lora_name or fields.lora_name in served.names:
        raise ApiError(400, f"an adapter cannot have the name {fields.lora_name!r}", param="lora_name")
    adapter = await served.adapters.load(
        fields.lora_name, fields.lora_path, in_place=in_place, label=fields.weight_version
    )
    return _done(f"the adapter {adapter.name} is live", version=adapter.version)


async def unload_adapter(served: Served, request: Request) -> Response:
    """Unload an adapter. Its requests in progress continue."""
    fields = await read_request(request, _Unload, _MOST_BYTES)
    await served.adapters.unload(fields.lora_name)
    return _done(f"the adapter {fields.lora_name} is not loaded any more")


# ---- pauses and sleep -----------------------------------------------------------------------------------------------


async def pause(served: Served, request: Request) -> Response:
    """Pause. mode=keep: nothing stops, unless the server honours pauses. wait: requests in progress end first, within a
    bound. abort: they are cancelled."""
    value = await read_body(request, _MOST_BYTES) | dict(request.query_params)
    fields = read_fields(value, _Pause)
    waits = fields.wait_for_inflight_requests in (True, "true", "True", "1")
    mode = fields.mode or ("wait" if waits else "abort")
    if mode not in ("keep", "wait", "abort"):
        raise ApiError(400, f"mode must be keep, wait or abort, got {mode!r}", param="mode")
    if waits and mode != "wait":
        raise ApiError(400, f"wait_for_inflight_requests means mode=wait, got mode={mode}", param="mode")
    if mode == "wait":
        await unless_gone(request, served.drain())
    elif mode == "abort":
        await served.pause()
        await served.abort(None)
    elif served.options.honor_pause:
        await served.pause()
    else:
        served.paused = True
    generating = mode == "keep" and not served.options.honor_pause
    if generating:  # unless somebody else has paused the engine
        generating = not (await asyncio.to_thread(served.engine.status)).paused
    return answer({"status": "paused", "generating": generating})


async def resume(served: Served, request: Request) -> Response:
    """End a pause, also one that still waits for requests."""
    await served.resume()
    return answer({"status": "resumed"})


async def is_paused(served: Served, request: Request) -> Response:
    """Return whether a client or the engine itself has paused."""
    status = await asyncio.to_thread(served.engine.status)
    return answer({"is_paused": served.paused or status.paused})


async def sleep(served: Served, request: Request) -> Response:
    """Release the memory of the KV cache, and of the second slot if no trainer is attached. The weights stay at every
    level."""
    await asyncio.to_thread(served.engine.sleep)
    served.updates.release()
    return answer({"status": "asleep"})


async def wake_up(served: Served, request: Request) -> Response:
    """Allocate the KV cache again."""
    await asyncio.to_thread(served.engine.wake)
    return answer({"status": "awake"})


async def is_sleeping(served: Served, request: Request) -> Response:
    """Return whether the engine sleeps."""
    return answer({"is_sleeping": (await asyncio.to_thread(served.engine.status)).asleep})


async def abort_requests(served: Served, request: Request) -> Response:
    """Cancel requests by their ids, or all. Their clients receive the tokens so far, with finish_reason "abort". An
    empty body means all."""
    given = await read_body(request, _MOST_BYTES)
    fields = read_fields(given, _Abort)
    if given and not fields.abort_all and fields.request_ids is None:
        raise ApiError(400, "name request_ids, or send abort_all: true or an empty body for all", param="request_ids")
    ids = None if fields.abort_all else fields.request_ids
    return answer({"status": "aborted", "num_aborted": await served.abort(ids)})


async def _live_version(served: Served) -> int:
    return (await asyncio.to_thread(served.engine.status)).version


def _version(served: Served, version: int) -> dict[str, Any]:
    return {"weight_version": served.updates.labels.get(version, str(version)), "version": version}


def _done(message: str, **more: Any) -> Response:
    logger.info("%s%s", message, f" (version {more['version']})" if "version" in more else "")
    return answer({"message": message, **more})
