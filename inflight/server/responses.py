"""JSON responses, and errors as OpenAI's clients read them: a message, a type, a parameter and a code."""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.responses import Response

from inflight.core.errors import (
    BackendError,
    BroadcastError,
    EngineBusyError,
    EngineDiedError,
    EngineHungError,
    InflightError,
    InvalidRequestError,
    LayoutMismatchError,
    NonFiniteWeightsError,
    PromptTooLongError,
    PublisherConflictError,
    QueueFullError,
    WeightFileError,
)
from inflight.core.messages import shorten

logger = logging.getLogger("inflight.server")
encode = msgspec.json.Encoder().encode

_ERRORS_OF: dict[int, tuple[type[Exception], ...]] = {
    422: (LayoutMismatchError, WeightFileError, NonFiniteWeightsError),
    409: (PublisherConflictError,),
    501: (BackendError,),
    424: (BroadcastError,),
    503: (QueueFullError, EngineDiedError, EngineHungError, EngineBusyError, TimeoutError),
}
_IN_FIELD, _PROMPT = re.compile(r" in (logit_bias|stop_token_ids);"), re.compile(r"(prompt) \d+ has token id ")
"""Fields that messages of the engine name."""
_TYPE_OF = {
    **dict.fromkeys((400, 405, 410, 413, 422), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    424: "failed_dependency_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}
_HEADERS_OF = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},  # The rest of the body is not read.
    413: {"Connection": "close"},
    503: {"Retry-After": "1"},
}


def answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(encode(value), status, headers, "application/json")


def event(value: object, name: str = "") -> bytes:
    """Return a part of a streamed response, as a server-sent event. name: of the event, where clients read it."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The end of a stream."""


def always(value: object) -> Callable[..., Awaitable[Response]]:
    """Return an endpoint that sends the same response to every request."""

    async def endpoint(*_: object) -> Response:
        return answer(value)

    return endpoint


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, dict[str, str | int | None]]:
        """The JSON object. An error without a code has its status as its code."""
        kind = _TYPE_OF.get(self.status, "server_error")
        message = shorten(self.message)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self, body: object = None) -> Response:
        """Return the response. body: the JSON of an API with other errors; None: `body`."""
        return answer(self.body if body is None else body, status=self.status, headers=_HEADERS_OF.get(self.status))


def as_api_error(error: Exception, what: str) -> ApiError:
    """Return the response for an error of inflight, or for a bug. A bug is logged. what: the operation that failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param="input_tokens", code="context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        field = _IN_FIELD.search(str(error)) or _PROMPT.match(str(error))
        return ApiError(400, str(error), param=field and field[1])
    for status, kinds in _ERRORS_OF.items():
        if isinstance(error, kinds):
            return ApiError(status, str(error))
    if isinstance(error, InflightError):
        return ApiError(500, f"{type(error).__name__}: {error}")
    logger.error("%s failed", what, exc_info=error)
    return ApiError(500, "the server failed; its log says why")
