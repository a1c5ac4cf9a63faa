"""A connection to an engine that another process launched, perhaps on another machine."""

import threading
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from inflight.core.errors import EngineHungError
from inflight.core.keys import ClientKeys
from inflight.core.messages import check_same_version
from inflight.core.options import EngineOptions
from inflight.engine.process.client import EngineClient
from inflight.fleet.process.base import Placement, Process


class RemoteProcess(Process):
    """Connection to an engine that another process launched. Closing it does not stop the engine.

    Raises KeysError, VersionMismatchError, or EngineHungError if the engine does not answer; an engine does not answer
    clients with wrong keys.
    """

    def __init__(self, endpoint: str, *, keys: ClientKeys, timeout_s: float, answer_timeout_s: float):
        """endpoint: address at which the engine listens. timeout_s: bound for the first answer. It arrives when the
        engine has loaded its model."""
        if not endpoint.startswith("tcp://"):
            raise ValueError(f'an engine of another process is reached at "tcp://HOST:PORT", got {endpoint!r}')
        self.client = EngineClient(endpoint, check_engine=self.check, answer_timeout_s=answer_timeout_s, keys=keys)
        try:
            welcome = self.client.hello(timeout_s=timeout_s)
            check_same_version(welcome.version, welcome.protocol, welcome.package, who="the engine")
        except EngineHungError as error:
            self.client.close()
            raise EngineHungError(
                f"nothing at {endpoint} answered within {timeout_s:g} s. There is no engine, or it is still loading "
                f"its model, or the keys are wrong: the client's engine.key must be that of the engine, and the "
                "engine's directory must hold the client.key"
            ) from error
        except BaseException:
            self.client.close()
            raise
        stream_endpoint = f"{endpoint.rpartition(':')[0]}:{welcome.tcp_stream_port}"
        self.welcome = msgspec.structs.replace(welcome, stream_endpoint=stream_endpoint)


@dataclass(frozen=True)
class Remote(Placement):
    """Engines that another process launched with `listen`."""

    first_frame: ClassVar[int | None] = None
    endpoint: str
    keys: ClientKeys
    timeout_s: float

    def start(self, options: EngineOptions, closing: threading.Event) -> RemoteProcess:
        """Connect to the engine."""
        timeout_s = options.answer_timeout_s
        return RemoteProcess(self.endpoint, keys=self.keys, timeout_s=self.timeout_s, answer_timeout_s=timeout_s)
