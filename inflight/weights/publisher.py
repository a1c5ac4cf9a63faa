"""The trainer's side of the weights: `publish()` returns at once, a thread copies the parameters and announces them.

Until a copy is done the parameters must not change; a `torch.optim` optimizer that holds some of them waits for that by
itself (a step hook), other code that writes to them calls `wait_copied()` first. Weights that are handed to `publish()`
are copied before it returns, in the thread that calls it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
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
from inflight.weights.link import EngineAddress, EngineLink, LoneEngine, Published, PublishedEngine
from inflight.weights.lora import PeftSource
from inflight.weights.named import NamedSource, Weights, copy_named
from inflight.weights.peft_layers import carries_adapters
from inflight.weights.sharded import ShardGroup, is_sharded
from inflight.weights.sources import ModelSource, Source
from inflight.weights.staging import StagingBuffer
from inflight.weights.transports.base import Target, Transport
from inflight.weights.transports.slots import Slots

logger = logging.getLogger("inflight.weights")

_LISTEN_EVERY_S = 0.5
"""How often an idle publisher hears what its engine says."""
_GIVE_UP_S = 5.0
"""How long a thread that was told to give up may take."""

Engine = Any
"""An `inflight.Engine`, a PublishedEngine, or the name of the endpoint of an engine's control socket."""


