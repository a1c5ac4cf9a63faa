"""Actor on the node of an engine: it launches the engine there, reports its end, and ends with it."""

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
from inflight.engine.process.directory import make_directory
from inflight.fleet.process.local import LocalProcess

_CHECK_S = 0.1


@dataclass(frozen=True)
class Launched:
    """Address of an engine for other nodes."""

    endpoint: str
    key: bytes
    """Its public key."""
    pid: int


class EngineHost:
    """Launches one engine. The engine's process always ends with the actor's process. Ray runs its methods in
    threads."""

    def address(self) -> str:
        """Return the address of the node, as other nodes reach it."""
        return ray.util.get_node_ip_address()

    def launch(self, options: EngineOptions, client: bytes) -> Launched:
        """Start an engine that listens on the node's address and accepts only the holder of this public key. The
        engine's secret key never leaves the node. Raises the errors of `inflight.launch`."""
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
        """Return the message about the end of the engine's process when it has ended, and remove its files and
        memory."""
        while True:
            try:
                self._launcher.check()
            except EngineDiedError as death:
                self._launcher.close()
                return str(death)
            sleep(_CHECK_S)

    def end(self, how: Literal["kill", "remove", "close"]) -> None:
        """End the engine's process by this method of its launcher. Then `wait` returns."""
        getattr(self._launcher, how)()
