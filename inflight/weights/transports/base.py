"""What a transport is: a way in which versions reach engines.

A transport is one file with three classes: the settings, which a user constructs, the trainer's side and the engine's.
Version numbers, slots, checksums, repeated attempts and time limits are the same for all of them and lie outside.
docs/transports.md writes one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import msgspec
import torch

from inflight.core.connection import Answer
from inflight.core.errors import EngineDiedError, InflightError, ProtocolError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Fill, Prepare, to_raw
from inflight.weights import delta
from inflight.weights.checksum import checksum
from inflight.weights.link import EngineLink, Published
from inflight.weights.pace import Pace

_ATTEMPTS = 3
"""Attempts per engine and version; the next version is another chance."""


class Transport(ABC):
    """Settings of a transport. Engines that a publisher reaches with equal settings share one sender."""

    __slots__ = ()

    writes_to_slots: ClassVar[bool] = False
    """True if the trainer's process writes to the slots itself: the engine describes them to it (`attached.slots`), and
    each engine has a sender of its own."""

    @classmethod
    def name(cls) -> str:
        """The name by which engines know the transport; they accept the built-in ones and `launch(transports=…)`."""
        return f"{cls.__module__}:{cls.__qualname__}"

    @abstractmethod
    def sender(self) -> "Sender":
        """Make the trainer's side."""

    @classmethod
    @abstractmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> "Receiver | None":
        """Make the engine's side, for slots of this layout on this device; None if the trainer fills the slots."""

    def for_one_engine(self, slot_timeout_s: float) -> Self:
        """Return the settings for the only engine of a publisher with this `slot_timeout_s`."""
        return self

    def pace(self) -> Pace | None:
        """Return how a copy of the weights is cut into pieces; None: not at all."""
        return None

    def target(self, engine: EngineLink, refuse: Callable[[Exception], None]) -> "Target | None":
        """Return what writes versions straight to the only engine; None if they go through a staging buffer."""
        return None


@dataclass(frozen=True)
class StagedVersion:
    """A whole version in the staging buffer."""

    data: torch.Tensor
    """The bytes of a slot, u8[total_bytes]."""
    record: Published

    @cached_property
    def checksum(self) -> int:
        """Computed if a sender asks for it: it takes as long as several copies."""
        return checksum(self.data)

    @property
    def version(self) -> int:
        return self.record.version


