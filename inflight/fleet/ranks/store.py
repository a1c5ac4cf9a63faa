"""Messages between the ranks that share one engine, over the store of their process group."""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from time import sleep
from typing import Any

import torch.distributed as dist

from inflight.core.errors import ProtocolError, RankLostError
from inflight.core.waiting import Wait

logger = logging.getLogger("inflight.ranks")

_PART_BYTES = 4 << 20
"""Maximum size of one value: PyTorch's TCPStore refuses 8 MiB."""
_FIRST_PAUSE_S = 0.001
_PAUSE_S = 0.02
_RANKS_PER_PAUSE = 16
_LAUNCHES = count(1)
Tasks = SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None]
"""Calls of the store: the future of the answer, the method and its arguments. None: the last call."""


class RankStore:
    """Values that the ranks of one launch exchange. Methods other than `wait` wait only for answers of the store.

    A key has one writer. Raises RankLostError if the store cannot be reached: rank 0, or the process that hosts the
    store, has ended or does not answer.
    """

    def __init__(self, rank: int, size: int, store: Any, launch: int, timeout_s: float = 60.0):
        """store: the store of the process group. launch: number of the launch, equal on all ranks. timeout_s: bound for
        each answer of the store."""
        self.rank, self.size = rank, size
        self.pause_s = _PAUSE_S * max(1.0, size / _RANKS_PER_PAUSE)
        """Interval between two looks at a value. It keeps the number of looks of all ranks bounded."""
        self._timeout_s = timeout_s
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._tasks: Tasks = SimpleQueue()
        # Calls of the store have no bound, and cannot be interrupted.
        arguments = self._tasks, store, f"inflight/engine/{launch}"
        threading.Thread(target=_work, args=arguments, name="inflight-store", daemon=True).start()

    def set(self, name: str, value: bytes) -> None:
        """Set a value of at most 4 MiB."""
        self._call("set", name, value)

    def has(self, name: str) -> bool:
        """Return True if a rank has set this value."""
        return bool(self._call("check", [name]))

    def get(self, name: str) -> bytes | None:
        """Return a value, or None if no rank has set it."""
        return self._call("get", name) if self.has(name) else None

    def count(self, name: str, more: int = 0) -> int:
        """Add to a counter of all ranks. Returns its value."""
        return self._call("add", name, more) if more else int(self.get(name) or b"0")

    def delete(self, name: str, size: int = 0) -> None:
        """Delete a value, and its parts if it was `put` with this size."""
        for part in (*_parts(name, size), name):
            self._call("delete_key", part)

    def put(self, name: str, data: bytes) -> None:
        """Set a value of any size for one `take`."""
        begins = range(0, len(data), _PART_BYTES)
        for begin in begins:
            self.set(f"{name}/{begin}", data[begin : begin + _PART_BYTES])
        self.set(name, str(len(data)).encode())

    def take(self, name: str) -> bytes:
        """Return a value that a rank has `put`, and delete it. Raises ProtocolError if a part is missing."""
        data = self.read(name)
        self.delete(name, len(data))
        return data

    def read(self, name: str) -> bytes:
        """Return a value that a rank has `put`. Raises ProtocolError if a part is missing."""
        size = int(self.get(name) or b"0")
        data = b"".join(self.get(part) or b"" for part in _parts(name, size))
        if len(data) != size:
            raise ProtocolError(f"the store of the process group has {len(data)} of {size} bytes of {name}")
        return data

    def wait(
        self,
        is_over: Callable[[], bool],
        bound_s: float,
        *,
        what: Callable[[], str],
        late: Callable[[], str],
        check: Callable[[], None] = lambda: None,
        is_bounded: Callable[[], bool] = lambda: True,
    ) -> None:
        """Return when `is_over` returns True. Raises RankLostError with the text of `late` after `bound_s` seconds, and
        the errors of `check`. what: the awaited event, for the log. is_bounded: returns False while the time does not
        count."""
        waited, counted_s, pause_s = Wait(), 0.0, _FIRST_PAUSE_S
        while not is_over():
            check()
            sleep(pause_s)
            pause_s = min(2 * pause_s, self.pause_s)
            passed_s = waited.tick(what())
            counted_s = counted_s + passed_s if is_bounded() else 0.0
            if counted_s > bound_s and not is_over():  # It can be over since the pause.
                raise RankLostError(late())

    def close(self) -> None:
        """End the connection. Later calls raise RankLostError. Safe to call twice."""
        with self._lock:
            self._failure = self._failure or "the engine was closed"
            self._tasks.put(None)

    def _call(self, method: str, *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        with self._lock:  # so that no task follows the end
            if is_open := self._failure is None:
                self._tasks.put((answer, method, arguments))
        if is_open:
            try:
                return answer.result(self._timeout_s)
            except TimeoutError:
                self._failure = f"the store of the process group did not answer within {self._timeout_s:g} s"
            except RuntimeError as error:
                self._failure = str(error)
        raise RankLostError(f"rank 0 cannot be reached: {self._failure}")


def _work(tasks: Tasks, opened: Any, prefix: str) -> None:
    """Call methods of the store, one after another."""
    store = None
    while (task := tasks.get()) is not None:
        answer, method, arguments = task
        try:
            if store is None:
                store = dist.PrefixStore(prefix, _own(opened))
            answer.set_result(getattr(store, method)(*arguments))
        except Exception as error:
            answer.set_exception(error)


def _parts(name: str, size: int) -> list[str]:
    return [f"{name}/{begin}" for begin in range(0, size, _PART_BYTES)]


def store_of_trainer(timeout_s: float) -> RankStore | None:
    """Return the store for the next launch; None if this process trains alone, or has not made a process group."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return None
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore
        return RankStore(dist.get_rank(), dist.get_world_size(), store, next(_LAUNCHES), timeout_s)
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        logger.warning(
            "launch() was called under torchrun before torch.distributed.init_process_group(): each rank starts a "
            "separate engine"
        )
    return None


def _own(store: Any) -> Any:
    """Return a store with a separate connection: another thread might use the given one, waiting for a collective."""
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    return store.clone() if isinstance(inner, dist.TCPStore) else store
