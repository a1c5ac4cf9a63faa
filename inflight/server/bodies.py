"""JSON bodies: requests of bounded size, and responses."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.responses import Response

encode = msgspec.json.Encoder().encode


def answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(encode(value), status, headers, "application/json")


def always(value: object) -> Callable[..., Awaitable[Response]]:
    """Return an endpoint that sends the same response to every request."""

    async def endpoint(*_: object) -> Response:
        return answer(value)

    return endpoint


def event(value: object) -> bytes:
    """Return a part of a streamed response, as a server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
