"""A connection to an engine that another process launched, on another machine perhaps."""

import msgspec

from inflight.core.errors import EngineHungError
from inflight.core.keys import ClientKeys
from inflight.core.messages import Welcome, check_same_version
from inflight.engine.client import EngineClient


class EngineAttachment:
    """What an EngineLauncher is to the process that launched the engine; the engine lives on when it is closed.

    Raises KeysError, VersionMismatchError, or EngineHungError if the engine does not answer, as it does not answer
    those whose keys are wrong.
    """

    def __init__(self, endpoint: str, *, keys: ClientKeys, timeout_s: float, answer_timeout_s: float):
        """endpoint: where the engine listens. timeout_s: a bound for the first answer, which comes when the engine has
        loaded its model."""
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
        self.welcome: Welcome = msgspec.structs.replace(welcome, stream_endpoint=stream_endpoint)
        """What the engine said of itself, with the endpoint of its stream as it is reached from here."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.client.endpoint

    def check(self) -> None:
        """Nobody here knows whether the engine's process lives; it is known by what it answers."""

    def kill(self) -> None:
        """The process is another one's, which alone ends it."""

    def remove(self) -> None:
        """What the engine left is on its own machine."""

    def close(self) -> None:
        self.client.close()
