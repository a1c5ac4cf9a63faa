"""Bodies: JSON that clients send, within a bound, and JSON that they get."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.responses import Response

encode = msgspec.json.Encoder().encode


def answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(encode(value), status, headers, "application/json")


def always(value: object) -> Callable[..., Awaitable[Response]]:
    """An endpoint that answers the same whatever it is asked."""

    async def endpoint(*_: object) -> Response:
        return answer(value)

    return endpoint


def event(value: object) -> bytes:
    """A part of a streamed answer, as server-sent events have them."""
    return b"data: " + encode(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
