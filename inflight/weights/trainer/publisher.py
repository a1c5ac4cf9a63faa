"""Publishes a trainer's weights: `publish()` returns at once, and a thread copies the parameters and announces them.

Until a copy is done the parameters must not change. A `torch.optim` optimizer of these parameters waits for that by
itself (a step hook); other code that writes to them calls `wait_copied()` first. `publish(weights)` copies these
weights in the calling thread before it returns.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from functools import partial
from typing import Any, Literal
from weakref import finalize

from torch import nn

from inflight.core.arguments import named
from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, InflightError
from inflight.weights.trainer.copy_thread import CLOSE_S, GIVE_UP_S, CopyThread, Engines, adapter_of
from inflight.weights.trainer.engine_link import (
    DirectSlots,
    EngineAddress,
    EngineLink,
    LoneEngine,
    PublishedEngine,
    PublishedVersion,
)
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.sharded import ShardGroup
from inflight.weights.trainer.sources import ModelSource, WeightSource, classify
from inflight.weights.trainer.staging import StagingBuffer
from inflight.weights.trainer.state_dict_source import StateDictSource, Weights
from inflight.weights.transports.base import Transport
from inflight.weights.transports.slots import Slots

Engine = Any
"""An `inflight.Engine`, its `address`, a PublishedEngine, or the name of the endpoint of an engine's control socket."""


