"""Updates in vLLM's three steps: a client begins one, names directories or announces tensors, and finishes it.

A trainer that has joined a group with this server broadcasts the tensors that it announces, by NCCL."""

import asyncio
import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from inflight.core.errors import BroadcastError, InvalidRequestError
from inflight.core.workers import Workers
from inflight.server.engine import ServedEngine
from inflight.server.nccl_protocol import NcclGroup, Rendezvous, TensorList
from inflight.server.requests import read_fields
from inflight.server.responses import ApiError
from inflight.server.updates import Updates
from inflight.weights.cuda_ipc import number_of
from inflight.weights.nccl import load

_MEETING_S = 300.0
"""Time limit for joining a trainer's group, and for each announced buffer to arrive."""
_MOST_BETWEEN_S = 120.0
"""Longest time between two messages of an update. Other updates wait until then."""
_MOST_OF_LAYOUT = 5
"""Largest size of arriving tensors, as a multiple of the bytes of the engine's: fp64 for bf16, and some tensors under
two names."""
_threads = Workers("server-meeting")
"""Calls that can take minutes, in threads that do not keep the process from ending."""


class Broadcasts:
    """The group of one trainer, and its update in progress. One event loop uses it."""

    def __init__(self, engine: ServedEngine, updates: Updates):
        self._engine, self._updates = engine, updates
        self.group: NcclGroup | None = None
        """The group; None: no trainer was met."""
        self._num_met = 0
        self._lock = threading.Lock()
        """Held while one of the two above is changed, since a thread joins a group."""
        self.begun: PendingUpdate | None = None
        """The unfinished update, if there is one."""

    async def meet(self, meeting: Rendezvous) -> None:
        """Join the group of a trainer in place of the previous group. A restarted trainer needs a new group. Raises
        BackendError, BroadcastError or InvalidRequestError."""
        await self.leave()
        turn = self._num_met

        def join() -> None:
            group = NcclGroup(load(), meeting, self._device(), timeout_s=_MEETING_S)
            with self._lock:
                is_late = turn != self._num_met
                if not is_late:
                    self.group = group
            if is_late:
                group.close()
                raise BroadcastError("this trainer came too late: another one is met by now, or the server ends")

        await asyncio.wrap_future(_threads.start(join))

    async def leave(self) -> None:
        """Leave the trainer's group, if there is one, and drop its unfinished update."""
        self.give_up()
        with self._lock:
            self._num_met += 1
            group, self.group = self.group, None
        if group is not None:
            await asyncio.wrap_future(_threads.start(group.close))

    def begin(self) -> None:
        """Begin an update in place of an unfinished one."""
        self.give_up()
        self.begun = PendingUpdate(self._updates)

    def give_up(self) -> None:
        """Drop the unfinished update."""
        if self.begun is not None:
            self.begun.give_up()
            self.begun = None

    def take_begun(self) -> "PendingUpdate":
        """Return the update in progress, to be finished now. Raises InvalidRequestError if there is none."""
        begun, self.begun = self._check_begun(), None
        return begun

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Receive tensors of the update in progress, and return when they have arrived.

        Raises ApiError or InvalidRequestError for an announcement that cannot be received, BroadcastError if the
        tensors do not arrive, and the publisher's error, after they have arrived, if they do not fit."""
        try:
            begun, tensors = self._check_begun(), read_fields(info, TensorList)
            tensors.check(_MOST_OF_LAYOUT * self._engine.info.layout.total_bytes)
        except (ApiError, InvalidRequestError):
            # The trainer broadcasts in any case. Unread tensors would be taken for the next ones.
            if self.begun is not None:
                self.begun.broken_off = True
            if self.group is not None:
                await asyncio.wrap_future(_threads.start(self.group.close))
            raise
        if self.group is None or self.group.closed:
            begun.broken_off = True
            raise BroadcastError("the trainer's group was left; call /init_weight_transfer_engine to meet again")
        await begun.receive(self.group, tensors)

    def _check_begun(self) -> "PendingUpdate":
        if self.begun is None:
            raise InvalidRequestError("no update has begun; call /start_weight_update first")
        return self.begun

    def _device(self) -> torch.device:
        """Return the device that receives tensors: the engine's GPU, by its number in this process, or another GPU if
        the engine's is not visible here."""
        info = self._engine.info
        if torch.device(info.device).type != "cuda":
            return torch.device(info.device)
        number = number_of(info.device_uuid)
        return torch.device("cuda", torch.cuda.current_device() if number is None else number)


