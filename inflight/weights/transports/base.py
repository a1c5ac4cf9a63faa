"""Base classes of transports, which send versions to engines.

A transport is one file with three classes: the settings that a user constructs, a sender in the trainer's process and a
receiver in the engine's. These base classes and `SlotFiller` contain the common parts of all transports: version
numbers, slots, checksums, retries and time limits. docs/transports.md contains a whole transport.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import msgspec
import torch

from inflight.core.connection import Answer
from inflight.core.errors import EngineBusyError, EngineDiedError, InflightError, ProtocolError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Fill, Prepare, to_raw
from inflight.weights import delta
from inflight.weights.comparison import checksum
from inflight.weights.trainer.engine_link import EngineLink, PublishedVersion

logger = logging.getLogger("inflight.weights")

_ATTEMPTS = 3
"""Attempts per engine and version. A later version starts again."""
_PATIENCE_S = 1.0
"""Bound of a wait for a slot of an engine that was busy before."""


class Transport(ABC):
    """Settings of a transport. Engines that a publisher reaches with equal settings share one sender."""

    __slots__ = ()

    writes_to_slots: ClassVar[bool] = False
    """True if the trainer's process writes to the slots itself. Then the engine describes their memory
    (`attached.slots`), and each engine has a separate sender."""

    @classmethod
    def name(cls) -> str:
        """Name of the transport at engines. They accept the built-in names and the names of `launch(transports=…)`."""
        return f"{cls.__module__}:{cls.__qualname__}"

    @abstractmethod
    def sender(self) -> "Sender":
        """Make the trainer's side."""

    @classmethod
    @abstractmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> "Receiver | None":
        """Make the engine's side for slots of this layout on this device; None if the trainer fills the slots."""


@dataclass(frozen=True)
class StagedVersion(PublishedVersion):
    """A whole version in the staging buffer."""

    data: torch.Tensor
    """The bytes of a slot, u8[total_bytes]."""

    @cached_property
    def checksum(self) -> int:
        """Checksum of the data. It takes as long as several copies and is computed on first use."""
        return checksum(self.data)


