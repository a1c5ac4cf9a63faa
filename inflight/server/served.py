"""The engine as the clients of a server see it: its names, its tokenizer, and their requests in progress."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from inflight.chat.readers import ReplyReaders
from inflight.chat.text import TextDecoder
from inflight.core.sampling import SamplingParams
from inflight.core.waiting import Wait
from inflight.server.adapters import Adapter, Adapters
from inflight.server.answers import client_id
from inflight.server.broadcasts import Broadcasts
from inflight.server.engine import ServedEngine
from inflight.server.generation import Bell, Generation
from inflight.server.metrics import Metrics
from inflight.server.options import ServerOptions
from inflight.server.request_log import RequestLog
from inflight.server.responses import ApiError
from inflight.server.updates import Updates
from inflight.stream.assignments import OF_CLIENT

Endpoint = Callable[["Served", Request], Awaitable[Response]]
_CHECK_S = 0.01


class Served:
    """An engine and the requests of its HTTP clients. One event loop uses it."""

    def __init__(self, engine: ServedEngine, options: ServerOptions):
        self.engine, self.options = engine, options
        names = [name for name in (options.served_model_name, engine.options.model) if name]
        self.names = list(dict.fromkeys(names)) or ["inflight"]
        self.tokenizer = copy.deepcopy(engine.tokenizer)  # A tokenizer is not safe to use from several threads.
        self.decoder = TextDecoder(self.tokenizer)
        self.readers = ReplyReaders(self.decoder, split_reasoning=options.split_reasoning)
        self.created = int(time.time())
        self.max_context = engine.info.max_context
        self.max_body_bytes = int(options.max_body_mib * 2**20)
        self.metrics = Metrics(engine)
        self.updates = Updates(engine)
        self.broadcasts = Broadcasts(engine, self.updates)
        self.adapters = Adapters(engine, self.updates)
        self._no_adapter = Adapter(self.names[0], "", "")
        self.running: dict[Generation, str] = {}
        """Maps requests in progress to their ids."""
        self.log = RequestLog()
        self.ending = False
        """The server is about to end and accepts no request."""
        self.loop: asyncio.AbstractEventLoop
        self.paused = False
        """A client has paused and not resumed."""
        self._pausing = asyncio.Lock()
        """Held while the engine is paused or resumed, so that the later of two calls has the last effect."""
        self._num_resumed = 0
        """Calls of `resume`. Each ends the drains before it."""
        self._num_submitting = 0
        """Requests that the engine is about to accept."""
        self._num_draining = 0
        self._waiting: dict[asyncio.Future[bool], str] = {}
        """Maps requests that wait for the end of `drain` to their ids. The result is False for aborted ones."""
        self._bell: Bell

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve requests while this is open."""
        self.loop = asyncio.get_running_loop()
        self._bell = Bell(self.engine.stream.ledger, self.options.stream_interval_ms / 1e3)
        try:
            yield
        finally:
            self.log.flush()
            self._bell.close()
            for generation in list(self.running):
                generation.end()
            await self.broadcasts.leave()
            await asyncio.to_thread(self.updates.close)

    def adapter_of(self, model: str | None) -> Adapter:
        """Return the adapter of this name. Raises ApiError."""
        if not model or model in self.names:
            return self._no_adapter
        adapter = self.adapters.by_name.get(model)
        if adapter is None:
            known = ", ".join([*self.names, *self.adapters.by_name])
            message = f"the model {model[:200]!r} does not exist; there are {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return adapter

    async def begin(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        adapter: Adapter,
        *,
        request_id: str,
    ) -> Generation:
        """Submit prompts. The caller has to `end()` the generation. Raises the engine's errors."""
        if self.ending:
            raise _ending()
        if self.engine.stream.state == "restarting":
            raise ApiError(503, "the engine has ended and is being started again; send the request again later")
        self.adapters.hold(adapter)
        try:
            may_draw = await self._until_drained(request_id)
            self._num_submitting += 1
            try:
                of_client = [{OF_CLIENT: True}] * len(prompts)
                group_ids = await self.engine.asubmit(
                    prompts, params, metadata=of_client, adapter=adapter.place or None
                )
            finally:
                self._num_submitting -= 1
        except BaseException:
            self.adapters.let_go(adapter)
            raise
        generation = Generation(self.engine.stream, self._bell, group_ids, partial(self._ended, adapter))
        self.running[generation] = request_id
        if not may_draw:
            try:
                await asyncio.to_thread(self.engine.cancel, group_ids)
            except BaseException:  # The client has left, or the engine does not answer.
                generation.end()
                raise
        return generation

    async def _until_drained(self, request_id: str) -> bool:
        """Wait while `drain` runs. False for a request that was aborted in the meantime."""
        while self._num_draining:
            self._waiting[waiting := asyncio.get_running_loop().create_future()] = request_id
            try:
                if not await waiting:
                    return False
            finally:
                del self._waiting[waiting]
        if self.ending:
            raise _ending()
        return True

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Cancel the requests with these ids, or all, and return their number. Their clients receive the tokens so far.
        The id of a reply contains the client's own after its first "-"; both are known."""
        wanted = None if request_ids is None else {name for id in request_ids for name in (id, client_id(id))}

        def is_wanted(id: str) -> bool:
            return wanted is None or id in wanted or id.partition("-")[2] in wanted

        chosen = [generation for generation, id in self.running.items() if is_wanted(id)]
        waiting = [future for future, id in self._waiting.items() if is_wanted(id) and not future.done()]
        for future in waiting:
            future.set_result(False)
        if chosen:
            group_ids = [group_id for generation in chosen for group_id in generation.group_ids]
            await asyncio.to_thread(self.engine.cancel, group_ids)
        return len(chosen) + len(waiting)

    @property
    def num_open(self) -> int:
        """Requests in progress."""
        return len(self.running) + self._num_submitting + len(self._waiting)

    async def pause(self, *, num_resumed: int | None = None) -> None:
        """Pause the engine, even if the caller is cancelled. num_resumed: number of calls of `resume` so far. If there
        was another one, this raises ApiError and pauses nothing."""

        async def pause() -> None:
            async with self._pausing:
                if num_resumed not in (None, self._num_resumed):
                    raise ApiError(409, "the engine was resumed before this pause took effect")
                await asyncio.to_thread(self.engine.pause)
                self.paused = True

        await asyncio.shield(pause())

    async def resume(self) -> None:
        """Resume the engine, and end the drains in progress."""
        self._num_resumed += 1
        async with self._pausing:
            await asyncio.to_thread(self.engine.resume)
            self.paused = False

    async def drain(self) -> None:
        """Pause the engine when it has drawn all requests in progress, read or not. New requests wait. An engine that
        a client has paused stays as it is. Raises ApiError if that takes too long, or if a client resumes meanwhile;
        then nothing is paused."""
        num_resumed = self._num_resumed
        if self.paused and (await asyncio.to_thread(self.engine.status)).paused:
            return
        self._num_draining += 1
        try:
            wait = Wait()
            while self._num_resumed == num_resumed and (
                self._num_submitting or not all(generation.drawn for generation in self.running)
            ):
                await asyncio.sleep(_CHECK_S)
                wait.tick()
                wait.tell("a client pauses the engine once it draws nothing more")
                if wait.waited_s > self.options.drain_timeout_s:
                    raise ApiError(
                        503,
                        f"the engine still draws after {self.options.drain_timeout_s:g} s, and goes on; pause with "
                        "mode=abort, or start the server with a larger --drain-timeout-s",
                    )
            await self.pause(num_resumed=num_resumed)
        finally:
            self._num_draining -= 1
            for future in self._waiting:
                if not (self._num_draining or future.done()):
                    future.set_result(True)

    def _ended(self, adapter: Adapter, generation: Generation, taken: bool) -> None:
        self.running.pop(generation, None)
        if not taken:
            self.engine.abandon(generation.group_ids)
        self.adapters.let_go(adapter)


def _ending() -> ApiError:
    return ApiError(503, "the server is about to end and takes no new requests")
