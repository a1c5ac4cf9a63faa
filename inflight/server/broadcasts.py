"""Weights that a trainer sends by NCCL as it sends them to vLLM: it is met, begins an update, announces tensors while
it broadcasts them, and finishes the update."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import torch

from inflight.core.errors import BroadcastError
from inflight.server.engine import ServedEngine
from inflight.server.updates import Updates
from inflight.weights.cuda_ipc import number_of
from inflight.weights.nccl.group import Group, Tensors
from inflight.weights.nccl.library import load
from inflight.weights.nccl.rendezvous import Meeting

Value = TypeVar("Value")
_MEETING_S = 300.0
"""Bound for meeting a trainer, and for each buffer that it has announced."""
_MOST_BETWEEN_S = 120.0
"""Between two messages of an update that was begun. Other updates wait meanwhile."""
_MOST_OF_LAYOUT = 5
"""Tensors that come may have so many times the bytes of the engine's: fp64 for bf16, and then some under two names."""


class Broadcasts:
    """The group of one trainer, and the update that it has begun. It is used by one event loop."""

    def __init__(self, engine: ServedEngine, updates: Updates):
        self._engine, self._updates = engine, updates
        self._group: Group | None = None
        self._num_met = 0
        self._lock = threading.Lock()
        """Held while one of the two above is changed: a group is joined in a thread."""
        self._broken_off = False
        """Something was announced since the update began, and not taken."""
        self._update: tuple[_Update, asyncio.Future[int]] | None = None
        """What was begun, and the version that it will be."""

    @property
    def met(self) -> bool:
        """A trainer was met."""
        return self._group is not None

    async def meet(self, meeting: Meeting) -> None:
        """Join the group of a trainer, in place of the one before: one that was started anew is met anew. Raises
        BackendError, BroadcastError or InvalidRequestError."""
        await self.leave()
        turn = self._num_met

        def join() -> None:
            group = Group(load(), meeting, self._device(), timeout_s=_MEETING_S)
            with self._lock:
                is_late = turn != self._num_met
                if not is_late:
                    self._group = group
            if is_late:
                group.close()
                raise BroadcastError("this trainer came too late: another one is met by now, or the server ends")

        await _beside(join)

    async def leave(self) -> None:
        """Leave the trainer's group, if there is one, and give up what it began to send."""
        self.give_up()
        with self._lock:
            self._num_met += 1
            group, self._group = self._group, None
        if group is not None:
            await _beside(group.close)

    async def break_off(self) -> None:
        """Something was announced that is not taken. The trainer sends it all the same, and what it sends next would
        be read as what comes after; so its group is left, and the update that was begun fails."""
        self._broken_off = True
        if self._group is not None:
            await _beside(self._group.close)

    def check(self, tensors: Tensors) -> None:
        """Raise InvalidRequestError for what cannot be received."""
        tensors.check(_MOST_OF_LAYOUT * self._engine.info.layout.total_bytes)

    async def receive(self, tensors: Tensors) -> None:
        """Take tensors of the update that was begun, as they come. Returns when they are here. Raises BroadcastError if
        they do not come; and if they do not fit what the publisher raises, once they are here."""
        if self._group is None or self._group.closed:
            self._broken_off = True
            raise BroadcastError("the trainer's group was left; call /init_weight_transfer_engine to meet again")
        if self._update is None:
            begun = _Update(self._group)
            self._update = (
                begun,
                asyncio.ensure_future(self._updates.publish_tensors(begun.publish, lambda: begun.label)),
            )
        begun, published = self._update
        arrived = asyncio.wrap_future(begun.expect(tensors))
        await asyncio.wait({arrived, published}, return_when=asyncio.FIRST_COMPLETED)
        await (arrived if arrived.done() else asyncio.shield(published))

    async def finish(self, label: str | None) -> int | None:
        """Publish what came, as a version of this name. None if nothing was announced."""
        if self._broken_off:
            self.give_up()
            raise BroadcastError("what was announced since the update began was not taken; nothing is published")
        if self._update is None:
            return None
        (begun, published), self._update = self._update, None
        begun.end(label)
        return await asyncio.shield(published)

    def give_up(self) -> None:
        """Forget an update that was begun and not finished."""
        self._broken_off = False
        if self._update is not None:
            (begun, published), self._update = self._update, None
            begun.give_up()
            published.add_done_callback(lambda given_up: given_up.cancelled() or given_up.exception())

    def _device(self) -> torch.device:
        """Where tensors are received: on the engine's GPU, by the number that it has in this process; on another one
        where it is not seen here."""
        info = self._engine.info
        if torch.device(info.device).type != "cuda":
            return torch.device(info.device)
        number = number_of(info.device_uuid)
        return torch.device("cuda", torch.cuda.current_device() if number is None else number)


class _Update:
    """A version whose tensors come in one message or in several. The thread that publishes reads it, while the engine
    draws."""

    def __init__(self, group: Group):
        self._group = group
        self._messages: queue.SimpleQueue[tuple[Tensors, Future[None]] | None] = queue.SimpleQueue()
        self._given_up = False
        self._refused: Exception | None = None
        self.label: str | None = None
        """What the trainer calls the version, once all has come."""

    def expect(self, tensors: Tensors) -> "Future[None]":
        """The trainer sends these now. The future is done when they are here."""
        arrived: Future[None] = Future()
        self._messages.put((tensors, arrived))
        return arrived

    def end(self, label: str | None) -> None:
        """All have come; the version has this name."""
        self.label = label
        self._messages.put(None)

    def give_up(self) -> None:
        """Whoever began it does not end it."""
        self._given_up = True
        self._messages.put(None)

    def publish(self, publish: Callable[[Iterator[tuple[str, torch.Tensor]]], int]) -> int:
        """The version that was made of names and tensors as they come. Raises what `publish` raises, once nothing more
        comes, since a trainer sends what it has announced whatever becomes of it; and BroadcastError if it does not."""
        pairs = self._pairs()
        try:
            return publish(pairs)
        except Exception as error:
            self._refused = error
            with suppress(BroadcastError):  # of which whoever announced the tensors is told
                for _ in pairs:
                    pass
            raise

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (message := self._next_message()) is not None:
            tensors, arrived = message
            try:
                yield from self._group.receive(tensors)
            except BaseException as error:  # of memory, say; what is still to come would be taken for what comes next
                self._group.close()
                arrived.set_exception(error)
                raise
            if self._refused is None:
                arrived.set_result(None)
            else:
                arrived.set_exception(self._refused)

    def _next_message(self) -> "tuple[Tensors, Future[None]] | None":
        try:
            message = self._messages.get(timeout=_MOST_BETWEEN_S)
        except queue.Empty:
            self._group.close()
            raise BroadcastError(
                f"the update that was begun was not finished: nothing came for {_MOST_BETWEEN_S:.0f} s"
            ) from None
        if self._given_up:
            if message is not None:  # the trainer sends it
                self._group.close()
            raise BroadcastError("the update that was begun was not finished: the trainer left, or began another one")
        return message


async def _beside(function: Callable[[], Value]) -> Value:
    """Call what may take minutes in a thread that keeps no process from ending."""
    called: Future[Value] = Future()

    def run() -> None:
        try:
            called.set_result(function())
        except BaseException as error:
            called.set_exception(error)

    threading.Thread(target=run, name="inflight-server-meeting", daemon=True).start()
    return await asyncio.wrap_future(called)
