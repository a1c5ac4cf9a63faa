"""The staging buffer: versions on their way to several engines, or to one that this process cannot write to.

A thread sends the newest version to all engines at once, and takes the next one when each engine has it or is lost. The
last version stays, for engines that attach later and as the base of the next delta.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from inflight.core.errors import EngineBusyError, InflightError, LayoutMismatchError
from inflight.core.waiting import Wait
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.tensors import slot_views
from inflight.weights.trainer.engine_link import EngineLink, PublishedVersion
from inflight.weights.transports.base import Sender, StagedVersion, Transport

logger = logging.getLogger("inflight.weights")

_LET_GO_S = 5.0
_AGAIN_S = 0.1
"""Interval at which engines without a free slot are asked for one."""
_MAX_BUFFERS = 3
"""One was sent last, one is being sent, one is being filled. Each is allocated on first use."""


class StagingBuffer:
    """Target of a publisher that writes to buffers in the same process."""

    def __init__(
        self,
        engine: EngineLink,
        transport: Transport,
        device: torch.device,
        refuse: Callable[[Exception], None],
        *,
        slot_timeout_s: float,
    ):
        """refuse: receives the error of an engine that did not take a version. slot_timeout_s: bound for a time in
        which all engines answer and keep their slots."""
        self._layout, self._device = engine.layout, device
        self._condition = threading.Condition()  # Its lock is reentrant.
        self._buffers: list[torch.Tensor] = []
        self.views = []
        self._free: list[int] = []
        self._newest: tuple[int, PublishedVersion] | None = None
        self._sent: tuple[int, StagedVersion] | None = None
        self._members = _Members(self._condition, refuse, slot_timeout_s)
        self._members.arriving.append((engine, transport))
        self.lost = self._members.lost
        self.sent_bytes = self.sent_version = 0
        self._closing = self._in_progress = False
        self._error: InflightError | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-staging", daemon=True)
        self._thread.start()

    @property
    def engines(self) -> list[EngineLink]:
        return self._members.engines

    @property
    def is_sending(self) -> bool:
        """True if a version is being sent, or will be sent next."""
        with self._condition:
            return self._error is None and bool(self._in_progress or self._newest or self._members.arriving)

    def add(self, attach: Callable[[], EngineLink], transport: Transport) -> EngineLink:
        """Add an engine and send it the last version at once. Raises LayoutMismatchError, or the error of `attach`."""
        engine = attach()
        if engine.layout.fingerprint != self._layout.fingerprint:
            engine.release()
            difference = self._layout.difference(engine.layout, ours="the first engine", theirs="this one", dtypes=True)
            raise LayoutMismatchError(f"all engines of a publisher hold the same tensors: {difference}")
        with self._condition:
            self.lost.pop(engine.address.endpoint, None)
            self._members.arriving.append((engine, transport))
            self._condition.notify_all()
        return engine

    def has_sent(self, engine: EngineLink) -> bool:
        """Return whether an engine has its version from here, because it was attached before."""
        return self._members.left.get(engine.welcome.engine_id) == engine.version

    def let_go(self, endpoint: str) -> None:
        """Unmap the slots of an engine that has ended. Waits some seconds for that."""
        ended = self._members.ended
        with self._condition:
            ended.add(endpoint)
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: not ended or not self._thread.is_alive(), _LET_GO_S):
                logger.warning("the slots of an engine that has ended stay mapped until a version has been sent")

    def acquire(self) -> int:
        """Return an unused slot, if necessary one of a version that waits to be sent: the latest version wins."""
        with self._condition:
            if not self._free and len(self._buffers) < _MAX_BUFFERS:
                # Zeros, since checksums include the gaps between tensors.
                self._buffers.append(torch.zeros(self._layout.total_bytes, dtype=torch.uint8, device=self._device))
                self.views.append(slot_views(self._buffers[-1], self._layout))
                self._free.append(len(self._buffers) - 1)
            if not self._free and self._newest is not None:
                self._free.append(self._newest[0])
                self._newest = None
            self._condition.wait_for(lambda: self._free or self._error)
            self.listen()
            return self._free.pop()

    def announce(self, slot: int, published: PublishedVersion) -> None:
        with self._condition:
            if self._newest is not None:  # The latest version wins.
                self._free.append(self._newest[0])
            self._newest = slot, published
            self._condition.notify_all()

    def release(self, slot: int) -> None:
        with self._condition:
            self._free.append(slot)

    def listen(self) -> None:
        """Raise the error that ended sending, if there is one."""
        with self._condition:
            if self._error is not None:
                raise self._error

    def check(self) -> None:
        """Raise the error that ended sending, or the error of the last engine after all engines have ended."""
        with self._condition:
            self.listen()
            if not self.engines:
                none_left = InflightError("this publisher has no engine any more; add() one")
                raise [none_left, *self.lost.values()][-1]

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        self._members.close()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        own_stream = partial(use_own_stream, self._device)
        own_stream()
        try:
            with ThreadPoolExecutor(thread_name_prefix="inflight-sender", initializer=own_stream) as pool:
                while (work := self._next()) is not None:
                    slot, staged, base = work
                    self._members.send(pool, staged, base)
                    with self._condition:
                        if self._sent is not None and self._sent[0] != slot:
                            self._free.append(self._sent[0])
                        self._sent, self._in_progress = (slot, staged), False
                        self.sent_version = staged.version
                        sent_bytes, self._error = self._members.account()
                        self.sent_bytes = sent_bytes or self.sent_bytes
                        self._condition.notify_all()
        except Exception as error:  # The publisher's next call raises it.
            if not isinstance(error, InflightError):
                logger.exception("sending failed")
            with self._condition:
                self._error = error if isinstance(error, InflightError) else InflightError(f"sending failed: {error!r}")
                self._condition.notify_all()

    def _next(self) -> tuple[int, StagedVersion, StagedVersion | None] | None:
        """Wait for a slot to send; return it, its version and the last version; None once the publisher closes.

        While engines are busy, the last version is returned again and again, for those that lend a slot by then."""
        with self._condition:
            while not (self._newest or self._closing or (self._members.arriving and self._sent)):
                self._members.remove_ended()
                if not self._condition.wait(_AGAIN_S if self._members.busy else None):
                    break
            self._members.remove_ended()
            if self._newest is None and self._closing:
                if self._error is not None or not self._members.busy:
                    return None
                self._members.wait_for_busy()  # `give_up` ends that.
            newest, self._newest, self._in_progress = self._newest, None, True
        self._members.admit()
        if newest is None:
            assert self._sent is not None
            return *self._sent, None
        slot, published = newest
        number, published_ns = published.version, published.published_ns
        staged = StagedVersion(number, published_ns, self._buffers[slot], changed_at=published.changed_at)
        return slot, staged, self._sent[1] if self._sent else None


class _Members:
    """Engines of a staging buffer, by sender. Engines with equal settings of a transport share one."""

    def __init__(self, condition: threading.Condition, refuse: Callable[[Exception], None], slot_timeout_s: float):
        """condition: notified after each change. Other threads hold it while they read."""
        self._condition, self._refuse, self._slot_timeout_s = condition, refuse, slot_timeout_s
        self._senders: list[tuple[Transport, Sender]] = []
        self.arriving: list[tuple[EngineLink, Transport]] = []
        """Engines that have attached and have no sender yet."""
        self.lost: dict[str, Exception] = {}
        self.ended: set[str] = set()
        """Endpoints of engines to be released."""
        self.left: dict[str, int] = {}
        """Maps the ids of engines that were attached to their last versions."""
        self._fatal: InflightError | None = None
        self._kept = Wait()
        """Time in which all engines have kept their slots."""

    @property
    def engines(self) -> list[EngineLink]:
        with self._condition:
            sent = [engine for _, sender in self._senders for engine in sender.engines]
            return sent + [engine for engine, _ in self.arriving if engine not in sent]

    @property
    def busy(self) -> dict[EngineLink, Exception]:
        """Errors of engines that answer and keep all their slots."""
        with self._condition:
            return {engine: error for _, sender in self._senders for engine, error in list(sender.busy.items())}

    def wait_for_busy(self) -> None:
        """Have the next `send` wait for engines that keep all their slots."""
        for _, sender in self._senders:
            sender.busy.clear()

    def admit(self) -> None:
        """Give each arriving engine a sender. If a transport cannot be set up, its engine is lost. Raises the error
        of the transport if no engine has a sender."""
        with self._condition:
            arriving = list(self.arriving)
        for engine, transport in arriving:
            equal = (s for settings, s in self._senders if settings == transport and not transport.writes_to_slots)
            try:
                sender = next(equal, None) or transport.sender()
            except Exception as error:
                if not self._senders:
                    raise
                logger.warning("publishing goes on without an engine, since its transport failed: %s", error)
                known = isinstance(error, InflightError)
                with self._condition:
                    self.arriving.remove((engine, transport))
                    self.lost[engine.address.endpoint] = (
                        error.with_traceback(None) if known else InflightError(f"its transport failed: {error!r}")
                    )
                engine.detach()
                continue
            sender.slot_timeout_s = min(sender.timeout_s, self._slot_timeout_s)
            ended: InflightError | None = None
            try:
                sender.add(engine)
            except InflightError as error:  # It ended after it attached.
                ended = error
            with self._condition:  # Until now it is among `engines` by `arriving`.
                self.arriving.remove((engine, transport))
                if ended is not None:
                    self._lose(engine, ended)
                elif (transport, sender) not in self._senders:
                    self._senders.append((transport, sender))

    def send(self, pool: ThreadPoolExecutor, staged: StagedVersion, base: StagedVersion | None) -> None:
        """Return when every engine has the version or failed to take it."""
        for sending in [pool.submit(sender.send, staged, base) for _, sender in self._senders]:
            sending.result()

    def account(self) -> tuple[int, InflightError | None]:
        """Drop engines that `send` has lost. Return the sent bytes, and an error if no version can be sent any more."""
        sent_bytes = sum(sender.sent_bytes for _, sender in self._senders)
        for _, sender in self._senders:
            for error in sender.refused.values():
                self._refuse(error)
            for engine, error in sender.lost.items():
                sender.engines.remove(engine)
                sender.busy.pop(engine, None)
                self._lose(engine, error)
        self._drop_idle_senders()
        self._check_busy()
        return sent_bytes, self._fatal

    def _check_busy(self) -> None:
        """Set the fatal error if all engines have kept their slots for too long."""
        busy = self.busy
        if not busy or len(busy) < len(self.engines):
            self._kept = Wait()
            return
        *_, error = busy.values()
        self._kept.tick(f"no engine lends a slot: {error}")
        if self._kept.waited_s > self._slot_timeout_s:
            self._fatal = EngineBusyError(
                f"no engine has lent a slot for {self._slot_timeout_s:g} s (slot_timeout_s of the publisher): {error}"
            )

    def remove_ended(self) -> None:
        """Release the engines at the endpoints in `ended`."""
        if not self.ended:
            return
        for engine in [e for e in self.engines if e.address.endpoint in self.ended]:
            self.arriving = [(e, transport) for e, transport in self.arriving if e is not engine]
            for _, sender in self._senders:
                sender.engines = [e for e in sender.engines if e is not engine]
                sender.busy.pop(engine, None)
            self.left[engine.welcome.engine_id] = engine.version
            engine.release()
        self._drop_idle_senders()
        for endpoint in self.ended:
            self.lost.pop(endpoint, None)
        self.ended.clear()
        self._condition.notify_all()

    def close(self) -> None:
        for _, sender in self._senders:
            sender.close()
        for engine, _ in self.arriving:
            engine.detach()

    def _lose(self, engine: EngineLink, error: Exception) -> None:
        logger.warning("publishing goes on without an engine: %s", error)
        self.left[engine.welcome.engine_id] = engine.version
        # A traceback would keep the slots of a dead engine mapped.
        self.lost[engine.address.endpoint] = error.with_traceback(None)
        if isinstance(error, EngineBusyError) and not self.engines:
            self._fatal = error  # A successor would lose the versions of pinned requests.
        elif engine.address.engine.comes_back:  # Otherwise it would continue with old weights.
            engine.address.engine.kill(engine.address.endpoint)
        engine.detach()

    def _drop_idle_senders(self) -> None:
        self._senders = [(t, sender) for t, sender in self._senders if sender.engines or not t.writes_to_slots]
