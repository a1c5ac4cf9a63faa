"""Publishes a trainer's weights: `publish()` returns at once, and a thread copies the parameters and announces them.

Until a copy is done the parameters must not change. A `torch.optim` optimizer of these parameters waits for that by
itself (a step hook); other code that writes to them calls `wait_copied()` first. `publish(weights)` copies these
weights in the calling thread before it returns.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inflight.core.arguments import named
from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, InflightError, NonFiniteWeightsError
from inflight.core.spans import note, span
from inflight.core.waiting import LOG_EVERY_S
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.trainer.engine_link import (
    DirectSlots,
    EngineAddress,
    EngineLink,
    LoneEngine,
    PublishedEngine,
    PublishedVersion,
)
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.published_model import classify
from inflight.weights.trainer.sharded import ShardGroup
from inflight.weights.trainer.sources import ModelSource, WeightSource
from inflight.weights.trainer.staging import StagingBuffer
from inflight.weights.trainer.state_dict_source import StateDictSource, Weights, copy_state_dict
from inflight.weights.transports.base import Transport
from inflight.weights.transports.slots import Slots

logger = logging.getLogger("inflight.weights")

_LISTEN_EVERY_S = 0.5
"""Interval at which an idle publisher processes messages of its engine."""
_GIVE_UP_S = 5.0
"""Time limit for a thread to end."""

Engine = Any
"""An `inflight.Engine`, a PublishedEngine, or the name of the endpoint of an engine's control socket."""


