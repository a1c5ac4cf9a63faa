"""Stand-ins for engines that publishers attach to: they note what is said, and lend slots as a test has them do."""

import threading
from types import SimpleNamespace

import torch

import inflight
from inflight.core.errors import EngineBusyError, InflightError
from inflight.weights.tensors import layout_of
from inflight.weights.trainer.engine_link import EngineAddress, LoneEngine, PublishedVersion


class Returning(LoneEngine):
    """An engine that ends and comes back, at these endpoints one after another."""

    comes_back = True

    def __init__(self, *endpoints: str):
        super().__init__(endpoints[0])
        self.killed: list[str] = []
        self.followers: list[inflight.Publisher] = []
        self._endpoints = list(endpoints)

    def serving(self) -> list[EngineAddress]:
        return [EngineAddress(self._endpoints.pop(0), self)]

    def follow(self, publisher: inflight.Publisher) -> None:
        self.followers.append(publisher)

    def unfollow(self, kind: str, sent_version: int) -> None:
        self.followers.pop()

    def kill(self, endpoint: str) -> None:
        self.killed.append(endpoint)


class StandIn:
    """An engine that lends `num_slots` slots and keeps those that it is given until `give_back` is called."""

    def __init__(self, model: torch.nn.Module, num_slots: int = 2):
        self.layout, self.version = layout_of(model), 0
        self.buffers = [torch.zeros(self.layout.total_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self.address = EngineAddress("stand-in", LoneEngine("stand-in"))
        self.attached = SimpleNamespace(aliases=[])
        self.matches = None
        self.messages = SimpleNamespace(give_up=self.give_up)
        self.lock = SimpleNamespace(unlock=lambda: None)
        self.welcome = SimpleNamespace(num_slots=num_slots, layout=self.layout, engine_id=str(id(self)))
        self.announced: list[PublishedVersion] = []
        self.wants: list[str] = []
        self.ended = False
        self.refuses: list[Exception] = []
        self.given_up = False
        self.free = list(range(num_slots))
        self._condition = threading.Condition()

    def acquire(self, timeout_s: float, setting: str) -> int:
        self.wants.append(f"{timeout_s:g} s, {setting}")
        with self._condition:
            if self.refuses:
                raise self.refuses.pop()
            if not self._condition.wait_for(lambda: self.free or self.given_up, min(timeout_s, 10)):
                raise EngineBusyError("it lends none")
            if self.given_up:
                raise InflightError("the publisher was closed")
            return self.free.pop()

    def give_up(self) -> None:
        with self._condition:
            self.given_up = True
            self._condition.notify_all()

    def announce(self, slot: int, record: PublishedVersion, checksum: int | None = None) -> None:
        with self._condition:
            self.announced.append(record)
            self.version = record.version
            self._condition.notify_all()

    def lends(self) -> bool:
        with self._condition:
            return bool(self.free)

    def map_slots(self) -> list[torch.Tensor]:
        return list(self.buffers)

    def give_back(self, slot: int) -> None:
        with self._condition:
            self.free.append(slot)
            self._condition.notify_all()

    def wait_for(self, version: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.version == version, 10)

    def listen(self) -> None:
        pass

    check = release = listen

    def detach(self) -> None:
        self.ended = True
