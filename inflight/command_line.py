"""Commands whose options are the fields of dataclasses: an option is written once, where its value is kept.

A field reads `name: Annotated[type, typer.Option(help="…")] = default`, and `name` becomes `--name`. The docstring of
the dataclass is the help of the command. Beside the types that typer knows, a field may have:

    Literal["a", "b"]                one of these choices
    tuple[Literal["a", "b"], ...]    choices, by an option that may be given several times
    tuple[int, ...]                  numbers as in 1,8,32, of which none is below the option's `min` (1 if it has none)
    tuple[str, ...]                  names as in none,tis
    tuple[int, int]                  the least and the most of a length, as in 100-1024; 128 is both
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from inflight.core.errors import InflightError

errors = Console(stderr=True)

Model = Annotated[
    str,
    typer.Option(help="A built-in shape, a directory or a Hugging Face hub id.", rich_help_panel="Model"),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="The device that everything runs on.", rich_help_panel="Model")
]
Seed = Annotated[int, typer.Option(min=0, help="The seed of weights, data and draws.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command leaves its result, beside the line of JSON that it prints last."""

    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the result and its environment to this JSON file.", rich_help_panel="Output"
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedOutput(Output):
    """The same, of commands that can draw it."""

    plot: Annotated[Path | None, typer.Option(help="Draw the result into this PNG file.", rich_help_panel="Output")] = (
        None
    )


class _Spelling(NamedTuple):
    """How a field stands on a command line."""

    type: Any
    """What typer parses, with the option."""
    default: Any
    read: Callable[[Any], Any]
    """Makes the field's value of what typer parsed. Raises ValueError."""


def add_command(app: typer.Typer, name: str, run: Callable[..., None], *groups: Any) -> None:
    """Add a command that fills each of these dataclasses from its options and calls `run` with them.

    The first dataclass describes the command. An error that a user can cause is told in a sentence, with exit code 2.
    """
    hints = {group: get_type_hints(group, include_extras=True) for group in groups}
    spellings = {
        group: {field.name: _spelling(field, hints[group][field.name]) for field in fields(group)} for group in groups
    }

    def command(**given: Any) -> None:
        with reported():
            run(*(group(**{name: of.read(given[name]) for name, of in spellings[group].items()}) for group in groups))

    parameters = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=of.default, annotation=of.type)
        for group in groups
        for name, of in spellings[group].items()
    }
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    vars(command)["__signature__"] = inspect.Signature(list(parameters.values()))
    app.command(name, help=inspect.getdoc(groups[0]))(command)


@contextmanager
def reported() -> Iterator[None]:
    """Tell an error that a user can cause in a sentence, without a traceback, and exit with code 2."""
    try:
        yield
    except (InflightError, ValueError, OSError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _spelling(field: Field, hint: Any) -> _Spelling:
    kind, option = get_args(hint)
    name = option.param_decls[0] if option.param_decls else f"--{field.name.replace('_', '-')}"
    default: Any = field.default
    is_tuple = get_origin(kind) is tuple
    literal = next((part for part in (kind, *get_args(kind)) if get_origin(part) is Literal), None)
    if literal is not None:
        choice = StrEnum("Choice", {value: value for value in get_args(literal)})
        if is_tuple:
            return _Spelling(Annotated[list[choice], option], list(default), _distinct)
        optional: Any = choice if default is not None else choice | None  # pyright: ignore[reportOperatorIssue]
        return _Spelling(Annotated[optional, option], default, lambda given: given and given.value)
    if not is_tuple:
        return _Spelling(hint, default, lambda given: given)
    separator, read = ",", partial(_numbers, name, least=1 if option.min is None else option.min)
    if get_args(kind)[0] is str:
        read = _names
    elif not isinstance(get_args(kind)[1], EllipsisType):
        separator, read = "-", partial(_lengths, name)
    text = separator.join(map(str, dict.fromkeys(default))) if default else None
    return _Spelling(Annotated[str | None, option], text, lambda given: () if given is None else read(given))


def _distinct(values: list[StrEnum]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value.value for value in values))


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
