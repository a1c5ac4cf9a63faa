"""A dataclass is a command: every field an option, with its type, its default and its help."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import typer
from typer.testing import CliRunner

import inflight
from inflight.core.errors import InflightError
from inflight.core.option import docs_of, option
from inflight.server.options import ServerOptions
from inflight.tools.bench import options as bench_options
from inflight.tools.cli import ReplayOptions, app
from inflight.tools.command_line import add_command
from inflight.tools.demo.options import DemoOptions
from inflight.tools.report import ReportOptions
from inflight.tools.serve import ServedModel
from inflight.tools.watch.options import WatchOptions

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
BENCHES = [
    made for made in vars(bench_options).values() if isinstance(made, type) and made.__name__.endswith("Options")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Colors:
    """Mix colors."""

    first: Literal["red", "blue"] = option("red")
    """First color."""
    second: Literal["red", "blue"] | None = option(None)
    """Second color."""
    sizes: tuple[int, ...] = option((1, 8))
    """Sizes of the
    spots.

    This paragraph is not in the help."""
    seeds: tuple[int, ...] = option((), min=0)
    """Seeds of the spots."""
    range: tuple[int, int] = option((3, 9))
    """Lengths of the stripes."""
    times: tuple[float, float] = option((0.5, 2.0))
    """Times to dry."""
    names: tuple[str, ...] = option(("a", "b"))
    """Names of the painters."""
    num_cups: int = option(2, min=1)
    """Number of cups."""
    file: Path | None = option(None)
    """Output file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DarkColors(Colors):
    """Mix dark colors."""

    first: Literal["red", "blue"] = option("blue")
    num_cups: int = option(3)
    """Number of dark cups."""


@dataclass
class Described:
    DESCRIBED_BY: ClassVar[type] = Colors

    file: Path
    extra: int
    """An extra."""


def run(*arguments: str):
    command = typer.Typer()
    add_command(command, "mix", lambda colors: print(json.dumps(asdict(colors), default=str)), Colors)
    return CliRunner().invoke(command, arguments, env={"COLUMNS": "160"})


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words and the object of each command of `inflight`."""
    if not hasattr(command, "commands"):
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


COMMANDS = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) or "inflight" for path, _ in COMMANDS])
def test_the_help_of_a_command_fits_into_80_columns_with_whole_names(path, command):
    done = CliRunner().invoke(app, [*path, "-h"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0
    assert (
        CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout == done.stdout
    )
    assert max(map(len, done.stdout.splitlines())) <= 80
    names = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    shown = set(re.findall(r"--[\w-]+(?![\w…-])", done.stdout))
    assert [name for name in names if name.startswith("--") and name not in shown] == []


def test_the_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"inflight {inflight.__version__}\n")


def test_an_option_that_is_not_given_has_its_default():
    assert json.loads(run().stdout) == json.loads(json.dumps(asdict(Colors())))


def test_every_type_is_parsed():
    given = [
        "--first",
        "blue",
        "--second",
        "red",
        "--sizes",
        "2,3",
        "--seeds",
        "0,7",
    ]
    given += ["--range", "5", "--names", "x, y,x", "--num-cups", "4", "--file", "cup"]
    given += ["--times", "0.05-5"]
    assert json.loads(run(*given).stdout) == {
        "first": "blue", "second": "red", "sizes": [2, 3], "seeds": [0, 7], "range": [5, 5],
        "times": [0.05, 5.0], "names": ["x", "y"], "num_cups": 4, "file": "cup",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-cps", "3"], "No such option: --num-cps"),
        (["--sizes", "0,1"], "--sizes must be one or more positive numbers such as 1,8,32, got '0,1'"),
        (["--seeds", "x"], "--seeds must be one or more numbers such as 1,8,32, got 'x'"),
        (["--range", "9-3"], "--range must be a positive number or two that rise, such as 100-1024, got '9-3'"),
        (["--times", "0-1"], "--times must be a positive number or two that rise, such as 100-1024, got '0-1'"),
        (["--num-cups", "0"], "Invalid value for '--num-cups'"),
    ],
)
def test_a_bad_value_is_told_in_a_sentence(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_an_error_of_the_command_is_a_sentence_and_any_other_is_not_hidden():
    command = typer.Typer()
    errors = iter([InflightError("no more cups"), KeyError("a bug")])

    def fail(colors: Colors) -> None:
        raise next(errors)

    add_command(command, "mix", fail, Colors)
    done = CliRunner().invoke(command, [])
    assert (done.exit_code, done.stderr) == (2, "error: no more cups\n")
    assert isinstance(CliRunner().invoke(command, []).exception, KeyError)


def test_help_has_the_first_paragraph_of_every_option_and_its_default():
    shown = " ".join(run("--help").stdout.replace("│", " ").split())
    assert "Mix colors." in shown
    assert "Sizes of the spots. [default: 1,8]" in shown
    assert "Lengths of the stripes. [default: 3-9]" in shown
    assert "This paragraph" not in shown


def test_docstrings_of_fields_are_inherited_and_replaced():
    docs = docs_of(DarkColors)
    assert docs["first"] == "First color."
    assert docs["num_cups"] == "Number of dark cups."
    assert docs["sizes"] == "Sizes of the spots.\n\nThis paragraph is not in the help."
    assert (docs_of(Described)["file"], docs_of(Described)["extra"]) == ("Output file.", "An extra.")


OPTIONS = [*BENCHES, DemoOptions, ReplayOptions, ReportOptions, ServedModel, ServerOptions, WatchOptions]
PYTHON_OPTIONS = [inflight.EngineOptions, inflight.SamplingParams, inflight.GRPOConfig, ServerOptions]


@pytest.mark.parametrize("kind", dict.fromkeys([*OPTIONS, *PYTHON_OPTIONS]), ids=lambda made: made.__name__)
def test_every_option_is_described_by_sentences(kind):
    assert kind.__doc__
    docs = docs_of(kind)
    for name in inspect.signature(kind).parameters:
        for paragraph in docs[name].split("\n\n"):
            assert paragraph.endswith((".", '"', "…", ")"))
        assert not docs[name].startswith(("What ", "Who ", "How ", "Whether "))


@pytest.mark.parametrize("kind", [*OPTIONS, *PYTHON_OPTIONS], ids=lambda made: made.__name__)
def test_every_option_is_on_the_page_of_options(kind):
    assert re.search(rf"<!-- (flags|options) of {kind.__module__}\.{kind.__name__} -->", PAGE)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--gpu-memory-utilization", "--set kv_cache_fraction=VALUE"),
        ("--max-model-len", "--max-context"),
        ("--max-num-seqs", "--max-sequences"),
        ("--model", "inflight serve MODEL"),
        ("--api-key", "--token"),
        ("--enable-prefix-caching", "--set prefix_caching=VALUE"),
        ("--prefix-across-versions", "--set prefix_across_versions=VALUE"),
    ],
)
def test_an_option_of_vllm_is_answered_with_ours(given, meant):
    result = CliRunner().invoke(app, ["serve", "tiny", given, "1"])
    assert result.exit_code == 2
    assert f"No such option: {given}; did you mean {meant}?" in unboxed(result.output)


def test_an_option_that_nobody_has_is_answered_with_similar_ones():
    output = unboxed(CliRunner().invoke(app, ["serve", "tiny", "--max-contex", "1"]).output)
    assert "No such option: --max-contex" in output
    assert "--max-context," in output  # among the similar ones


def unboxed(output: str) -> str:
    """Return an error as one line, without its box, whose width depends on the terminal."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())
