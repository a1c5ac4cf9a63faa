"""Tools as functions: their schemas for a chat template."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from inflight.core.errors import InvalidRequestError

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function with type hints and a docstring with a section "Args:", or a schema of the API of OpenAI."""


def schemas_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the schemas of tools. Raises InvalidRequestError for a function without type hints or descriptions."""
    if not tools:
        return None
    return [_schema(tool) if callable(tool) else dict(tool) for tool in tools]


@lru_cache(maxsize=1024)
def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # Transformers raises several classes.
        raise InvalidRequestError(f"tool {getattr(function, '__name__', function)!r} has no schema: {error}") from error
