"""Fields of dataclasses that are options of a command too. tools/command_line.py makes the command from them."""

from dataclasses import dataclass, field
from typing import Any, Literal

DeviceName = Literal["auto", "cpu", "cuda"]
DEVICE_HELP = "The device that everything runs on."


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCommandLine:
    """How a field appears on a command line."""

    help: str
    is_argument: bool = False
    """It is given without a name, and must be given."""
    names: tuple[str, ...] = ()
    """Names that replace its own."""
    panel: str | None = None
    """Heading that groups it with others in the help."""
    min: float | None = None
    max: float | None = None
    shown: str | bool = True
    """Text of its default in the help."""
    metavar: str | None = None
    envvar: str | None = None
    """Environment variable that can hold its value instead."""


def option(default: Any, help: str, *names: str, **about: Any) -> Any:
    """Make a field that is an option. about: fields of `OnCommandLine`."""
    return field(default=default, metadata={"option": OnCommandLine(help=help, names=names, **about)})


def argument(help: str, *, metavar: str | None = None) -> Any:
    """Make a field that is given without a name, and must be given."""
    return field(metadata={"option": OnCommandLine(help=help, is_argument=True, metavar=metavar)})