@named()
class Publisher:
    """Publishes a model's parameters, or given weights, to one engine or several.

    Tensor names and shapes must equal the engines'; dtypes can differ (fp32 masters are cast into bf16 slots). Of a
    PEFT model, an engine with `lora_rank` gets the adapters alone, and another engine gets the weights with the active
    adapters merged. For a model that FSDP2 or ZeRO-3 spreads over ranks, rank 0 makes the Publisher and each other rank
    a ShardSender. Raises LayoutMismatchError, naming the differences, or PublisherConflictError if another publisher
    lives.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine],
        model: nn.Module | WeightSource | Weights | Callable[[], Weights] | None = None,
        *,
        transport: Transport | None = None,
        check_finite: bool = False,
        timeout_s: float = 60.0,
        slot_timeout_s: float = 3600.0,
    ):
        """model: None if each `publish()` gets the weights; or weights, or a function that returns weights, for each
        `publish()` without any; or a custom WeightSource. transport: `Slots()` by default. It writes directly to the
        slots of a single engine, unless the engine has one slot and the weights are checked or given. Otherwise
        versions pass a staging buffer, which takes up to three times the memory of the weights on the trainer's device.
        check_finite: refuse versions with NaN or infinite weights, by one more read of the copy. The next `publish()`,
        `wait_copied()` or `check()` raises the error of a version that was refused here or by an engine
        (NonFiniteWeightsError, ChecksumError, WeightFileError), once; engines keep their weights. timeout_s: an engine
        that sends nothing for this time hangs (EngineHungError). It must exceed the longest forward pass.
        slot_timeout_s: bound for a single engine that answers but keeps all its slots, while requests are pinned to
        versions (EngineBusyError). After one of these errors every call raises it again.
        """
        self._transport = transport = transport or Slots()
        self._check_finite, self._timeout_s = check_finite, timeout_s
        self._condition = threading.Condition()
        self._pending: PublishedVersion | None = None
        self._copying = False
        self.closed = False
        """True once `close()` was called."""
        self._handing = threading.Lock()
        """Held while given weights are copied."""
        self._error: InflightError | None = None
        self._refused: Exception | None = None
        self._source = _source_of(model)
        if isinstance(transport, Slots):
            self._source.copy = transport.copy()
        self._gpu = self._source.device if self._source.device.type == "cuda" else None
        self._written: Any = None  # events on the trainer's and on the copy's stream
        self._copied: Any = None
        several = isinstance(engines, Sequence) and not isinstance(engines, str)
        if several and not engines:
            raise ValueError("a publisher needs at least one engine to begin with")
        self._engines = [_published(engine) for engine in (engines if several else [engines])]
        target: DirectSlots | StagingBuffer | None = None
        changing = contextlib.ExitStack()
        try:
            for engine in self._engines:
                changing.enter_context(engine.changing)
            link, others = self._attach_first(transport)
            self.endpoints = {link.address.endpoint}
            """Control sockets of the processes that get versions."""
            self._aliases = link.attached.aliases
            self._target = target = self._make_target(link, transport, None if others else slot_timeout_s)
            self.matches = link.matches
            """True if the engines had the trainer's weights before the first publish, False if not. None if that is not
            known: for adapters, for weights given by name, and for sharded models, as no rank has the whole model."""
            self._published = self._warned = False
            self.version = link.version
            """The version that the last `publish()` returned."""
            for address in others:
                with contextlib.suppress(EngineDiedError) if address.engine.comes_back else contextlib.nullcontext():
                    self._add(address, transport)
            for engine in self._engines:
                engine.follow(self)
        except BaseException as error:
            self.closed = True
            reason = error if isinstance(error, InflightError) else InflightError(f"rank 0 failed: {error!r}")
            with contextlib.suppress(InflightError):  # which the other ranks of a sharded model raise
                self._source.start(reason)
            if target is not None:
                target.close()
            raise
        finally:
            changing.close()
        self._source.start((link.layout, self.version))
        self._unpublished_steps = 0
        if self.matches is False:  # the engine's weights are as stale as after an optimizer step
            self._count_step()
        self.last_copy_s = 0.0
        """Seconds that the last copy of the parameters took."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, name="inflight-publisher", daemon=True)
        self._thread.start()

    def add(self, engine: Engine | EngineAddress, *, transport: Transport | None = None) -> None:
        """Send another engine the last sent version and all later versions. engine: also a process that joins one of
        the engines. transport: None uses the transport of this publisher. Raises the errors of the constructor, and
        InflightError if this publisher writes straight to an engine's slots."""
        transport = transport or self._transport
        if isinstance(engine, EngineAddress):
            self._add(engine, transport)
            return
        added = _published(engine)
        with added.changing:
            for address in added.serving():
                self._add(address, transport)
            with self._condition:
                self._engines = [*self._engines, added]
            added.follow(self)

    def _add(self, address: EngineAddress, transport: Transport) -> None:
        link = self._target.add(partial(self._attach, address, transport), transport)
        with self._condition:
            self.matches = self.matches and link.matches
            self.version = max(self.version, link.version)
            self.endpoints = self.endpoints | {address.endpoint}

    def remove(self, endpoint: str) -> None:
        """Stop sending versions to the process at this endpoint, and free the memory that this process shared with
        it."""
        with self._condition:
            self.endpoints = self.endpoints - {endpoint}
        if isinstance(self._target, StagingBuffer):
            self._target.let_go([endpoint])

    def continue_from(self, version: int) -> None:
        """Give the next publish this number, in a run that continues. Raises ValueError unless it is larger than the
        last number."""
        with self._condition:
            if version <= self.version:
                raise ValueError(f"version {version} cannot follow version {self.version}")
            self.version = version - 1

    @property
    def sent_version(self) -> int:
        """The version that engines were sent last; 0: none."""
        return self._target.sent_version

    @property
    def lost(self) -> dict[str, Exception]:
        """Errors of engines that ended, or did not answer in time, by endpoint. The other engines continue without
        them."""
        return dict(self._target.lost)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent of the last version that all engines received: the whole version, or a delta."""
        return self._target.sent_bytes

    def publish(self, weights: Weights | None = None) -> int:
        """Announce the current parameters as the next version, and return its number at once.

        The latest version wins: it replaces a version that is not being copied yet. Raises the error of an earlier
        publish, or InflightError if the publisher is closed.

        weights, for a publisher without a model: pairs of a name and a tensor (an iterator can gather one after
        another, on all ranks), a mapping, or the path of a checkpoint in safetensors. This thread copies them once the
        engine has a slot, and they can change when this returns; on a GPU it has waited for the stream. They must
        contain all of the engine's tensors, in fitting shapes, under the engine's names or a checkpoint's. Raises
        LayoutMismatchError, WeightFileError or NonFiniteWeightsError, naming the problem; then nothing is published.
        """
        if isinstance(self._source, StateDictSource):
            return self._publish_named(self._source, weights)
        if weights is not None:
            raise TypeError(
                "this publisher reads its model; to hand weights over, make one without: engine.publisher()"
            )
        with self._condition:
            self._check_open()
            self._source.prepare()
            record = self._number(now_ns())
            if self._gpu is not None:
                self._written = torch.cuda.current_stream(self._gpu).record_event()
            self._pending = record
            self._condition.notify_all()
        return record.version

    def wait_copied(self) -> None:
        """Wait until no announced version reads the parameters any longer, so that they can change.

        With a free slot this takes the time of a copy; otherwise the engine frees one at its next forward boundary. On
        a GPU the caller's stream waits, not the caller. Raises the error of the publish, EngineHungError and
        EngineBusyError after the bounds of this publisher.
        """
        with self._condition:
            while not self._condition.wait_for(
                lambda: (self._pending is None and not self._copying) or self._error is not None, LOG_EVERY_S
            ):
                if self._copying:  # Otherwise the thread waits for an engine and logs that.
                    logger.warning("waiting for version %d to be copied", self.version)
            self.check()
            copied, self._copied = self._copied, None
        if copied is not None and self._gpu is not None:
            torch.cuda.current_stream(self._gpu).wait_event(copied)

    def check(self) -> None:
        """Raise the error of a publish, if there is one."""
        if self._error is not None:
            raise self._error
        returning = [engine for engine in self._engines if engine.comes_back]
        for engine in returning:
            engine.check()
        if not self.closed and not returning:
            self._target.check()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def close(self, timeout_s: float = 30.0) -> None:
        """Send announced versions and detach. After `timeout_s` seconds the rest is dropped with a warning. Engines
        continue with the newest whole version. Safe to call twice."""
        with self._condition:
            self.closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("closing a publisher that could not send version %d in %g s", self.version, timeout_s)
            for engine in self._target.engines:
                engine.messages.give_up()
            self._thread.join(_GIVE_UP_S)
        if self._thread.is_alive():  # It is inside a copy or a broadcast.
            for engine in self._target.engines:
                engine.lock.unlock()
        self._hook.remove()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.close(_GIVE_UP_S)

    def _publish_named(self, source: StateDictSource, weights: Weights | None) -> int:
        """Publish given weights in the calling thread, while the publisher's thread is idle."""
        target, called_ns = self._target, now_ns()
        with self._handing:
            self._check_open()
            pairs = source.pairs(weights)
            slot = target.acquire()
            try:
                began_ns = now_ns()
                copy_state_dict(target.views[slot], self._aliases, pairs)
                note(f"publish copy, version {self.version + 1}", began_ns)
                if self._check_finite:
                    _check_finite_values(self.version + 1, target.views[slot])
            except BaseException:
                target.release(slot)
                raise
            self.last_copy_s = (now_ns() - called_ns) / 1e9
            record = self._number(called_ns)
            target.announce(slot, record)
            return record.version

    def _number(self, called_ns: int) -> PublishedVersion:
        """Return the next version, and report it to the engines' meters."""
        self.version += 1
        self._unpublished_steps = 0
        self._published = True
        for engine in self._engines:
            engine.published(self.version, called_ns)
        return PublishedVersion(self.version, called_ns)

    def _check_open(self) -> None:
        self.check()
        if self.closed:
            raise InflightError("this publisher is closed; engine.publisher(model) makes a new one")

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before an optimizer changes parameters of this model, wait for the copy."""
        if self._source.is_changed_by(optimizer):
            with span("wait for the publish copy"):
                self.wait_copied()
            self._count_step()

    def _count_step(self) -> None:
        self._unpublished_steps += 1
        for engine in self._engines:
            engine.stepped(self._unpublished_steps)

    def _attach(self, address: EngineAddress, transport: Transport) -> EngineLink:
        if not isinstance(transport, Transport):
            raise TypeError(
                "transport must be inflight.Slots(), inflight.Broadcast(), inflight.Files(directory=…) or one of your "
                f"own (a subclass of inflight.weights.transports.Transport), got {transport!r}"
            )
        return EngineLink(address, self._source, transport=transport.name(), timeout_s=self._timeout_s)

    def _attach_first(self, transport: Transport) -> tuple[EngineLink, list[EngineAddress]]:
        """Attach to a process that serves; while the engine is being restarted, to the next one. Returns the others,
        too."""
        while True:
            first, *others = [address for engine in self._engines for address in engine.serving()]
            try:
                return self._attach(first, transport), others
            except EngineDiedError:
                if not first.engine.comes_back:
                    raise

    def _make_target(
        self, link: EngineLink, transport: Transport, slot_timeout_s: float | None
    ) -> DirectSlots | StagingBuffer:
        """slot_timeout_s: None if more engines follow."""
        # Weights that might not be finite, or might not fit, do not overwrite the only weights of an engine.
        may_spoil = link.welcome.num_slots == 1 and (self._check_finite or isinstance(self._source, StateDictSource))
        try:
            if slot_timeout_s is not None and isinstance(transport, Slots):
                self._transport = transport = replace(transport, timeout_s=slot_timeout_s)
                if not may_spoil and not link.address.engine.comes_back:
                    return DirectSlots(
                        link, self._refuse, slot_timeout_s=slot_timeout_s, with_checksum=transport.checksum
                    )
            return StagingBuffer(link, transport, self._source.device, self._refuse)
        except BaseException:
            link.release()
            raise

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        target = self._target
        use_own_stream(self._source.device)
        try:
            while self._wait_for_work():
                slot = target.acquire()
                with self._condition:  # Take the newest version. A later publish() starts another round.
                    assert self._pending is not None
                    record, self._pending, self._copying = self._pending, None, True
                began_ns = now_ns()
                self._copy(target.views[slot], record.version)
                note(f"publish copy, version {record.version}", began_ns)
                try:
                    if self._check_finite:
                        _check_finite_values(record.version, target.views[slot])
                except NonFiniteWeightsError as error:
                    target.release(slot)
                    self._refuse(error)
                else:
                    target.announce(slot, record)
        except Exception as error:  # The next publish(), wait_copied() or check() raises it.
            if not isinstance(error, InflightError):
                logger.exception("publishing failed")
            reason = error if isinstance(error, InflightError) else InflightError(f"publishing failed: {error!r}")
            with self._condition:
                self._error, self._copying, self._pending = reason, False, None
                self._condition.notify_all()
        with self._handing:
            target.close()
        with contextlib.suppress(RuntimeError):  # The other ranks have ended.
            self._source.close()

    def _wait_for_work(self) -> bool:
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._pending is not None or self.closed, _LISTEN_EVERY_S):
                    return self._pending is not None
            self._warn_of_other_weights()
            with self._handing:  # A thread with given weights is using the engine's connection.
                self._target.listen()

    def _warn_of_other_weights(self) -> None:
        if self.matches is False and not self._published and not self._warned:
            self._warned = True
            logger.warning(
                "the engine's weights are not the trainer's: tokens drawn before the first publish() come from other "
                "weights than the trained ones"
            )

    def _copy(self, views: dict[str, torch.Tensor], version: int) -> None:
        """Fill a slot. Afterwards the parameters can change again, on a GPU in the order of its stream."""
        began_ns, begun, copied = now_ns(), None, None
        if self._gpu is not None:
            stream = torch.cuda.current_stream(self._gpu)
            stream.wait_event(self._written)
            begun, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
        self._source.fill(views, version)
        if copied is not None:
            copied.record()
        with self._condition:
            self._copying = False
            self._copied = copied
            self._condition.notify_all()
        if begun is not None and copied is not None:
            copied.synchronize()  # An announced slot is whole: the engine's stream never waits for the trainer's.
            self.last_copy_s = begun.elapsed_time(copied) / 1e3
        else:
            self.last_copy_s = (now_ns() - began_ns) / 1e9

    def _refuse(self, error: Exception) -> None:
        logger.warning("%s", error)
        self._refused = error


def _source_of(model: nn.Module | WeightSource | Weights | Callable[[], Weights] | None) -> WeightSource:
    """Make the source for a model, or for weights. For a sharded model all ranks make theirs together."""
    if isinstance(model, WeightSource):
        return model
    if not isinstance(model, nn.Module):
        return StateDictSource(model)
    classified = classify(model)
    sources = {"full": ModelSource, "fsdp": ShardGroup, "zero": ShardGroup, "peft": PeftSource}
    return sources[classified.kind](classified)


def _published(engine: Engine) -> PublishedEngine:
    if isinstance(engine, str):
        return LoneEngine(engine)
    return engine if hasattr(engine, "serving") else engine.address.engine


def _check_finite_values(version: int, views: dict[str, torch.Tensor]) -> None:
    """Raise NonFiniteWeightsError, naming them, if tensors in a slot hold NaN or infinite values."""
    floats = {name: view for name, view in views.items() if view.is_floating_point()}
    finite = torch.stack([view.isfinite().all() for view in floats.values()]).tolist()
    bad = [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]
    if bad:
        named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        raise NonFiniteWeightsError(
            f"version {version} was not published: {named} of {len(views)} tensors "
            "hold NaN or infinite values; the engine keeps the weights that it has"
        )