@named()
class Publisher(AbstractContextManager["Publisher"]):
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
        slot_timeout_s: bound for engines that answer but all keep their slots, while requests are pinned to versions
        (EngineBusyError). After one of these errors every call raises it again.
        """
        self._transport = transport = transport or Slots()
        self.closed = False
        """True once `close()` was called."""
        self._source = source = _source_of(model)
        several = isinstance(engines, Sequence) and not isinstance(engines, str)
        if several and not engines:
            raise ValueError("a publisher needs at least one engine to begin with")
        self._engines = Engines([_published(engine) for engine in (engines if several else [engines])])
        self._copies = copies = CopyThread(source, self._engines, check_finite=check_finite)
        self._timeout_s = timeout_s
        self._transports: dict[PublishedEngine, Transport] = {}
        """Transports of engines that were added with one."""
        link: EngineLink | None = None
        target: DirectSlots | StagingBuffer | None = None
        changing = ExitStack()
        try:
            for engine in self._engines.all:
                changing.enter_context(engine.changing)
            link, others = self._engines.attach_first(partial(self._attach, transport=transport))
            # Weights that might not be finite, or might not fit, do not overwrite the only weights of an engine.
            may_spoil = link.welcome.num_slots == 1 and (check_finite or isinstance(source, StateDictSource))
            is_direct = not (others or may_spoil or link.address.engine.comes_back)
            if is_direct and isinstance(transport, Slots):
                with_checksum = transport.checksum
                target = DirectSlots(link, copies.refuse, slot_timeout_s=slot_timeout_s, with_checksum=with_checksum)
            else:
                target = StagingBuffer(link, transport, source.device, copies.refuse, slot_timeout_s=slot_timeout_s)
            self._target = copies.target = target
            self._aliases = link.attached.aliases
            self._adapters = dict.fromkeys(adapter_of(spec.name) for spec in link.layout.tensors if source.adapters)
            self.endpoints = {link.address.endpoint}
            """Control sockets of the processes that get versions."""
            self.matches = link.matches
            """True if the engines had the trainer's weights before the first publish, False if not. None if that is not
            known: for adapters, for weights given by name, and for sharded models, as no rank has the whole model."""
            self.version = link.version
            """The version that the last `publish()` returned."""
            for address in others:
                with suppress(EngineDiedError) if address.engine.comes_back else nullcontext():
                    self.add(address, transport=transport)
            for engine in self._engines.all:
                engine.follow(self)
        except BaseException as error:
            self.closed = True
            reason = error if isinstance(error, InflightError) else InflightError(f"rank 0 failed: {error!r}")
            with suppress(InflightError):  # which the other ranks of a sharded model raise
                source.start(reason)
            if target is not None:
                target.close()
            elif link is not None:
                link.release()
            raise
        finally:
            changing.close()
        source.start((link.layout, self.version))
        if self.matches is False:  # the engine's weights are as stale as after an optimizer step
            self._engines.stepped()
        copies.differs = self.matches is False
        copies.start()
        # A publisher to which nothing refers any more, as in a notebook, would keep the engine's lock.
        self._abandoned = finalize(self, copies.abandon)
        self._abandoned.atexit = False

    def add(self, engine: Engine | EngineAddress, *, transport: Transport | None = None) -> None:
        """Send another engine the last sent version and all later versions. engine: also a process that joins one of
        the engines. transport: also for processes that join the engine later. None uses the transport of this
        publisher. Raises the errors of the constructor, InflightError if this publisher is closed or writes straight to
        an engine's slots, and ValueError if the engine has the published version, or a larger one, of another
        publisher."""
        copies = self._copies
        if self.closed:
            raise _closed()
        if isinstance(engine, EngineAddress):
            transport = transport or self.transport_to(engine.engine)
            link = self._target.add(partial(self._attach, engine, transport, is_late=True), transport)
            with copies.condition:
                if not copies.has_published:
                    self.matches = self.matches and link.matches
                    copies.differs = copies.differs or link.matches is False
                self.version = max(self.version, link.version)
                self.endpoints = self.endpoints | {engine.endpoint}
            return
        added, transport = _published(engine), transport or self._transport
        with added.changing:
            for address in added.serving():
                self.add(address, transport=transport)
            with copies.condition:
                self._engines.all = [*self._engines.all, added]
            self._transports[added] = transport
            added.follow(self)

    def _attach(self, address: EngineAddress, transport: Transport, *, is_late: bool = False) -> EngineLink:
        """Attach to an engine. is_late: it gets the last sent version. Raises ValueError if it takes no such one."""
        if not isinstance(transport, Transport):
            raise TypeError(
                "transport must be inflight.Slots(), inflight.Broadcast(), inflight.Files(directory=…) or one of your "
                f"own (a subclass of inflight.weights.transports.Transport), got {transport!r}"
            )
        # An engine that does not fit leaves the source of the others as it is.
        source = copy(self._source) if is_late else self._source
        link = EngineLink(address, source, transport=transport.name(), timeout_s=self._timeout_s)
        target = self._target if is_late and self._copies.has_published and link.version >= self.version else None
        if isinstance(target, StagingBuffer) and not target.has_sent(link):
            link.release()
            raise ValueError(
                f"the engine at {address.endpoint} has version {link.version} of another publisher, and takes larger "
                f"numbers alone: this publisher has published version {self.version}. "
                f"Call continue_from({link.version + 1}) and publish() first, or add the engine before publishing"
            )
        return link

    def remove(self, endpoint: str) -> None:
        """Stop sending versions to the process at this endpoint, and free the memory that this process shared with
        it."""
        with self._copies.condition:
            self.endpoints = self.endpoints - {endpoint}
        self._target.let_go(endpoint)

    def continue_from(self, version: int) -> None:
        """Give the next publish this number, in a run that continues. Raises ValueError unless it is larger than the
        last number."""
        with self._copies.condition:
            if version <= self.version:
                raise ValueError(f"version {version} cannot follow version {self.version}")
            self.version = version - 1

    @property
    def kind(self) -> Literal["weights", "adapters"]:
        """The tensors that engines get."""
        return self._copies.kind

    def reads(self, model: nn.Module) -> bool | None:
        """Return whether it publishes parameters of this model; None for given weights and custom sources."""
        return self._source.publishes(model.parameters())

    def transport_to(self, engine: PublishedEngine) -> Transport:
        """Return the transport to an engine."""
        return self._transports.get(engine, self._transport)

    @property
    def is_direct(self) -> bool:
        """True if it writes straight to the slots of one engine, so that no other engine can be added."""
        return isinstance(self._target, DirectSlots)

    @property
    def is_sending(self) -> bool:
        """True while a version in the staging buffer is on its way to an engine."""
        return self._target.is_sending

    @property
    def sent_version(self) -> int:
        """The version that engines were sent last; 0: none."""
        return self._target.sent_version

    @property
    def sent_bytes(self) -> int:
        """Bytes sent of the last version that all engines received: the whole version, or a delta."""
        return self._target.sent_bytes

    @property
    def last_copy_s(self) -> float:
        """Seconds that the last copy of the parameters took."""
        return self._copies.last_copy_s

    @property
    def lost(self) -> dict[str, Exception]:
        """Errors of engines that ended, or did not answer in time, by endpoint. The other engines continue without
        them."""
        return dict(self._target.lost)

    def publish(self, weights: Weights | None = None, *, adapter: str | None = None) -> int:
        """Announce the current parameters as the next version, and return its number at once.

        The latest version wins: it replaces a version that is not being copied yet. Raises the error of an earlier
        publish, or InflightError if the publisher is closed.

        adapter: publish this adapter alone. The engine keeps the last published parameters of the others. The first
        version, and the next one after a refused version, contains all adapters. Raises ValueError if the engine has no
        such adapter.

        weights, for a publisher without a model: pairs of a name and a tensor (an iterator can gather one after
        another, on all ranks), a mapping, or the path of a checkpoint in safetensors. This thread copies them once the
        engine has a slot, and they can change when this returns; on a GPU it has waited for the stream. They must
        contain all of the engine's tensors, in fitting shapes, under the engine's names or a checkpoint's. Raises
        LayoutMismatchError, WeightFileError or NonFiniteWeightsError, naming the problem; then nothing is published.
        """
        copies, source, called_ns, slot = self._copies, self._source, now_ns(), None
        if adapter is not None and adapter not in self._adapters:
            raise ValueError(f"this publisher sends {', '.join(self._adapters) or 'no adapters'}; got {adapter!r}")
        are_given = isinstance(source, StateDictSource)
        if weights is not None and not are_given:
            raise TypeError(
                "this publisher reads its model; to hand weights over, make one without: engine.publisher()"
            )
        with copies.handing if are_given else copies.condition:
            copies.check()
            if self.closed:
                raise _closed()
            if are_given:
                slot = copies.copy_given(source.pairs(weights), self._aliases, self.version + 1)
            else:
                source.prepare()
            self.version += 1
            adapters = frozenset() if adapter is None else frozenset({adapter})
            published = PublishedVersion(self.version, called_ns, adapters=adapters)
            self._engines.published(published)
            copies.hand_over(published, slot)
        return published.version

    def wait_copied(self) -> None:
        """Wait until no announced version reads the parameters any longer, so that they can change.

        With a free slot this takes the time of a copy; otherwise the engine frees one at its next forward boundary. On
        a GPU the caller's stream waits, not the caller. Raises the error of the publish, EngineHungError and
        EngineBusyError after the bounds of this publisher.
        """
        self._copies.wait_copied()

    def check(self) -> None:
        """Raise the error of a publish, if there is one."""
        self._copies.check()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send announced versions and detach. After `timeout_s` seconds the rest is dropped with a warning. Engines
        continue with the newest whole version. Safe to call twice."""
        self.closed = True
        self._abandoned.detach()
        self._copies.close(timeout_s, self.version)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.close(GIVE_UP_S)


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
    if isinstance(engine, EngineAddress):
        return engine.engine
    return engine if hasattr(engine, "serving") else engine.address.engine


def _closed() -> InflightError:
    return InflightError("this publisher is closed; engine.publisher(model) makes a new one")
