"""The settings of an HTTP server, which are options of `inflight serve` and arguments of `engine.serve` too."""

from dataclasses import dataclass
from typing import Literal

from inflight.command_line import option
from inflight.core.arguments import named

PLACE = "place-"
"""What places are called that are there for adapters of clients alone; under other names a trainer publishes its own,
and clients may ask for those too."""


@named({"api_key": "token"})
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where a server listens, who may do what, and its bounds."""

    host: str = option("127.0.0.1", "The address to listen on.", panel="Server")
    port: int = option(8000, "The port to listen on; 0 lets the system choose one.", min=0, max=65535, panel="Server")
    token: str = option(
        "",
        "Who asks for anything but /health has to send `Authorization: Bearer TOKEN`.",
        envvar="INFLIGHT_TOKEN",
        panel="Server",
    )
    control: Literal["loopback", "anyone"] = option(
        "loopback",
        "Without a token: whose control requests (weights, adapters, pauses) are obeyed.",
        panel="Server",
    )
    served_model_name: str = option(
        "", "The name that clients call the model by, beside the one it was launched with.", panel="Server"
    )
    honor_pause: bool = option(
        False,
        "Stop generating at /pause?mode=keep. Trainers ask for that around a weight update, which needs no pause here.",
        panel="Server",
    )
    tokens_as_ids: bool = option(
        False, 'Write tokens as "token_id:ID" in log-probabilities, also where a request does not ask.', panel="Server"
    )
    split_reasoning: bool = option(
        False,
        "Give what a chat's answer has between <think> and </think> as its reasoning_content, not as its content.",
        panel="Server",
    )
    stream_interval_ms: float = option(
        20.0, "The least time between two parts of a streamed answer, behind the first.", min=0, panel="Server"
    )
    max_body_mib: float = option(32.0, "Requests with a larger body are refused.", min=0.001, panel="Server")
    max_connections: int = option(
        4096, "Requests are answered with 503 while more connections are open.", min=1, panel="Server"
    )
    receive_timeout_s: float = option(20.0, "Maximum time in which a body arrives.", min=0.05, panel="Server")
    drain_timeout_s: float = option(
        600.0,
        "Time that /pause?mode=wait, and the end by SIGTERM, wait for requests in progress.",
        min=0.05,
        panel="Server",
    )
    keep_alive_s: float = option(75.0, "How long a connection without a request is kept.", min=1, panel="Server")
