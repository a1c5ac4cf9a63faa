"""Import objects that options name as "module:attribute". Names are never taken from messages."""

import runpy
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

Known = TypeVar("Known")


def resolve_by_name(given: Any, known: Mapping[str, Known], kind: str) -> Known:
    """Return the given object, or the object that a string names: a key of `known` or "module:attribute".

    kind: completes "unknown …" in messages.
    Raises ValueError for another name, and for one that cannot be imported."""
    if not isinstance(given, str):
        return given
    if given in known:
        return known[given]
    if ":" not in given:
        raise ValueError(f'unknown {kind} {given!r}; choose {", ".join(known)}, or give a custom one or "module:name"')
    try:
        return load_by_name(given)
    except Exception as error:
        raise ValueError(f"{kind} {given!r} cannot be imported ({type(error).__name__}: {error})") from error


def load_by_name(name: str) -> Any:
    """Import "module:attribute" or "path/to/file.py:attribute". Raises the errors of the import."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        return runpy.run_path(where)[attribute]
    return getattr(import_module(where), attribute)