@named()
class Publisher:
    """Publishes a model's parameters, or weights that it is handed, to one engine or several.

    The model's tensor names and shapes must be the engines'; its dtypes may differ (fp32 masters are cast into bf16
    slots). Of a PEFT model only the adapters travel to an engine that was launched with `lora_rank`; to another one go
    the weights with the active adapters merged in. Of a model that FSDP2 or ZeRO-3 spreads over ranks, rank 0 makes the
    Publisher and each other rank a ShardSender. Raises LayoutMismatchError, naming what differs, or
    PublisherConflictError if another publisher lives.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine],
        model: nn.Module | Source | Weights | Callable[[], Weights] | None = None,
        *,
        transport: Transport | None = None,
        check_finite: bool = False,
        timeout_s: float = 60.0,
        slot_timeout_s: float = 3600.0,
    ):
        """model: None where each `publish()` is handed the weights; or weights, or a function that returns some, for
        each `publish()` that is handed none; or a Source of your own.
        transport: `Slots()` by default, which writes to the slots of a single engine directly, unless it has only one
        and the weights are checked or handed over; all else goes through a staging buffer, which takes up to three
        times the memory of the weights on the trainer's device.
        check_finite: refuse versions with NaN or infinite weights, which are read once more for that, behind
        `publish()`. A version that is refused, here or by an engine (NonFiniteWeightsError, ChecksumError,
        WeightFileError), is told by the next `publish()`, `wait_copied()` or `check()`, once; engines keep the
        weights that they have.
        timeout_s: an engine that says nothing for so long hangs (EngineHungError); it has to be longer than the longest
        forward pass. slot_timeout_s: how long a single engine that answers may keep all of its slots, while requests
        are pinned to versions (EngineBusyError). After one of these errors every call raises it again.
        """
        self._transport = transport = transport or Slots()
        self._check_finite, self._timeout_s = check_finite, timeout_s
        self._condition = threading.Condition()
        self._pending: Published | None = None
        self._copying = False
        self.closed = False
        """True once `close()` was called."""
        self._handing = threading.Lock()
        """Held while weights that were handed over are copied."""
        self._error: InflightError | None = None
        self._refused: Exception | None = None
        self._source = _source_of(model)
        self._source.pace = transport.pace() if isinstance(transport, Transport) else None  # else refused by name below
        self._gpu = self._source.device if self._source.device.type == "cuda" else None
        self._written: Any = None  # events on the trainer's and on the copy's stream
        self._copied: Any = None
        several = isinstance(engines, Sequence) and not isinstance(engines, str)
        if several and not engines:
            raise ValueError("a publisher needs at least one engine to begin with")
        self._engines = [_published(engine) for engine in (engines if several else [engines])]
        target: Target | None = None
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
        """Send another engine the version that was sent last and all later ones. engine: also a process that joins one
        of the engines. transport: None takes that of this publisher. Raises as making a Publisher does, and
        InflightError if this one writes straight to an engine's slots."""
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
        """Send the process at this endpoint nothing more, and free the memory that this process shared with it."""
        with self._condition:
            self.endpoints = self.endpoints - {endpoint}
        if isinstance(self._target, StagingBuffer):
            self._target.let_go([endpoint])

    def continue_from(self, version: int) -> None:
        """Give the next publish this number, in a run that goes on. Raises ValueError unless it is larger than that of
        the last one."""
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
        """Maps endpoints of engines that ended, or did not answer in time, to what became of them. The others go on
        without them."""
        return dict(self._target.lost)

    @property
    def sent_bytes(self) -> int:
        """Bytes that engines were sent of the last version that all of them got: the whole, or a delta."""
        return self._target.sent_bytes

    def publish(self, weights: Weights | None = None) -> int:
        """Announce the parameters as they are now as the next version, and return its number at once.

        A version that could not be copied yet when this one is called is dropped: the latest wins. Raises what made an
        earlier publish fail, or InflightError if the publisher is closed.

        weights, of a publisher without a model: pairs of a name and a tensor (an iterator may gather one after
        another, on all ranks), a mapping, or the path of a checkpoint in safetensors. They are copied in this thread,
        once the engine has a slot for them, and may change when this returns; on a GPU its stream has been waited for.
        All of the engine's tensors must come, in shapes that fit, under their own names or a checkpoint's. Raises
        LayoutMismatchError, WeightFileError or NonFiniteWeightsError, naming what is wrong; then nothing was published.
        """
        if isinstance(self._source, NamedSource):
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
        """Return when no announced version will read the parameters any more; from then on they may change.

        With a slot free that is the time of a copy; else the engine's next forward boundary frees one. On a GPU the
        caller's stream is made to wait, not the caller. Raises what made the publish fail, EngineHungError and
        EngineBusyError after the bounds of this publisher.
        """
        with self._condition:
            while not self._condition.wait_for(
                lambda: (self._pending is None and not self._copying) or self._error is not None, LOG_EVERY_S
            ):
                if self._copying:  # else the thread waits for an engine, and says so
                    logger.warning("waiting for version %d to be copied", self.version)
            self.check()
            copied, self._copied = self._copied, None
        if copied is not None and self._gpu is not None:
            torch.cuda.current_stream(self._gpu).wait_event(copied)

    def check(self) -> None:
        """Raise what made a publish fail, if one did."""
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
        """Finish what was published and detach; what is not sent after `timeout_s` seconds is dropped, with a warning.
        Engines serve on with the newest whole version. Safe to call twice."""
        with self._condition:
            self.closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("closing a publisher that could not send version %d in %g s", self.version, timeout_s)
            for engine in self._target.engines:
                engine.give_up()
            self._thread.join(_GIVE_UP_S)
        if self._thread.is_alive():  # inside a copy or a broadcast, whose end nobody waits for
            for engine in self._target.engines:
                engine.unlock()
        self._hook.remove()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.close(_GIVE_UP_S)

    def _publish_named(self, source: NamedSource, weights: Weights | None) -> int:
        """Do all of a publish in the caller's thread; the publisher's own has nothing to do meanwhile."""
        target, called_ns = self._target, now_ns()
        with self._handing:
            self._check_open()
            pairs = source.pairs(weights)
            slot = target.acquire()
            try:
                began_ns = now_ns()
                copy_named(target.views[slot], self._aliases, pairs)
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

    def _number(self, called_ns: int) -> Published:
        """Return the next version, which the engines' meters are told."""
        self.version += 1
        self._unpublished_steps = 0
        self._published = True
        for engine in self._engines:
            engine.published(self.version, called_ns)
        return Published(self.version, called_ns)

    def _check_open(self) -> None:
        self.check()
        if self.closed:
            raise InflightError("this publisher is closed; engine.publisher(model) makes a new one")

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer is about to change parameters: if they are ours, let the copy read them first."""
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

    def _make_target(self, link: EngineLink, transport: Transport, slot_timeout_s: float | None) -> Target:
        """slot_timeout_s: None if more engines follow."""
        # Weights that may turn out not to be finite, or not to fit, are not written over the only ones of an engine.
        may_spoil = link.welcome.num_slots == 1 and (self._check_finite or isinstance(self._source, NamedSource))
        try:
            if slot_timeout_s is not None:
                self._transport = transport = transport.for_one_engine(slot_timeout_s)
                writes_directly = not (may_spoil or link.address.engine.comes_back)
                if writes_directly and (target := transport.target(link, self._refuse)):
                    return target
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
                with self._condition:  # take the newest version; a later publish() starts another round
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
        except Exception as error:  # reported by the next publish(), wait_copied() or check()
            if not isinstance(error, InflightError):
                logger.exception("publishing failed")
            reason = error if isinstance(error, InflightError) else InflightError(f"publishing failed: {error!r}")
            with self._condition:
                self._error, self._copying, self._pending = reason, False, None
                self._condition.notify_all()
        with self._handing:
            target.close()
        with contextlib.suppress(RuntimeError):  # the other ranks are gone
            self._source.close()

    def _wait_for_work(self) -> bool:
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._pending is not None or self.closed, _LISTEN_EVERY_S):
                    return self._pending is not None
            self._warn_of_other_weights()
            with self._handing:  # whoever hands weights over talks to the engine meanwhile
                self._target.listen()

    def _warn_of_other_weights(self) -> None:
        if self.matches is False and not self._published and not self._warned:
            self._warned = True
            logger.warning(
                "the engine's weights are not the trainer's: tokens drawn before the first publish() come from other "
                "weights than the trained ones"
            )

    def _copy(self, views: dict[str, torch.Tensor], version: int) -> None:
        """Fill a slot. The parameters may change again once the copy is done, or in order on their device."""
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
            copied.synchronize()  # announced means whole: the engine's stream never waits for the trainer's
            self.last_copy_s = begun.elapsed_time(copied) / 1e3
        else:
            self.last_copy_s = (now_ns() - began_ns) / 1e9

    def _refuse(self, error: Exception) -> None:
        logger.warning("%s", error)
        self._refused = error


def _source_of(model: nn.Module | Source | Weights | Callable[[], Weights] | None) -> Source:
    """Return what fits the model. For a sharded one all ranks make theirs at once."""
    if isinstance(model, Source):
        return model
    if not isinstance(model, nn.Module):
        return NamedSource(model)
    if is_sharded(model):
        return ShardGroup(model)
    return PeftSource(model) if carries_adapters(model) else ModelSource(model)


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
