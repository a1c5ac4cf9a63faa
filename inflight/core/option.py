"""Fields of dataclasses that are options of a command, too. tools/command_line.py makes the command from them.

The docstring of the field, a string below it, is the only text of the option: the help and docs/options.md show it.
Python does not keep this string.
"""

import ast
import inspect
import math
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCommandLine:
    """How a field appears on a command line."""

    is_argument: bool = False
    """The value has no flag and is required."""
    names: tuple[str, ...] = ()
    """Flags that replace the name of the field."""
    panel: str | None = None
    """Heading in the help."""
    min: float | None = None
    max: float | None = None
    shown: str | bool = True
    """Text of the default in the help."""
    metavar: str | None = None
    envvar: str | None = None
    """Environment variable that can hold the value instead."""


def option(default: Any, *names: str, **about: Any) -> Any:
    """Make a field that is an option. names: flags that replace its own. about: other fields of `OnCommandLine`."""
    return field(default=default, metadata={"option": OnCommandLine(names=names, **about)})


def check_ranges(options: Any) -> None:
    """Raise ValueError for a field that is below its `min` or above its `max`."""
    for one in fields(options):
        about: OnCommandLine | None = one.metadata.get("option")
        value = getattr(options, one.name)
        if about is None or not isinstance(value, int | float):
            continue
        least = -math.inf if about.min is None else about.min
        most = math.inf if about.max is None else about.max
        if not least <= value <= most:
            raise ValueError(
                f"{type(options).__name__}.{one.name} must be between {least:g} and {most:g}, got {value!r}"
            )


def argument(*, metavar: str | None = None) -> Any:
    """Make a field that is a required argument without a flag."""
    return field(metadata={"option": OnCommandLine(is_argument=True, metavar=metavar)})


def docs_of(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a class, by name. Paragraphs are single lines, with an empty line between
    them. A field without a docstring has the docstring of the base class, or of the class `DESCRIBED_BY`."""
    docs: dict[str, str] = docs_of(kind.DESCRIBED_BY) if hasattr(kind, "DESCRIBED_BY") else {}
    for base in reversed(kind.__mro__):
        try:
            module = inspect.getsourcefile(base)
        except TypeError:  # a class of Python or of an extension module
            continue
        if module is not None:
            docs |= _classes_of(module).get(base.__name__, {})
    return docs


@cache
def _classes_of(path: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the fields of each class in a source file."""
    with open(path, encoding="utf-8") as file:
        body = ast.parse(file.read()).body
    return {node.name: dict(_fields_of(node)) for node in body if isinstance(node, ast.ClassDef)}


def _fields_of(node: ast.ClassDef) -> list[tuple[str, str]]:
    docs = []
    for place, text in zip(node.body, node.body[1:], strict=False):
        match place, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                paragraphs = inspect.cleandoc(doc).split("\n\n")
                docs.append((name, "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)))
    return docs
