"""Commands whose options are the fields of dataclasses: an option is written once, where its value is kept.

A field reads `name: type = option(default, "What it is.")`, and `name` becomes `--name`. The docstring of the
dataclass is the help of the command. Beside the types that typer knows, a field may have:

    Literal["a", "b"]                one of these choices
    tuple[Literal["a", "b"], ...]    choices, by an option that may be given several times
    tuple[int, ...]                  numbers as in 1,8,32, of which none is below the option's `min` (1 if it has none)
    tuple[str, ...]                  names as in none,tis
    tuple[Path, ...]                 paths, one after another; an argument
    tuple[int, int]                  the least and the most of a length, as in 100-1024; 128 is both
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand

from inflight.core.errors import InflightError
from inflight.core.files import reason_of
from inflight.core.option import DEVICE_HELP, DeviceName, OnCommandLine, option

errors = Console(stderr=True)


SEED_HELP = "The seed of weights, data and draws."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The options of commands that run a model."""

    model: str = option("tiny", "A built-in shape, a directory or a Hugging Face hub id.", panel="Model")
    device: DeviceName = option("auto", DEVICE_HELP, panel="Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command leaves its result, beside the line of JSON that it prints last."""

    json_file: Path | None = option(
        None, "Write the result and its environment to this JSON file.", "--json", panel="Output"
    )


class _Spelling(NamedTuple):
    """How a field stands on a command line."""

    type: Any
    """What typer parses."""
    default: Any
    read: Callable[[Any], Any]
    """Makes the field's value of what typer parsed. Raises ValueError."""


def add_command(
    app: typer.Typer, name: str, run: Callable[..., None], *groups: Any, hint: Callable[[str], str] = lambda option: ""
) -> None:
    """Add a command that fills each of these dataclasses from its options and calls `run` with them. hint: what follows
    the error of an option that does not exist, such as "; did you mean --max-context?".

    The first dataclass describes the command. An error that a user can cause is told in a sentence, without a
    traceback, with exit code 2.
    """
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
    options = [field for group in groups for field in fields(group)]
    spellings = {field.name: _spelling(field, hints[field.name]) for field in options}

    @reported()
    def command(**given: Any) -> None:
        values = {name: spelling.read(given[name]) for name, spelling in spellings.items()}
        run(*(group(**{field.name: values[field.name] for field in fields(group)}) for group in groups))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=spellings[field.name].default,
            annotation=Annotated[spellings[field.name].type, _declaration(field, hints[field.name])],
        )
        for field in options
    ]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)

    class Hinting(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            try:
                return super().parse_args(ctx, args)
            except Exception as error:  # its class is typer's or click's, by the version of typer
                unknown: Any = error
                if found := hint(getattr(error, "option_name", None) or ""):
                    unknown.message, unknown.possibilities = f"{unknown.message}{found}", None
                raise

    app.command(name, cls=Hinting, help=inspect.getdoc(groups[0]))(command)


@contextmanager
def reported() -> Iterator[None]:
    """Tell an error that a user can cause in a sentence, without a traceback, and exit with code 2."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (InflightError, ValueError, OSError)) and reason_of(error) is None:
            raise
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _spelling(field: Field, kind: Any) -> _Spelling:
    default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
    items = get_args(kind) if get_origin(kind) is tuple else ()
    literal = next((part for part in (kind, *get_args(kind)) if get_origin(part) is Literal), None)
    if literal is not None:
        choice = StrEnum("Choice", {value: value for value in get_args(literal)})
        if items:
            return _Spelling(list[choice], list(default), lambda given: tuple(dict.fromkeys(map(str, given))))
        optional: Any = choice if default is not None else choice | None  # pyright: ignore[reportOperatorIssue]
        return _Spelling(optional, default, lambda given: given and given.value)
    if not items:
        return _Spelling(kind, default, lambda given: given)
    if items[0] is Path:
        return _Spelling(list[Path], default, tuple)
    name, least = f"--{field.name.replace('_', '-')}", field.metadata["option"].min
    separator, read = ",", partial(_numbers, name, least=1 if least is None else least)
    if items[0] is str:
        read = _names
    elif items[1] is int:
        separator, read = "-", partial(_lengths, name)
    if items[0] is str:
        separator = ", "
    text = separator.join(map(str, dict.fromkeys(default))) if default else None
    return _Spelling(str | None, text, lambda given: () if given is None else read(given))


def _declaration(field: Field, kind: Any) -> Any:
    """Return the option of a field as typer wants it, such that its name is whole in a help of 80 columns: types are
    one word, choices are part of the sentence, and a flag that is off has no `--no-` twin: it would change nothing.
    """
    about: OnCommandLine = field.metadata["option"]
    help, metavar, names = about.help, about.metavar, about.names
    if field.default is False and not names:
        names = (f"--{field.name.replace('_', '-')}",)
    parts = [part for part in (kind, *get_args(kind)) if part is not type(None)]
    literal = next((part for part in parts if get_origin(part) is Literal), None)
    if literal is not None:
        help = f"{help.rstrip('.')}: {', '.join(get_args(literal))}."
    if metavar is None and kind is not bool:
        number = (
            "N,N" if get_origin(kind) is tuple and ... in get_args(kind) else "N-N" if kind == tuple[int, int] else "N"
        )
        words = {int: number, float: number, Path: "PATH"}
        metavar = "CHOICE" if literal is not None else next(filter(None, map(words.get, parts)), "TEXT")
    if about.is_argument:
        return typer.Argument(help=help, metavar=metavar)
    return typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=about.panel, min=about.min, max=about.max,
        show_default=about.shown, envvar=about.envvar,
    )  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    """The different names in "none, tis"; whoever takes them checks that they exist."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(option: str, text: str, *, least: int) -> tuple[int, ...]:
    """The numbers in "1,8,32". Raises ValueError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        kind = "positive numbers" if least else "numbers"
        raise ValueError(f"{option} must be one or more {kind} such as 1,8,32, got {text!r}")
    return numbers


def _lengths(option: str, text: str) -> tuple[int, int]:
    """The least and the most of "100-1024" or "128". Raises ValueError."""
    first, _, last = text.partition("-")
    try:
        least, most = int(first), int(last or first)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise ValueError(f"{option} must be a positive number or two that rise, such as 100-1024, got {text!r}")
    return least, most
