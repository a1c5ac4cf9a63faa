"""Weights and adapters that clients of a server have published: one publisher, in one thread."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from inflight.core.errors import WeightFileError
from inflight.server.engine import ServedEngine
from inflight.weights.adapter_files import AdapterFiles
from inflight.weights.publisher import Publisher

Value = TypeVar("Value")
Pairs = Iterator[tuple[str, torch.Tensor]]
PublishPairs = Callable[[Callable[[Pairs], int]], int]
_MOST_LABELS = 1000


class Updates:
    """Publishes for a server. An update returns once its version is live: the engine goes on meanwhile, and the version
    goes live between two forward passes."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inflight-server-weights")
        self._publisher: Publisher | None = None
        self._kind = ""
        self.labels: dict[int, str] = {}
        """What clients call versions, where they have a name for them."""
        self.staged: list[str] | None = None
        """Directories that an update has named which was begun and not finished; None: there is no such update."""
        self.files = AdapterFiles()
        """All adapters that are loaded: they are published together."""

    async def publish_directory(self, directory: str, label: str | None = None) -> int:
        """Publish a checkpoint, as a version of this name. Raises WeightFileError or LayoutMismatchError, which leave
        the weights as they are."""
        return await self._run(lambda: self._publish(directory, label))

    async def publish_tensors(self, publish: PublishPairs, label: Callable[[], str | None]) -> int:
        """Publish tensors that come one after another. publish: calls what it is given with an iterator of names and
        tensors, in the thread of the publisher. label: the version's name, asked for once all have come."""
        return await self._run(lambda: publish(lambda pairs: self._publish_pairs(pairs, label)))

    async def publish_zeros(self) -> int:
        """Publish a version whose tensors are all 0."""
        return await self._run(self._publish_zeros)

    async def publish_adapters(self, change: Callable[[AdapterFiles], object], label: str | None = None) -> int:
        """Publish the adapters as they are after a change, or as they were if it raises."""
        return await self._run(lambda: self._publish_adapters(change, label))

    def name_of(self, version: int) -> str:
        """What clients call a version."""
        return self.labels.get(version, str(version))

    def label(self, version: int, label: str) -> None:
        """Call a version by this name from now on."""
        self.labels[version] = label
        while len(self.labels) > _MOST_LABELS:
            del self.labels[min(self.labels)]

    def close(self) -> None:
        """Let the engine go. Safe to call twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._close_publisher()

    async def _run(self, function: Callable[[], Value]) -> Value:
        """Call it in the thread of the publisher; a client that goes away does not stop it."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function))

    def _publish(self, directory: str, label: str | None) -> int:
        if not Path(directory).is_absolute():
            raise WeightFileError(f"{directory[:300]} is no absolute path; the server reads weights from its own disk")
        publisher = self._publisher_of("weights")
        with self._labelled(publisher, label):
            return self._live(publisher.publish(directory))

    def _publish_pairs(self, pairs: Pairs, label: Callable[[], str | None]) -> int:
        publisher = self._publisher_of("weights")
        with ExitStack() as named:

            def all_pairs() -> Pairs:
                yield from pairs
                named.enter_context(self._labelled(publisher, label()))

            return self._live(publisher.publish(all_pairs()))

    def _publish_zeros(self) -> int:
        publisher = self._publisher_of("weights")
        tensors = self._engine.info.layout.tensors
        zeros = ((spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in tensors)
        with self._labelled(publisher, None):
            return self._live(publisher.publish(zeros))

    def _publish_adapters(self, change: Callable[[AdapterFiles], object], label: str | None) -> int:
        publisher = self._publisher_of("adapters")
        before = self.files.copy()
        try:
            change(self.files)
            with self._labelled(publisher, label):
                version = publisher.publish()
                publisher.wait_copied()
                return self._live(version)
        except BaseException:
            self.files.restore(before)
            raise

    @contextmanager
    def _labelled(self, publisher: Publisher, label: str | None) -> Iterator[None]:
        """Name the next version before it goes live, so that no answer has its tokens under another name. One that is
        refused loses its name, since another one will have its number."""
        version = publisher.version + 1
        if label is None:
            self.labels.pop(version, None)
        else:
            self.label(version, label)
        try:
            yield
        except TimeoutError:  # it goes live later, under this name
            raise
        except BaseException:
            if publisher.version < version or self._engine.status().version < version:
                self.labels.pop(version, None)
            raise

    def _live(self, version: int) -> int:
        self._engine.wait_for_version(version)
        return version

    def _publisher_of(self, kind: str) -> Publisher:
        """An engine has one publisher, of weights or of adapters."""
        if self._publisher is not None and (self._kind != kind or self._publisher.closed):
            self._close_publisher()
        if self._publisher is None:
            self._publisher = self._engine.publisher(self.files if kind == "adapters" else None, check_finite=True)
            self._kind = kind
        return self._publisher

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