class Sender(ABC):
    """The trainer's side of a transport. It is used from one thread, which the trainer does not wait for.

    Subclasses implement `deliver`. An engine that fails does not keep the others from their versions.
    """

    refused_later: ClassVar[bool] = False
    """True if an engine refuses a version only after it was announced, and so tells while the next one is sent."""

    def __init__(self, *, timeout_s: float, delta: bool = False):
        """timeout_s: an engine that takes longer to lend a slot, to prepare or to fill is let go. delta: whether
        `changes` returns any."""
        self.engines: list[EngineLink] = []
        self.timeout_s = timeout_s
        self.sent_bytes = 0
        """Bytes that `deliver` sent of this version, counted once where several engines get the same."""
        self.lost: dict[EngineLink, Exception] = {}
        """Engines that ended or did not answer in time while this version was sent."""
        self.refused: dict[EngineLink, Exception] = {}
        """Reasons why engines did not take a version."""
        self._delta = delta
        self._slots: dict[EngineLink, int] = {}
        self._fills: dict[EngineLink, tuple[Fill, Answer]] = {}
        """What `fill` asked for in this attempt."""
        self._holds: dict[EngineLink, int] = {}
        """Maps an engine to the version that it was filled with last, which can be the base of a delta."""

    @abstractmethod
    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        """Bring a version to these engines, each of which has lent the slot beside it; `fill` has one fill its slot.

        base: the version that was sent before, if there is one. It is called again for engines that did not take the
        version, a few times. Raises an InflightError if the version cannot be sent: then the engines keep what they
        have and the trainer is told. Any other error ends the publisher.
        """

    def fill(
        self, engine: EngineLink, staged: StagedVersion, origin: msgspec.Struct, base: StagedVersion | None = None
    ) -> None:
        """Ask an engine to fill its slot; its receiver gets the origin. When `deliver` has returned, the answer is
        waited for and the version announced. base: the origin brings the changes since that version."""
        fill = Fill(
            ticket=engine.ticket(),
            slot=self._slots[engine],
            version=staged.version,
            fingerprint=engine.layout.fingerprint,
            origin=to_raw(origin, "the origin of a version"),
            base=base.version if base else None,
            checksum=staged.checksum,
        )
        self._fills[engine] = fill, engine.send(fill)

    def prepare(self, setups: Mapping[EngineLink, msgspec.Struct], meanwhile: Callable[[], None]) -> bool:
        """Hand each engine's receiver its setup and call `meanwhile`. Returns whether all of that worked; if not, the
        attempt is over for engines whose slots are not being filled."""
        answers = {e: e.send(Prepare(ticket=e.ticket(), setup=to_raw(setup, "a setup"))) for e, setup in setups.items()}
        worked = True
        try:
            meanwhile()
        except InflightError as error:
            self.refused |= dict.fromkeys(setups, error)
            worked = False
        ready = [self._try(e, partial(e.wait_for, answer, self.timeout_s)) for e, answer in answers.items()]
        return worked and all(ready)

    def holds(self, engine: EngineLink, base: StagedVersion | None) -> bool:
        """Return whether an engine was filled with this version last."""
        return base is not None and self._holds.get(engine) == base.version

    def changes(
        self, engines: Sequence[EngineLink], staged: StagedVersion, base: StagedVersion | None
    ) -> torch.Tensor | None:
        """Return a delta, u8[m], if deltas are wanted, all of these engines hold its base, and it saves something."""
        if not self._delta or base is None or not all(self.holds(engine, base) for engine in engines):
            return None
        return delta.encode(base.data, staged.data)

    def close(self) -> None:
        """Let the engines go."""
        for engine in self.engines:
            engine.detach()

    def add(self, engine: EngineLink) -> None:
        """Bring versions to another engine, too."""
        self.engines.append(engine)

    def send(self, staged: StagedVersion, base: StagedVersion | None) -> None:
        """Bring the version to every engine that lacks it; `lost`, `refused` and `sent_bytes` say what became of it."""
        self.lost, self.refused, self.sent_bytes = {}, {}, 0
        for _ in range(_ATTEMPTS):
            self._slots, self._fills = {}, {}
            for engine in self.engines:
                if engine not in self.lost and engine.version < staged.version:
                    self._try(engine, partial(self._acquire, engine))
            if self._slots:
                self._attempt(staged, base)
        if not self.refused_later:
            self.refused = {e: error for e, error in self.refused.items() if e.version < staged.version}

    def _acquire(self, engine: EngineLink) -> None:
        engine.check()
        self._slots[engine] = engine.acquire(self.timeout_s, "timeout_s of the transport")

    def _attempt(self, staged: StagedVersion, base: StagedVersion | None) -> None:
        try:
            self.deliver(self._slots, staged, base)
        except InflightError as error:
            self.refused |= {engine: error for engine in self._slots if engine not in self._fills}
        for engine, (fill, answer) in self._fills.items():
            if self._try(engine, partial(engine.wait_for, answer, self.timeout_s)):
                engine.announce(fill.slot, staged.record)
                self._holds[engine] = fill.version
            else:
                self._holds.pop(engine, None)  # so that the next attempt sends the whole
        for engine, slot in self._slots.items():
            if engine.version < staged.version:
                engine.give_back(slot)

    def _try(self, engine: EngineLink, action: Callable[[], object]) -> bool:
        """Note what an engine failed with, if it does. Returns whether it worked."""
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
    """The engine's side of a transport: it takes versions in a thread of the engine's process, while decoding goes on.

    One is made for each publisher that attaches. Nothing that it is told may be trusted: sizes, paths and versions are
    checked before memory is touched. What it raises is told to the publisher, best as an InflightError. A slot that it
    filled goes live only if its checksum is that of the trainer's.
    """

    origin: ClassVar[type[msgspec.Struct]]
    """The struct that `Sender.fill` is given."""
    setup: ClassVar[type[msgspec.Struct] | None] = None
    """The struct that `Sender.prepare` is given, if it is used."""

    def __init__(self, layout: WeightLayout, device: torch.device):
        self.layout, self.device = layout, device

    def prepare(self, setup: Any) -> None:
        """Get ready for versions: join a process group, for example."""
        raise ProtocolError(f"{type(self).__name__} needs no preparation")

    @abstractmethod
    def receive(self, origin: Any, version: int, slot: torch.Tensor) -> None:
        """Write a whole version to a slot, u8[total_bytes]; what is written is complete when this returns."""

    def receive_changes(self, origin: Any, version: int, base: int) -> torch.Tensor:
        """Return the changes since version `base`, u8[m], as `inflight.weights.delta` encodes them."""
        raise ProtocolError(f"{type(self).__name__} takes whole versions only, and not the changes since one")

    def close(self) -> None:  # noqa: B027
        """The publisher is gone, and nothing more will come."""


class Target(ABC):
    """Where a publisher writes versions: to the slots of its only engine, or to a staging buffer before its engines."""

    views: list[dict[str, torch.Tensor]]
    """The tensors of each slot."""
    sent_bytes: int
    """Bytes that engines were sent of the last version that all of them got."""
    sent_version: int = 0
    """The version that was announced or sent last."""
    lost: Mapping[str, Exception] = {}
    """Maps endpoints of engines that ended, or did not answer, to what happened."""

    @property
    @abstractmethod
    def engines(self) -> list[EngineLink]:
        """Engines that have not been lost."""

    @abstractmethod
    def add(self, attach: Callable[[], EngineLink], transport: Transport) -> EngineLink:
        """Send versions to another engine, too. Raises InflightError, before `attach` is called, if that cannot be."""

    @abstractmethod
    def acquire(self) -> int:
        """Return a slot to write to, once there is one. Raises what keeps engines from lending one."""

    @abstractmethod
    def announce(self, slot: int, record: Published) -> None:
        """The slot holds this version."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """What is in the slot is not announced."""

    def listen(self) -> None:  # noqa: B027
        """Hear what engines say while there is nothing to publish."""

    @abstractmethod
    def check(self) -> None:
        """Raise what keeps versions from reaching any engine, if something does."""

    @abstractmethod
    def close(self) -> None:
        """Send what was announced, and let the engines go."""
