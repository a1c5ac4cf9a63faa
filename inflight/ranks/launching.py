"""Announces rank 0's engine to the other ranks of a trainer, by the store of their process group."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import zmq

from inflight.core.decoders import json_decoder
from inflight.core.errors import InvalidRequestError, RankLostError, from_wire
from inflight.core.options import EngineOptions
from inflight.core.waiting import Wait
from inflight.ranks.meeting import Outside, RankAddress

if TYPE_CHECKING:
    from inflight.ranks.attached import AttachedEngine

logger = logging.getLogger("inflight.ranks")

_CHECK_S = 0.1


class Closable(Protocol):
    """An engine, or several."""

    def close(self) -> None: ...


Launched = TypeVar("Launched", bound=Closable)


class _Refusal(msgspec.Struct, frozen=True):
    """Rank 0 could not launch the engine."""

    kind: str
    message: str


class TrainerRanks:
    """The default process group of torch.distributed. Ranks exchange the addresses of engines over its store."""

    _num_launches = 0

    def __init__(self, rank: int, size: int, store: Any):
        self.rank, self.size, self._store = rank, size, store
        self._keys: dict[str, bytes] = {}
        """Maps names in the store to the public keys of ranks, each as it was first read."""

    @classmethod
    def of_this_process(cls) -> "TrainerRanks | None":
        """Return the ranks of this process; None if it trains alone, or has not made a process group."""
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            if dist.get_world_size() == 1:
                return None
            store = dist.distributed_c10d._get_default_store()  # pyright: ignore
            return cls(dist.get_rank(), dist.get_world_size(), store)
        if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning(
                "launch() was called under torchrun before torch.distributed.init_process_group(): each rank starts an "
                "engine of its own"
            )
        return None

    def announce(
        self, start: Callable[[], Launched], address_of: Callable[[Launched, Outside | None], RankAddress]
    ) -> Launched:
        """Start an engine on rank 0, and announce its address to the other ranks. They can join later. If this fails,
        announce the error and close the engine. address_of: also receives the ranks on other machines, if there are
        any."""
        key, started = self._next_key(), None
        try:
            started = start()
            self._store.set(key, msgspec.json.encode(address_of(started, self._outside(key))))
            return started
        except BaseException as error:
            kind = type(error).__name__
            refusal = _Refusal(kind, str(error) or f"rank 0 was ended by {kind}")
            with suppress(RuntimeError):  # the store has ended, and the others notice that when they use it
                self._store.set(key, msgspec.json.encode(refusal))
            if started is not None:
                started.close()
            raise

    def attach(self, options: EngineOptions) -> "AttachedEngine":
        """Wait on another rank for rank 0's launch, and attach to its engine. Raises the error of that launch."""
        from inflight.ranks.attached import AttachedEngine

        key, wait = self._next_key(), Wait()
        bound_s = options.timeout_s + options.rank_timeout_s
        public, secret = zmq.curve_keypair()
        try:
            self._store.set(_name_of_key(key, self.rank), public)
            while not self._store.check([key]):
                sleep(_CHECK_S)
                wait.tick()
                wait.tell("rank 0 launches the engine")
                if wait.waited_s > bound_s:
                    raise RankLostError(
                        f"rank 0 has launched no engine within {bound_s:g} s; every rank calls launch() as often, in "
                        "the same order"
                    )
            data = self._store.get(key)
        except RuntimeError as error:  # the store is rank 0's
            raise RankLostError(f"rank 0 cannot be reached: {error}") from error
        with suppress(msgspec.ValidationError):
            refusal = json_decoder(_Refusal).decode(data)
            raise from_wire(refusal.kind, refusal.message)
        address = json_decoder(RankAddress).decode(data)
        if address.options.model != options.model:
            raise InvalidRequestError(
                f"rank {self.rank} launches {options.model!r} where rank 0 launched {address.options.model!r}; "
                "every rank calls launch() in the same order"
            )
        return AttachedEngine(address, self.rank, (public, secret))

    def _outside(self, key: str) -> Outside | None:
        """Return the ranks on other machines, if LOCAL_WORLD_SIZE shows that there are some and MASTER_ADDR is set."""
        if int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) >= self.size or "MASTER_ADDR" not in os.environ:
            return None
        # Admission uses a clone of the store: another thread might hold the store's lock, waiting for a collective.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        return Outside(os.environ["MASTER_ADDR"], partial(self._lets_in, store, key))

    def _lets_in(self, store: Any, key: str, public: bytes) -> bool:
        """Return True if a rank that attaches to this launch has this public key. The rank stores its key before it
        connects, and later changes in the store have no effect."""
        names = [_name_of_key(key, rank) for rank in range(1, self.size)]
        try:
            for name in names:
                if name not in self._keys and store.check([name]):
                    self._keys[name] = store.get(name)
            return any(self._keys.get(name) == public for name in names)
        except RuntimeError as error:
            logger.warning("the store of the process group cannot be asked for the keys of ranks: %s", error)
            return False

    @classmethod
    def _next_key(cls) -> str:
        cls._num_launches += 1
        return f"inflight/engine/{cls._num_launches}"


def _name_of_key(launch: str, rank: int) -> str:
    """Return the name of a rank's public key in the store."""
    return f"{launch}/key-of-rank-{rank}"
