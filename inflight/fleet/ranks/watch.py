"""Watches the processes of the ranks that share one engine."""

import logging
import os
import platform
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import RankLostError
from inflight.core.waiting import Wait
from inflight.fleet.ranks.store import RankStore

logger = logging.getLogger("inflight.ranks")

_BEAT_S = 1.0
"""Interval of the signs of life, and of looks for the signs of ranks on other machines."""
_GONE_S = 30.0
"""Time without a sign of life after which a rank on another machine counts as ended."""
_OTHERS_PAUSE_S = 0.2
_LEAVE_S = 5.0


class RankProcess(msgspec.Struct, frozen=True):
    """The process of a rank."""

    pid: int
    host: str
    """Identifies the machine until it restarts, and the container that numbers the processes."""


class Peer:
    """The process of another rank. The kernel reports its end if it runs here. If the kernel does not, or if it runs
    elsewhere, its signs of life stop."""

    def __init__(self, store: RankStore, rank: int, process: RankProcess):
        self.is_here = process.host == this_host()
        self.name = f"process {process.pid}" + ("" if self.is_here else " of another machine")
        self._store, self._rank, self._beat, self._silent = store, rank, -1, Wait()
        self._file: int | None = None
        self._poll = select.poll()
        if self.is_here:
            try:
                self._file = os.pidfd_open(process.pid)
                self._poll.register(self._file, select.POLLIN)
            except ProcessLookupError:
                pass  # it has ended
            except OSError as error:  # no file is left, or the system forbids it
                logger.warning("signs of life decide if %s has ended: %s", self.name, error)
                self.is_here = False

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        if self.is_here:
            return self._file is None or bool(self._poll.poll(0))
        self._silent.tick()
        if (beat := self._store.count(f"beat/{self._rank}")) != self._beat:
            self._beat, self._silent = beat, Wait()
        return self._silent.waited_s > _GONE_S

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RankWatch:
    """A thread that sends signs of life of this rank, and notices ranks that end or leave. Rank 0 watches all other
    ranks, and they watch rank 0.

    Once a rank is lost, `check` raises the same RankLostError on all ranks.
    """

    def __init__(self, store: RankStore, on_event: Callable[[], None]):
        """on_event: called after another rank has announced something."""
        self.left: set[int] = set()
        """Ranks that have closed their engine."""
        self.peers: dict[int, Peer] = {}
        """Ranks that have attached."""
        self._store, self._on_event = store, on_event
        self._watched = range(1, store.size) if store.rank == 0 else range(1)
        self._lost: RankLostError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-ranks", daemon=True)
        store.set(f"here/{store.rank}", msgspec.msgpack.encode(RankProcess(os.getpid(), this_host())))
        self.announce()
        self._thread.start()

    def announce(self) -> None:
        """Have the other ranks look at the values that this rank has set."""
        self._store.count("events", 1)

    def check(self) -> None:
        """Raise RankLostError if a rank is known to be lost."""
        if self._lost is not None:
            raise self._lost

    def lose(self, error: RankLostError) -> None:
        """Raise this error on all ranks from now on."""
        if self._lost is None:
            self._lost = error
            self._store.set("lost", str(error).encode())
            self.announce()

    def close(self) -> None:
        """Announce that this rank leaves, and stop watching. Safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():  # The store does not answer. The others notice by themselves.
            self._store.close()
            return
        with suppress(RankLostError):
            self._store.set(f"left/{self._store.rank}", b"left")
            self.announce()
        self._store.close()
        for peer in self.peers.values():
            peer.close()

    def _run(self) -> None:
        num_events, since_beat = 0, Wait()
        pause_s = self._store.pause_s if self._store.rank == 0 else _OTHERS_PAUSE_S
        try:
            while not self._closing.wait(pause_s):
                if (now := self._store.count("events")) != num_events:
                    num_events = now
                    self._look()
                since_beat.tick()
                beats = since_beat.waited_s > _BEAT_S
                if beats:
                    since_beat = Wait()
                    self._store.count(f"beat/{self._store.rank}", 1)
                for rank in self.peers.keys() - self.left:
                    if (beats or self.peers[rank].is_here) and self.peers[rank].ended:
                        self._end(rank)
        except RankLostError as error:
            self._lost = self._lost or error
        except Exception as error:
            logger.exception("the ranks are not watched any more")
            with suppress(RankLostError):
                self.lose(RankLostError(f"the ranks are not watched any more: {error!r}"))

    def _look(self) -> None:
        """Read the announcements of the watched ranks."""
        for rank in self._watched:
            if rank not in self.peers and (data := self._store.get(f"here/{rank}")) is not None:
                self.peers[rank] = Peer(self._store, rank, msgpack_decoder(RankProcess).decode(data))
            if self._store.has(f"left/{rank}"):
                self.left.add(rank)
        if self._lost is None and (lost := self._store.get("lost")) is not None:
            self._lost = _logged(RankLostError(lost.decode(errors="replace")))
        if self._lost is None and 0 in self.left:
            self._lost = RankLostError("rank 0 has closed its engine")
        self._on_event()

    def _end(self, rank: int) -> None:
        if self._store.has(f"left/{rank}"):  # It left after this pass had read the announcements.
            self._look()
            return
        name = self.peers[rank].name
        if rank == 0:
            self._lost = self._lost or _logged(RankLostError(f"rank 0 ({name}), which holds the engine, has ended"))
        else:
            self.lose(_logged(RankLostError(f"rank {rank} ({name}) has ended")))
        self.left.add(rank)


def _logged(error: RankLostError) -> RankLostError:
    """Log an error at once. The training thread might raise it much later: calls over NCCL do not end with a rank."""
    logger.error("%s", error)
    return error


def this_host() -> str:
    """Return a name that is equal for processes that see each other's process ids. Where a sandbox hides it, the name
    is equal to no other, and signs of life decide."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{platform.node()} {os.getpid()}"
