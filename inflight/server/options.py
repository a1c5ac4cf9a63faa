"""Options of an HTTP server: arguments of `engine.serve`, and options of `inflight serve`."""

from dataclasses import dataclass
from typing import Literal

from inflight.core.arguments import named
from inflight.core.option import check_ranges, option

PLACE = "place-"
"""Prefix of places for adapters of clients. A trainer publishes adapters under other names, and clients can use those,
too."""

OTHER_NAMES = {"api_key": "token"}
"""Maps vLLM's names of options to ours."""


@named(OTHER_NAMES)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Address, access and limits of a server."""

    host: str = option("127.0.0.1", panel="Server")
    """Address to listen on."""
    port: int = option(8000, min=0, max=65535, panel="Server")
    """Port to listen on. 0: the system chooses one."""
    token: str = option("", envvar="INFLIGHT_TOKEN", panel="Server")
    """Token of clients: each request except /health, /ping and /liveness must send `Authorization: Bearer TOKEN`.

    Empty: no token."""
    control: Literal["loopback", "anyone"] = option("loopback", panel="Server")
    """Clients that are allowed to control a server without a token (weights, adapters, pauses)."""
    served_model_name: str = option("", panel="Server")
    """Name of the model for clients, in addition to the name that it was launched with."""
    honor_pause: bool = option(False, panel="Server")
    """Stop generating at /pause?mode=keep.

    Trainers request a pause around a weight update. The engine needs no such pause."""
    tokens_as_ids: bool = option(False, panel="Server")
    """Write tokens as "token_id:ID" in log-probabilities, even if a request does not ask for it."""
    split_reasoning: bool = option(False, panel="Server")
    """Return the text between `<think>` and `</think>` of a chat answer as reasoning_content instead of content."""
    stream_interval_ms: float = option(20.0, min=0, panel="Server")
    """Shortest time between two parts of a streamed answer after its first part, in milliseconds."""
    max_body_mib: float = option(32.0, min=0.001, panel="Server")
    """Largest body of a request, in MiB. Larger requests are refused."""
    max_connections: int = option(4096, min=1, panel="Server")
    """Maximum number of connections. Further connections get status 503.

    The limit is lower if the process is not allowed to open 512 more files."""
    receive_timeout_s: float = option(20.0, min=0.05, panel="Server")
    """Maximum time until the body of a request has arrived, in seconds."""
    drain_timeout_s: float = option(600.0, min=0.05, panel="Server")
    """Maximum time that /pause?mode=wait and the end by SIGTERM wait for requests in progress, in seconds."""
    keep_alive_s: float = option(75.0, min=1, panel="Server")
    """Time after which a connection without a request is closed, in seconds."""

    def __post_init__(self) -> None:
        check_ranges(self)
