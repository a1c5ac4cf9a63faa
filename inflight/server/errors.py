"""Errors as OpenAI's clients read them: a status code, and a JSON object with a message, a type, a parameter and a
code."""

import logging

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
from inflight.server.bodies import answer

logger = logging.getLogger("inflight.server")

_ERRORS_OF: dict[int, tuple[type[Exception], ...]] = {
    400: (InvalidRequestError,),
    422: (LayoutMismatchError, WeightFileError, NonFiniteWeightsError),
    409: (PublisherConflictError,),
    501: (BackendError,),
    424: (BroadcastError,),
    503: (QueueFullError, EngineDiedError, EngineHungError, EngineBusyError, TimeoutError),
}
_TYPE_OF = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    424: "failed_dependency_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, dict[str, str | int | None]]:
        """The JSON object. `code` is the status where the error has no other."""
        kind = _TYPE_OF.get(self.status, "server_error")
        message = shorten(self.message)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self) -> Response:
        headers = {}
        if self.status == 503:
            headers["Retry-After"] = "1"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 413:
            headers["Connection"] = "close"  # what is left of the body is not read
        return answer(self.body, status=self.status, headers=headers)


def as_api_error(error: Exception, what: str) -> ApiError:
    """What a client is told of an error of inflight's, or of one that is nobody's business, which is logged. what: that
    which has failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param="input_tokens", code="context_length_exceeded")
    for status, kinds in _ERRORS_OF.items():
        if isinstance(error, kinds):
            return ApiError(status, str(error))
    if isinstance(error, InflightError):
        return ApiError(500, f"{type(error).__name__}: {error}")
    logger.error("%s failed", what, exc_info=error)
    return ApiError(500, "the server failed; its log says why")
