"""Updates of weights and adapters that clients of a server request: one publisher, in one thread."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from inflight.core.errors import EngineBusyError, EngineHungError, WeightFileError
from inflight.server.engine import ServedEngine
from inflight.training.schedules import LIVE_S
from inflight.weights.trainer.adapter_files import AdapterFiles
from inflight.weights.trainer.publisher import Publisher
from inflight.weights.trainer.state_dict_source import Weights

logger = logging.getLogger("inflight.server")

Value = TypeVar("Value")
_MOST_LABELS = 1000


class Updates:
    """Publishes for a server. An update returns when its version is live. The version becomes live between two forward
    passes of the running engine."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inflight-server-weights")
        self._publisher: Publisher | None = None
        self._kind = ""
        self.labels: dict[int, str] = {}
        """Maps versions to the names that clients gave them. A version without a name has its number."""
        self.files = AdapterFiles(engine)
        """All adapters that are loaded: they are published together."""

    async def publish_directory(self, directory: str, label: str | None = None) -> int:
        """Publish a checkpoint as a version with this name. Raises WeightFileError or LayoutMismatchError; then the
        weights stay as they are."""
        if not Path(directory).is_absolute():
            raise WeightFileError(f"{directory[:300]} is no absolute path; the server reads weights from its own disk")

        def publish() -> int:
            try:
                return self.publish("weights", directory, label=label)
            except TimeoutError:  # an OSError, too
                raise
            except OSError as error:
                raise WeightFileError(f"{directory[:300]} cannot be read: {error}"[:1000]) from error

        return await self.run(publish)

    async def publish_adapters(self, change: Callable[[AdapterFiles], object], label: str | None = None) -> int:
        """Publish the adapters after a change. If it raises, they stay as they were."""

        def publish() -> int:
            self._publisher_of("adapters")  # It sets the layout that the files have to fit.
            before = dict(self.files.tensors)
            try:
                change(self.files)
                return self.publish("adapters", label=label)
            except BaseException:
                self.files.tensors = before
                raise

        return await self.run(publish)

    async def run(self, function: Callable[[], Value]) -> Value:
        """Call it in the thread of the publisher. A client that leaves does not stop it."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function))

    def publish(self, kind: str, *weights: Weights, label: str | None = None) -> int:
        """Publish weights, or the adapters, and return when they are live. It is called in the thread of the publisher.

        The version has its name before it is live, so that each reply has its tokens under that name. A refused version
        loses its name, since another version will have its number."""
        publisher = self._publisher_of(kind)
        version = publisher.version + 1
        self.label(version, label)
        try:
            published = publisher.publish(*weights)
            if kind == "adapters":
                publisher.wait_copied()
            self._engine.wait_for_version(published, timeout_s=LIVE_S)
        except TimeoutError:  # It becomes live later, under this name.
            self._note_base(kind, weights)
            raise
        except BaseException:
            if publisher.version < version or self._engine.status().version < version:
                self.labels.pop(version, None)
            raise
        self._note_base(kind, weights)
        return published

    def _note_base(self, kind: str, weights: tuple[Weights, ...]) -> None:
        """Note the checkpoint of the last weights, with which bases of adapters are compared."""
        if kind != "adapters":
            self.files.note_weights(weights[0] if isinstance(weights[0], str) else "")

    def label(self, version: int, name: str | None) -> None:
        """Name a version. None: it has its number."""
        if name is None:
            self.labels.pop(version, None)
        else:
            self.labels[version] = name
        while len(self.labels) > _MOST_LABELS:
            del self.labels[min(self.labels)]

    def label_next(self, name: str | None) -> None:
        """Name the version whose weights `publish` is reading."""
        assert self._publisher is not None
        self.label(self._publisher.version + 1, name)

    def release(self) -> None:
        """Close the publisher after the updates in progress, so that a sleeping engine frees the slot that it writes
        to. The next update makes another publisher."""
        self._thread.submit(self._close_publisher)

    def close(self) -> None:
        """Close the publisher. Safe to call twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._close_publisher()

    def _publisher_of(self, kind: str) -> Publisher:
        """Return the publisher. An engine has one publisher, of weights or of adapters. Raises the error of its last
        publish, except an engine's silence: that ended the publisher, and another one replaces it."""
        if self._publisher is not None and (self._kind != kind or self._publisher.closed):
            self._close_publisher()
        if self._publisher is not None:
            try:
                self._publisher.check()
            except (EngineHungError, EngineBusyError) as error:
                logger.warning("another publisher replaces one that ended: %s", error)
                self._close_publisher()
        if self._publisher is None:
            self._publisher = self._engine.publisher(self.files if kind == "adapters" else None, check_finite=True)
            self._kind = kind
        return self._publisher

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