class Sender(ABC):
    """The trainer's side of a transport. One thread uses it, and the trainer does not wait for that thread.

    Subclasses implement `deliver`. An engine that fails does not keep versions from the others.
    """

    refused_later: ClassVar[bool] = False
    """True if engines check a version only after its announcement, and report during the next one."""

    def __init__(self, *, timeout_s: float, delta: bool = False):
        """timeout_s: bound for an engine to prepare or to fill, and a slower engine is dropped; and for others to wait
        for one that lends no slot. delta: lets `changes` return deltas."""
        self.timeout_s, self._delta = timeout_s, delta
        self.slot_timeout_s = timeout_s
        """Bound of the wait for a slot of an engine that was never busy."""
        self.engines: list[EngineLink] = []
        self.sent_bytes = 0
        """Bytes that `deliver` sent of this version. Bytes for several engines count once."""
        self.lost: dict[EngineLink, Exception] = {}
        """Engines that ended or did not answer in time during this version."""
        self.refused: dict[EngineLink, Exception] = {}
        """Errors of engines that did not take this version."""
        self.busy: dict[EngineLink, Exception] = {}
        """Errors of engines that answer and keep all their slots, as for pinned requests. The others do not wait for
        them. They get the newest version when they lend a slot."""
        self._slow: set[EngineLink] = set()
        """Engines that were busy once."""
        self._refused_at: dict[EngineLink, int] = {}
        """Maps engines to the last version that they refused. They are not sent it again."""
        self._slots: dict[EngineLink, int] = {}
        self._fills: dict[EngineLink, tuple[Fill, Answer]] = {}
        """Requests of `fill` in this attempt."""
        self._holds: dict[EngineLink, int] = {}
        """Maps an engine to the version that filled it last. This can be the base of a delta."""

    @abstractmethod
    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        """Send a version to these engines. The publisher owns the given slot of each. `fill` has an engine fill it.

        base: the version sent before, if there is one. Engines that do not take the version get a few more attempts.
        Raises an InflightError if the version cannot be sent: the engines keep their weights and the publisher raises
        it. Any other error ends the publisher.
        """

    def fill(
        self, engine: EngineLink, staged: StagedVersion, origin: msgspec.Struct, base: StagedVersion | None = None
    ) -> None:
        """Request that an engine's receiver fills the slot from the origin. After `deliver` returns, the answer is
        awaited and the version announced. base: the origin holds the changes since that version."""
        fill = Fill(
            ticket=engine.messages.ticket(),
            slot=self._slots[engine],
            version=staged.version,
            fingerprint=engine.layout.fingerprint,
            origin=to_raw(origin, "the origin of a version"),
            base=base.version if base else None,
            checksum=staged.checksum,
        )
        self._fills[engine] = fill, engine.messages.send(fill)

    def prepare(self, setups: Mapping[EngineLink, msgspec.Struct], meanwhile: Callable[[], None]) -> bool:
        """Send each engine's receiver its setup and call `meanwhile`. Return whether everything succeeded. If not, the
        attempt ends for engines without a pending `fill`."""
        answers = {
            e: e.messages.send(Prepare(ticket=e.messages.ticket(), setup=to_raw(setup, "a setup")))
            for e, setup in setups.items()
        }
        succeeded = True
        try:
            meanwhile()
        except InflightError as error:
            self.refused |= dict.fromkeys(setups, error)
            succeeded = False
        ready = [self._try(e, partial(e.messages.wait_for, answer, self.timeout_s)) for e, answer in answers.items()]
        return succeeded and all(ready)

    def holds(self, engine: EngineLink, base: StagedVersion | None) -> bool:
        """Return whether this version filled the engine last."""
        return base is not None and self._holds.get(engine) == base.version

    def changes(
        self, engines: Sequence[EngineLink], staged: StagedVersion, base: StagedVersion | None
    ) -> torch.Tensor | None:
        """Return a delta, u8[m], if deltas are enabled, all these engines hold its base, and it is smaller."""
        if not self._delta or base is None or not all(self.holds(engine, base) for engine in engines):
            return None
        return delta.encode(base.data, staged.data)

    def add(self, engine: EngineLink) -> None:
        """Also send versions to this engine."""
        self.engines.append(engine)

    def close(self) -> None:
        """Detach from all engines."""
        for engine in self.engines:
            engine.detach()

    def send(self, staged: StagedVersion, base: StagedVersion | None) -> None:
        """Send the version to every engine that lacks it, and set `lost`, `refused` and `sent_bytes`. The staging
        buffer calls this."""
        self.lost, self.refused, self.sent_bytes = {}, {}, 0
        for _ in range(_ATTEMPTS):
            self._attempt(staged, base)
        if not self.refused_later:
            self.refused = {e: error for e, error in self.refused.items() if e.version < staged.version}
        self._refused_at |= {e: staged.version for e in self.refused if e.version < staged.version}

    def _acquire(self, engine: EngineLink) -> None:
        engine.check()
        if engine in self.busy and not engine.lends():
            return
        self.busy.pop(engine, None)
        try:
            patience_s = min(self.slot_timeout_s, _PATIENCE_S) if engine in self._slow else self.slot_timeout_s
            self._slots[engine] = engine.acquire(patience_s, "timeout_s of the transport")
        except EngineBusyError as error:
            logger.warning("publishing goes on without an engine until it lends a slot: %s", error)
            self.busy[engine] = error.with_traceback(None)
            self._slow.add(engine)

    def _attempt(self, staged: StagedVersion, base: StagedVersion | None) -> None:
        self._slots, self._fills = {}, {}
        for engine in self.engines:
            has_refused = self._refused_at.get(engine) == staged.version
            if engine not in self.lost and engine.version < staged.version and not has_refused:
                self._try(engine, partial(self._acquire, engine))
        if not self._slots:
            return
        try:
            self.deliver(self._slots, staged, base)
        except InflightError as error:
            self.refused |= {engine: error for engine in self._slots if engine not in self._fills}
        for engine, (fill, answer) in self._fills.items():
            if self._try(engine, partial(engine.messages.wait_for, answer, self.timeout_s)):
                engine.announce(fill.slot, staged)
                self._holds[engine] = fill.version
            else:
                self._holds.pop(engine, None)  # The next attempt sends the whole version.
        for engine, slot in self._slots.items():
            if engine.version < staged.version:
                engine.give_back(slot)

    def _try(self, engine: EngineLink, action: Callable[[], object]) -> bool:
        """Return whether an action succeeded. Note the error of an engine that failed."""
        try:
            action()
        except (EngineDiedError, TimeoutError) as error:
            self.lost[engine] = error
        except InflightError as error:
            self.refused[engine] = error
        else:
            return True
        return False


class Receiver(ABC):
    """The engine's side of a transport. It receives versions in a thread of the engine's process while decoding
    continues. Each publisher that attaches gets a new one.

    Its input is untrusted: check sizes, paths and versions before touching memory. The publisher raises its errors,
    preferably InflightErrors. A slot that it filled goes live only with the checksum of the trainer.
    """

    origin: ClassVar[type[msgspec.Struct]]
    """Type of the struct that `Sender.fill` sends."""
    setup: ClassVar[type[msgspec.Struct] | None] = None
    """Type of the struct that `Sender.prepare` sends, if the transport uses it."""

    def __init__(self, layout: WeightLayout, device: torch.device):
        self.layout, self.device = layout, device

    def prepare(self, setup: Any) -> None:  # noqa: B027
        """Prepare for versions: join a process group, for example."""

    @abstractmethod
    def receive(self, origin: Any, version: int, slot: torch.Tensor) -> None:
        """Write a whole version to a slot, u8[total_bytes]. The slot is complete when this returns."""

    def receive_changes(self, origin: Any, version: int, base: int) -> torch.Tensor:
        """Return the changes since version `base`, u8[m], as `inflight.weights.delta` encodes them."""
        raise ProtocolError(f"{type(self).__name__} takes whole versions only, and not the changes since one")

    def close(self) -> None:  # noqa: B027
        """Release resources after the publisher has detached."""
