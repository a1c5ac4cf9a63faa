"""Fields of dataclasses that are options of a command, too. tools/command_line.py makes the command from them.

The docstring of the field is the only text of the option: the help and docs/options.md show it.
"""

from dataclasses import dataclass, field
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


def argument(*, metavar: str | None = None) -> Any:
    """Make a field that is a required argument without a flag."""
    return field(metadata={"option": OnCommandLine(is_argument=True, metavar=metavar)})
