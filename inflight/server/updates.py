"""Weights and adapters that clients of a server have published: one publisher, in one thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from inflight.core.errors import WeightFileError
from inflight.server.engine import ServedEngine
from inflight.weights.trainer.adapter_files import AdapterFiles
from inflight.weights.trainer.publisher import Publisher
from inflight.weights.trainer.state_dict_source import Weights

Value = TypeVar("Value")
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
        self.files = AdapterFiles(lambda: engine.options.model, lambda: engine.digests())
        """All adapters that are loaded: they are published together."""

    async def publish_directory(self, directory: str, label: str | None = None) -> int:
        """Publish a checkpoint, as a version of this name. Raises WeightFileError or LayoutMismatchError, which leave
        the weights as they are."""
        if not Path(directory).is_absolute():
            raise WeightFileError(f"{directory[:300]} is no absolute path; the server reads weights from its own disk")
        return await self.run(lambda: self.publish("weights", directory, label=label))

    async def publish_zeros(self) -> int:
        """Publish a version whose tensors are all 0."""
        tensors = self._engine.info.layout.tensors
        zeros = ((spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in tensors)
        return await self.run(lambda: self.publish("weights", zeros))

    async def publish_adapters(self, change: Callable[[AdapterFiles], object], label: str | None = None) -> int:
        """Publish the adapters as they are after a change, or as they were if it raises."""
        return await self.run(lambda: self._publish_adapters(change, label))

    async def run(self, function: Callable[[], Value]) -> Value:
        """Call it in the thread of the publisher; a client that goes away does not stop it."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function))

    def publish(self, kind: str, *weights: Weights, label: str | None = None) -> int:
        """Publish weights, or the adapters, and return when they are live. It is called in the thread of the publisher.

        The version is named before it goes live, so that no answer has its tokens under another name. One that is
        refused loses its name, since another one will have its number."""
        publisher = self._publisher_of(kind)
        version = publisher.version + 1
        self.label(version, label)
        try:
            published = publisher.publish(*weights)
            if kind == "adapters":
                publisher.wait_copied()
            else:
                self.files.known_bases.clear()
            self._engine.wait_for_version(published)
        except TimeoutError:  # it goes live later, under this name
            raise
        except BaseException:
            if publisher.version < version or self._engine.status().version < version:
                self.labels.pop(version, None)
            raise
        return published

    def name_of(self, version: int) -> str:
        """What clients call a version."""
        return self.labels.get(version, str(version))

    def label(self, version: int, label: str | None) -> None:
        """Call a version by this name from now on; None: by its number."""
        if label is None:
            self.labels.pop(version, None)
        else:
            self.labels[version] = label
        while len(self.labels) > _MOST_LABELS:
            del self.labels[min(self.labels)]

    def label_next(self, label: str | None) -> None:
        """Name the version whose weights `publish` is taking."""
        assert self._publisher is not None
        self.label(self._publisher.version + 1, label)

    def close(self) -> None:
        """Let the engine go. Safe to call twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._close_publisher()

    def _publish_adapters(self, change: Callable[[AdapterFiles], object], label: str | None) -> int:
        self._publisher_of("adapters")  # which tells the files what fits the engine
        before = dict(self.files.tensors)
        try:
            change(self.files)
            return self.publish("adapters", label=label)
        except BaseException:
            self.files.tensors = before
            raise

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
