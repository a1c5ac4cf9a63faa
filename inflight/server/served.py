"""The engine as clients of a server see it: its names, its tokenizer, and what is being drawn for whom."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from inflight.core.sampling import SamplingParams
from inflight.core.waiting import Wait
from inflight.server.adapters import Adapter, Adapters
from inflight.server.broadcasts import Broadcasts
from inflight.server.engine import ServedEngine
from inflight.server.errors import ApiError
from inflight.server.generation import Bell, Generation
from inflight.server.metrics import Metrics
from inflight.server.options import ServerOptions
from inflight.server.readers import AnswerReading
from inflight.server.request_log import RequestLog
from inflight.server.text import TextDecoder
from inflight.server.updates import Updates

_CHECK_S = 0.01


class Served:
    """An engine, and the requests of its HTTP clients. It is used by one event loop."""

    def __init__(self, engine: ServedEngine, options: ServerOptions):
        self.engine, self.options = engine, options
        self.names = [name for name in dict.fromkeys([options.served_model_name, engine.options.model]) if name]
        self.names = self.names or ["inflight"]
        self.tokenizer = copy.deepcopy(engine.tokenizer)  # which is not safe to use from several threads
        self.decoder = TextDecoder(self.tokenizer)
        self.reading = AnswerReading(self.decoder, split_reasoning=options.split_reasoning)
        self.created = int(time.time())
        self.max_context = engine.info.max_context
        self.max_body_bytes = int(options.max_body_mib * 2**20)
        self.metrics = Metrics(engine)
        self.updates = Updates(engine)
        self.broadcasts = Broadcasts(engine, self.updates)
        self.adapters = Adapters(engine, self.updates)
        self.running: dict[Generation, str] = {}
        """Maps what is being drawn to the id of its request."""
        self.log = RequestLog()
        self.ending = False
        """No new request is accepted, as the server is about to end."""
        self.loop: asyncio.AbstractEventLoop
        """The loop of the server. `open` sets it."""
        self.paused = False
        """A client has paused and not resumed."""
        self._num_submitting = 0
        """Requests that the engine is about to accept."""
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._bell: Bell
        """What `open` makes."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """While this is open, tokens are streamed."""
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

    def adapter_of(self, model: str | None) -> Adapter | None:
        """Who draws for a request that names this model: an adapter, or None for the weights alone. Raises ApiError."""
        if not model or model in self.names:
            return None
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
        adapter: Adapter | None,
        *,
        request_id: str,
        priority: int | None = None,
    ) -> Generation:
        """Have prompts drawn; whoever takes it must `end()` it. Raises what the engine raises."""
        if self.ending:
            raise ApiError(503, "the server is about to end and takes no new requests")
        if self.engine.stream.state == "restarting":
            raise ApiError(503, "the engine has ended and is being started again; send the request again later")
        metadata = [{"priority": priority}] * len(prompts) if priority else None
        place = None if adapter is None else adapter.place
        if adapter is not None:
            self.adapters.hold(adapter)
        try:
            while not self._may_begin.is_set():
                await self._may_begin.wait()
            self._num_submitting += 1
            try:
                group_ids = await self.engine.asubmit(prompts, params, metadata=metadata, adapter=place)
            finally:
                self._num_submitting -= 1
        except BaseException:
            if adapter is not None:
                self.adapters.let_go(adapter)
            raise
        generation = Generation(self.engine.stream, self._bell, group_ids, partial(self._ended, adapter))
        self.running[generation] = request_id
        return generation

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Cancel the requests of these ids, or all; their clients get what was drawn. Returns how many there were. An
        id is that of the answer, or the client's own, which follows the kind of the answer in it."""
        chosen = [
            generation
            for generation, request_id in self.running.items()
            if request_ids is None or {request_id, request_id.partition("-")[2]} & set(request_ids)
        ]
        if chosen:
            group_ids = [group_id for generation in chosen for group_id in generation.group_ids]
            await asyncio.to_thread(self.engine.cancel, group_ids)
        return len(chosen)

    @property
    def num_open(self) -> int:
        """Requests that the engine draws for, or is about to accept."""
        return len(self.running) + self._num_submitting

    async def drain(self) -> None:
        """Pause the engine once it draws nothing more for a client of the server, whether its clients have read that
        or not; what comes meanwhile waits. Raises ApiError if that takes too long; then everything goes on."""
        self._may_begin.clear()
        try:
            wait = Wait()
            while self._num_submitting or not all(generation.drawn for generation in self.running):
                await asyncio.sleep(_CHECK_S)
                wait.tick()
                wait.tell("a client pauses the engine once it draws nothing more")
                if wait.waited_s > self.options.drain_timeout_s:
                    raise ApiError(
                        503,
                        f"the engine still draws after {self.options.drain_timeout_s:g} s, and goes on; pause with "
                        "mode=abort, or start the server with a larger --drain-timeout-s",
                    )
            await asyncio.to_thread(self.engine.pause)
        finally:
            self._may_begin.set()

    def _ended(self, adapter: Adapter | None, generation: Generation, taken: bool) -> None:
        self.running.pop(generation, None)
        if not taken:
            self.engine.abandon(generation.group_ids)
        if adapter is not None:
            self.adapters.let_go(adapter)