class PendingUpdate:
    """A version whose tensors arrive in one message or in several, or from directories. The publishing thread reads
    arriving tensors while the engine generates."""

    def __init__(self, updates: Updates):
        self._updates = updates
        self.directories: list[str] = []
        """Checkpoints to publish at the finish."""
        self.broken_off = False
        """True if announced tensors were not received."""
        self._published: asyncio.Future[int] | None = None
        """Version number of the tensors, once some were announced."""
        self._messages: queue.SimpleQueue[tuple[TensorList, Future[None]] | None] = queue.SimpleQueue()
        self._label: str | None = None
        self._given_up = False
        self._refused: Exception | None = None

    async def receive(self, group: NcclGroup, tensors: TensorList) -> None:
        """Return when these tensors, which the trainer now sends, have arrived."""
        if self._published is None:
            self._published = asyncio.ensure_future(self._updates.run(lambda: self._publish(group)))
        message: Future[None] = Future()
        self._messages.put((tensors, message))
        arrived = asyncio.wrap_future(message)
        await asyncio.wait({arrived, self._published}, return_when=asyncio.FIRST_COMPLETED)
        await (arrived if arrived.done() else asyncio.shield(self._published))

    async def publish_tensors(self, label: str | None) -> bool:
        """Publish the tensors, which have all arrived, as a version with this name. Returns False if none were
        announced. Raises BroadcastError, or the publisher's error."""
        if self.broken_off:
            self.give_up()
            raise BroadcastError("what was announced since the update began was not taken; nothing is published")
        if self._published is None:
            return False
        self._label = label
        self._messages.put(None)
        await asyncio.shield(self._published)
        return True

    def give_up(self) -> None:
        """Drop this update. Its client will not finish it."""
        self._given_up = True
        self._messages.put(None)
        if self._published is not None:
            self._published.add_done_callback(lambda given_up: given_up.cancelled() or given_up.exception())

    def _publish(self, group: NcclGroup) -> int:
        """Publish arriving names and tensors, and return the version.

        An error of the publisher is raised after all announced tensors have arrived, since the trainer sends them in
        any case. Raises BroadcastError if they do not arrive."""
        pairs = self._pairs(group)
        try:
            return self._updates.publish("weights", pairs)
        except Exception as error:
            self._refused = error
            with suppress(BroadcastError):  # The client that announced the tensors receives the error.
                for _ in pairs:
                    pass
            raise

    def _pairs(self, group: NcclGroup) -> Iterator[tuple[str, torch.Tensor]]:
        while (message := self._next_message(group)) is not None:
            tensors, arrived = message
            try:
                yield from group.receive(tensors)
            except BaseException as error:  # The rest would be taken for the next message.
                group.close()
                arrived.set_exception(error)
                raise
            if self._refused is None:
                arrived.set_result(None)
            else:
                arrived.set_exception(self._refused)
        if self._refused is None:
            self._updates.label_next(self._label)

    def _next_message(self, group: NcclGroup) -> "tuple[TensorList, Future[None]] | None":
        try:
            message = self._messages.get(timeout=_MOST_BETWEEN_S)
        except queue.Empty:
            group.close()
            raise BroadcastError(
                f"the update that was begun was not finished: nothing came for {_MOST_BETWEEN_S:.0f} s"
            ) from None
        if self._given_up:
            if message is not None:  # the trainer sends it
                group.close()
            raise BroadcastError("the update that was begun was not finished: the trainer left, or began another one")
        return message
