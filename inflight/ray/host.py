"""What runs on the node of an engine: an actor that launches it there, tells of its end, and ends with it."""

import os
import shutil
from dataclasses import dataclass
from time import sleep
from typing import Literal

import msgspec
import ray.util

from inflight.core.errors import EngineDiedError
from inflight.core.keys import make_engine_keys
from inflight.core.options import EngineOptions
from inflight.engine.directory import make_directory
from inflight.fleet.process.local import LocalProcess

_CHECK_S = 0.1


@dataclass(frozen=True)
class Launched:
    """How an engine is reached from other nodes."""

    endpoint: str
    key: bytes
    """Its public key."""
    pid: int


class EngineHost:
    """Launches one engine, whose process ends with the actor's, however that ends. Ray runs its methods in threads."""

    def address(self) -> str:
        """That of the node, as the others reach it."""
        return ray.util.get_node_ip_address()

    def launch(self, options: EngineOptions, client: bytes) -> Launched:
        """Start an engine that listens on the node's address and lets in the holder of this public key alone. The
        engine's secret key never leaves the node. Raises what `inflight.launch` raises."""
        directory, lock = make_directory()  # a later launch removes it if this one is killed
        try:
            key = make_engine_keys(directory / "keys", client)
            address = self.address()
            listen = f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*"
            self._launcher = LocalProcess(msgspec.structs.replace(options, listen=listen, keys=str(directory / "keys")))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
        return Launched(self._launcher.welcome.tcp_endpoint, key, self._launcher.pid)

    def wait(self) -> str:
        """Return when the engine's process has ended, with what is known of its end, and leave nothing of it."""
        while True:
            try:
                self._launcher.check()
            except EngineDiedError as death:
                self._launcher.close()
                return str(death)
            sleep(_CHECK_S)

    def end(self, how: Literal["kill", "remove", "close"]) -> None:
        """End the engine's process by this method of its launcher; `wait` returns then."""
        getattr(self._launcher, how)()
