"""What a user names for the engine's process to import: options of the launch do, and nothing that a message holds."""

import runpy
from importlib import import_module
from typing import Any


def load_by_name(name: str) -> Any:
    """Import what "module:attribute" or "path/to/file.py:attribute" names. Raises what importing it raises."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        return runpy.run_path(where)[attribute]
    return getattr(import_module(where), attribute)
