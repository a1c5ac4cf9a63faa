"""The thread that copies versions from a source to slots, and the engines that note these versions."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, InflightError, NonFiniteWeightsError
from inflight.core.layout import Alias
from inflight.core.spans import note, span
from inflight.core.text import listed
from inflight.core.waiting import LOG_EVERY_S
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.tensors import fill
from inflight.weights.trainer.engine_link import EngineAddress, EngineLink, PublishedEngine, PublishedVersion
from inflight.weights.trainer.sources import WeightSource
from inflight.weights.trainer.state_dict_source import copy_state_dict

logger = logging.getLogger("inflight.weights")

_LISTEN_EVERY_S = 0.5
"""Interval at which an idle publisher processes messages of its engine."""
CLOSE_S, GIVE_UP_S = 30.0, 5.0
"""Time limits for a thread to end, and to end after an error."""


class Engines:
    """Engines of a publisher. They note its versions, and the optimizer steps since the last one."""

    def __init__(self, engines: list[PublishedEngine]):
        self.all = engines
        self._unpublished_steps = Counter[str]()
        """Optimizer steps since the last publish, by adapter. "": of everything."""

    def attach_first(self, attach: Callable[[EngineAddress], EngineLink]) -> tuple[EngineLink, list[EngineAddress]]:
        """Attach to a process that serves; while the engine is being restarted, to the next one. Returns the others,
        too."""
        while True:
            first, *others = [address for engine in self.all for address in engine.serving()]
            try:
                return attach(first), others
            except EngineDiedError:
                if not first.engine.comes_back:
                    raise

    def published(self, published: PublishedVersion) -> None:
        for adapter in published.adapters or list(self._unpublished_steps):
            del self._unpublished_steps[adapter]
        for engine in self.all:
            engine.published(published.version, published.published_ns, published.adapters)
        self._report_steps()

    def stepped(self, adapters: Collection[str] = ()) -> None:
        """Note a step. adapters: the adapters that it changes; empty: it changes everything."""
        self._unpublished_steps.update(adapters or [""])
        self._report_steps()

    def _report_steps(self) -> None:
        if steps := self._unpublished_steps:
            for engine in self.all:
                engine.stepped(max(steps.values()), () if "" in steps else frozenset(steps))

    def check(self) -> bool:
        """Raise the error of an engine that is not restarted any more. Return whether an engine can be restarted."""
        returning = [engine for engine in self.all if engine.comes_back]
        for engine in returning:
            engine.check()
        return bool(returning)


class CopyThread:
    """Copies the newest version from the source to a slot of the target, and announces it."""

    def __init__(self, source: WeightSource, engines: Engines, *, check_finite: bool):
        self._source, self._engines, self._check_finite = source, engines, check_finite
        self._gpu = source.device if source.device.type == "cuda" else None
        self.target: Any = None
        self.condition = threading.Condition()
        self.handing = threading.Lock()
        """Held while given weights are copied."""
        self.has_published = False
        self.differs = False
        """True until the first publish, or until it is logged, if the engine's weights are not the trainer's."""
        self.last_copy_s = 0.0
        self._pending: PublishedVersion | None = None
        self.copying: PublishedVersion | None = None
        self._written: Any = None  # events on the trainer's and on the copy's stream
        self._copied: Any = None
        self._closing = False
        self._error: InflightError | None = None
        self._refused: Exception | None = None
        self._last: dict[str, torch.Tensor] | None = None
        """Views of the slot with the last announced version. It stays whole until a later one is announced. None: the
        next version takes everything from the source."""
        self._changed_at: dict[str, int] = {}
        """Maps adapters to the last version that changed them."""

    @property
    def kind(self) -> Literal["weights", "adapters"]:
        return "adapters" if self._source.adapters else "weights"

    def start(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, name="inflight-publisher", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended this thread or an engine, or once the error of a refused version."""
        if self._error is not None:
            raise self._error
        if not self._engines.check() and not self._closing:
            self.target.check()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def refuse(self, error: Exception) -> None:
        """Note the error of a version that keeps its engine's weights as they are."""
        logger.warning("%s", error)
        self._refused, self._last = error, None

    def copy_given(self, pairs: Iterator[tuple[str, torch.Tensor]], aliases: Sequence[Alias], version: int) -> int:
        """Copy given weights in the calling thread, which holds `handing`. Return their slot."""
        target, called_ns = self.target, now_ns()
        slot = target.acquire()
        try:
            began_ns = now_ns()
            copy_state_dict(target.views[slot], aliases, pairs)
            note(f"publish copy, version {version}", began_ns)
            if self._check_finite:
                _check_finite_values(version, target.views[slot])
        except BaseException:
            target.release(slot)
            raise
        self.last_copy_s = (now_ns() - called_ns) / 1e9
        return slot

    def hand_over(self, published: PublishedVersion, slot: int | None) -> None:
        """Announce the version in a slot, or request a copy of the source from this thread."""
        self.has_published, self.differs = True, False
        if slot is not None:
            self.target.announce(slot, published)
            return
        if self._gpu is not None:
            self._written = torch.cuda.current_stream(self._gpu).record_event()
        if self._pending is not None:  # The version that is replaced is part of this one.
            both = self._pending.adapters and published.adapters
            published = replace(published, adapters=both and self._pending.adapters | published.adapters)
        self._pending = published
        self.condition.notify_all()

    def wait_copied(self) -> None:
        """Wait until no announced version reads the source any longer."""
        with self.condition:
            while not self.condition.wait_for(
                lambda: (self._pending is None and self.copying is None) or self._error is not None, LOG_EVERY_S
            ):
                if self.copying is not None:  # Otherwise the thread waits for an engine and logs that.
                    logger.warning("waiting for version %d to be copied", self.copying.version)
            self.check()
            copied, self._copied = self._copied, None
        if copied is not None and self._gpu is not None:
            torch.cuda.current_stream(self._gpu).wait_event(copied)

    def close(self, timeout_s: float, version: int) -> None:
        """Send announced versions and detach. After timeout_s drop the rest, with a warning that names this version."""
        with self.condition:
            self._closing = True
            self.condition.notify_all()
        try:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("closing a publisher that could not send version %d in %g s", version, timeout_s)
                for engine in self.target.engines:
                    engine.messages.give_up()
                self._thread.join(GIVE_UP_S)
            if self._thread.is_alive():  # It is inside a copy or a broadcast.
                for engine in self.target.engines:
                    engine.lock.unlock()
            self._hook.remove()
        finally:
            for engine in self._engines.all:
                engine.unfollow(self.kind, self.target.sent_version)

    def abandon(self) -> None:
        """Close. Called when the publisher is collected as garbage."""
        newest = self._pending or self.copying
        close = partial(self.close, CLOSE_S, self.target.sent_version if newest is None else newest.version)
        if threading.current_thread().name.startswith("inflight-"):  # Such a thread might have to wait for itself.
            threading.Thread(target=close, name="inflight-closing", daemon=True).start()
        else:
            close()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before an optimizer changes parameters of this model, wait for the copy."""
        if self._source.is_changed_by(optimizer):
            with span("wait for the publish copy"):
                self.wait_copied()
            self._engines.stepped(self._source.adapters_changed_by(optimizer))

    def _run(self) -> None:
        target = self.target
        use_own_stream(self._source.device)
        try:
            while self._wait_for_work():
                self._send(target.acquire())
        except Exception as error:  # The next publish(), wait_copied() or check() raises it.
            if not isinstance(error, InflightError):
                logger.exception("publishing failed")
            reason = error if isinstance(error, InflightError) else InflightError(f"publishing failed: {error!r}")
            with self.condition:
                self._error, self.copying, self._pending = reason, None, None
                self.condition.notify_all()
        self._last = None  # It keeps a slot mapped.
        with self.handing:
            target.close()
        with suppress(RuntimeError):  # The other ranks have ended.
            self._source.close()

    def _send(self, slot: int) -> None:
        """Copy the newest version to a slot, and announce it."""
        target = self.target
        with self.condition:  # A later publish() starts another round.
            assert self._pending is not None
            published, self._pending = self._pending, None
            last = self._last  # Another thread can call `refuse` during the copy, which sets it to None.
            if published.adapters and last is None:
                published = replace(published, adapters=frozenset())
                self._engines.published(published)
            changed = published.adapters
            if self._source.adapters and not changed:
                changed = set(map(adapter_of, target.views[slot]))
            self._changed_at = self._changed_at | dict.fromkeys(changed, published.version)
            published = self.copying = replace(published, changed_at=self._changed_at)
        began_ns = now_ns()
        self._copy(target.views[slot], published, last)
        note(f"publish copy, version {published.version}", began_ns)
        try:
            if self._check_finite:
                _check_finite_values(published.version, target.views[slot])
        except NonFiniteWeightsError as error:
            target.release(slot)
            self.refuse(error)
        else:
            self._last = target.views[slot]
            target.announce(slot, published)

    def _wait_for_work(self) -> bool:
        while True:
            with self.condition:
                if self.condition.wait_for(lambda: self._pending is not None or self._closing, _LISTEN_EVERY_S):
                    return self._pending is not None
            if self.differs:
                self.differs = False
                logger.warning(
                    "the engine's weights are not the trainer's: tokens drawn before the first publish() come from "
                    "other weights than the trained ones"
                )
            with self.handing:  # A thread with given weights is using the engine's connection.
                self.target.listen()

    def _copy(
        self, views: dict[str, torch.Tensor], published: PublishedVersion, last: dict[str, torch.Tensor] | None
    ) -> None:
        """Fill a slot. Afterwards the parameters can change again, on a GPU in the order of its stream. last: views of
        the slot with the other adapters."""
        began_ns, begun, copied = now_ns(), None, None
        if self._gpu is not None:
            stream = torch.cuda.current_stream(self._gpu)
            stream.wait_event(self._written)
            begun, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
        new = views
        if published.adapters:
            new = {name: view for name, view in views.items() if adapter_of(name) in published.adapters}
        self._source.fill(new, published.version)
        if new is not views and views is not last and last is not None:
            fill({name: view for name, view in views.items() if name not in new}, last)
        if copied is not None:
            copied.record()
        with self.condition:
            self.copying = None
            self._copied = copied
            self.condition.notify_all()
        if begun is not None and copied is not None:
            copied.synchronize()  # An announced slot is whole: the engine's stream never waits for the trainer's.
            self.last_copy_s = begun.elapsed_time(copied) / 1e3
        else:
            self.last_copy_s = (now_ns() - began_ns) / 1e9


def adapter_of(name: str) -> str:
    """Return the adapter of a tensor in a slot of adapters."""
    return name.partition(".")[0]


def _check_finite_values(version: int, views: dict[str, torch.Tensor]) -> None:
    """Raise NonFiniteWeightsError, naming them, if tensors in a slot hold NaN or infinite values."""
    floats = {name: view for name, view in views.items() if view.is_floating_point()}
    finite = torch.stack([view.isfinite().all() for view in floats.values()]).tolist()
    bad = [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]
    if bad:
        raise NonFiniteWeightsError(
            f"version {version} was not published: {listed(bad)} of {len(views)} tensors "
            "hold NaN or infinite values; the engine keeps the weights that it has"
        )
