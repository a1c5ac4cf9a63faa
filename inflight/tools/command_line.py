"""Commands whose options are the fields of dataclasses.

A field `name: type = option(default)` becomes `--name`. The first paragraph of its docstring is its help, and the
docstring of the dataclass is the help of the command. A field has a type of typer, or one of these types:

    Literal["a", "b"]                one of these choices
    tuple[int, ...]                  numbers, as in 1,8,32, each at least the option's `min` (1 without one)
    tuple[str, ...]                  names, as in none,tis
    list[str]                        texts, one for each use of the option
    tuple[Path, ...]                 paths, one after another; an argument
    tuple[int, int]                  shortest and longest length, as in 100-1024; 128 is both
    tuple[float, float]              shortest and longest time, as in 0.05-5; 1 is both
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand

from inflight.core.errors import InflightError
from inflight.core.files import reason_of
from inflight.core.option import DeviceName, OnCommandLine, docs_of, option


def plain_console(**options: Any) -> Console:
    """Return a console that prints text as it is: without markup, highlights and additional line breaks."""
    return Console(markup=False, highlight=False, soft_wrap=True, **options)


errors = plain_console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Options of commands that run a model."""

    model: str = option("tiny", panel="Model")
    """Built-in shape, directory or Hugging Face hub id."""
    device: DeviceName = option("auto", panel="Model")
    """Device of engine and trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Output of a command, in addition to the last line of JSON."""

    json_file: Path | None = option(None, "--json", panel="Output")
    """Write the result and its environment to this JSON file."""


class Spelling(NamedTuple):
    """A field on a command line."""

    type: Any
    """Type that typer parses."""
    default: Any
    """Default as typer takes it: text for lists of numbers and names."""
    read: Callable[[Any], Any]
    """Makes the value of the field from the parsed value. Raises ValueError."""


def add_command(
    app: typer.Typer, name: str, run: Callable[..., None], *groups: Any, hint: Callable[[str], str] = lambda option: ""
) -> None:
    """Add a command that fills each of these dataclasses from its options and calls `run` with them.

    The first dataclass describes the command. A user's mistake is printed as one sentence without a traceback, and the
    exit code is 2. hint: returns an addition to the error of an unknown option, as in "; did you mean --slots?".
    """
    kinds = {name: kind for group in groups for name, kind in get_type_hints(group).items()}
    docs = {name: text for group in groups for name, text in docs_of(group).items()}
    options = [field for group in groups for field in fields(group)]
    spellings = {field.name: spelling_of(field, kinds[field.name]) for field in options}

    @reported()
    def command(**given: Any) -> None:
        values = {name: spelling.read(given[name]) for name, spelling in spellings.items()}
        run(*(group(**{field.name: values[field.name] for field in fields(group)}) for group in groups))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=spellings[field.name].default,
            annotation=Annotated[
                spellings[field.name].type, _declaration(field, kinds[field.name], docs[field.name].split("\n\n")[0])
            ],
        )
        for field in options
    ]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)

    class Hinting(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            try:
                return super().parse_args(ctx, args)
            except Exception as error:  # typer's or click's class, depending on the version of typer
                unknown: Any = error
                if found := hint(getattr(error, "option_name", None) or ""):
                    unknown.message, unknown.possibilities = f"{unknown.message}{found}", None
                raise

    app.command(name, cls=Hinting, help=inspect.getdoc(groups[0]))(command)


@contextmanager
def reported() -> Iterator[None]:
    """Print a user's mistake as one sentence without a traceback, and exit with code 2."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (InflightError, ValueError, OSError)) and reason_of(error) is None:
            raise
        errors.print(f"error: {error}", style="red")
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def spelling_of(field: Field, kind: Any) -> Spelling:
    default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
    items = get_args(kind) if get_origin(kind) is tuple else ()
    if choices := choices_of(kind):
        choice = StrEnum("Choice", {value: value for value in choices})
        optional: Any = choice if default is not None else choice | None  # pyright: ignore[reportOperatorIssue]
        return Spelling(optional, default, lambda given: given and given.value)
    if not items:
        return Spelling(kind, default, lambda given: given)
    if items[0] is Path:
        return Spelling(list[Path], default, tuple)
    name, least = f"--{field.name.replace('_', '-')}", field.metadata["option"].min
    separator, read = ",", partial(_numbers, name, least=1 if least is None else least)
    if items[0] is str:
        separator, read = ", ", _names
    elif items[1] in (int, float):
        separator, read = "-", partial(_range, name, items[0])
    text = separator.join(map(str, dict.fromkeys(default))) if default else None
    return Spelling(str | None, text, lambda given: () if given is None else read(given))


def choices_of(kind: Any) -> tuple[str, ...]:
    """Return the values of the Literal in a type, or ()."""
    return next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())


def _declaration(field: Field, kind: Any, help: str) -> Any:
    """Return a field's option for typer. Its name is whole in a help of 80 columns: types are one word, and choices are
    part of the sentence. A flag with the default False has no `--no-` twin."""
    about: OnCommandLine = field.metadata["option"]
    metavar, names = about.metavar, about.names
    if field.default is False and not names:
        names = (f"--{field.name.replace('_', '-')}",)
    parts = [part for part in (kind, *get_args(kind)) if part is not type(None)]
    if choices := choices_of(kind):
        help, metavar = f"{help.rstrip('.')}: {', '.join(choices)}.", metavar or "CHOICE"
    elif metavar is None and kind is not bool:
        is_list = get_origin(kind) is tuple and ... in get_args(kind)
        number = "N,N" if is_list else "N-N" if get_origin(kind) is tuple else "N"
        metavar = next(filter(None, map({int: number, float: number, Path: "PATH"}.get, parts)), "TEXT")
    if about.is_argument:
        return typer.Argument(help=help, metavar=metavar)
    return typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=about.panel, min=about.min, max=about.max,
        show_default=about.shown, envvar=about.envvar,
    )  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    """Return the different names in "none, tis"."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(option: str, text: str, *, least: int) -> tuple[int, ...]:
    """Return the numbers in "1,8,32". Raises ValueError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        kind = "positive numbers" if least else "numbers"
        raise ValueError(f"{option} must be one or more {kind} such as 1,8,32, got {text!r}")
    return numbers


def _range(option: str, kind: Any, text: str) -> tuple[Any, Any]:
    """Return the shortest and the longest length of "100-1024" or "128", or such times. Raises ValueError."""
    first, _, last = text.partition("-")
    try:
        least, most = kind(first), kind(last or first)
    except ValueError:
        least = most = 0
    if not 0 < least <= most < inf:
        raise ValueError(f"{option} must be a positive number or two that rise, such as 100-1024, got {text!r}")
    return least, most
