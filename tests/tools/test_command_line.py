"""A dataclass is a command: every field an option, with its type, its default and its help."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

import inflight
from inflight.core.errors import InflightError
from inflight.core.option import option
from inflight.tools.bench import options as bench_options
from inflight.tools.cli import app
from inflight.tools.command_line import add_command
from inflight.tools.demo.options import DemoOptions

BENCHES = [
    made for made in vars(bench_options).values() if isinstance(made, type) and made.__name__.endswith("Options")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Colors:
    """Mix colors."""

    first: Literal["red", "blue"] = option("red", "The first color.")
    second: Literal["red", "blue"] | None = option(None, "The second color.")
    others: tuple[Literal["red", "blue"], ...] = option((), "More colors.", "--other")
    sizes: tuple[int, ...] = option((1, 8), "How large they are.")
    seeds: tuple[int, ...] = option((), "Where they start.", min=0)
    range: tuple[int, int] = option((3, 9), "How long they are.")
    names: tuple[str, ...] = option(("a", "b"), "Who mixes them.")
    num_cups: int = option(2, "How many cups there are.", min=1)
    file: Path | None = option(None, "Where they are poured.")


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
        "--other",
        "red",
        "--other",
        "red",
        "--sizes",
        "2,3",
        "--seeds",
        "0,7",
    ]
    given += ["--range", "5", "--names", "x, y,x", "--num-cups", "4", "--file", "cup"]
    assert json.loads(run(*given).stdout) == {
        "first": "blue", "second": "red", "others": ["red"], "sizes": [2, 3], "seeds": [0, 7], "range": [5, 5],
        "names": ["x", "y"], "num_cups": 4, "file": "cup",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "0,1"], "--sizes must be one or more positive numbers such as 1,8,32, got '0,1'"),
        (["--seeds", "x"], "--seeds must be one or more numbers such as 1,8,32, got 'x'"),
        (["--range", "9-3"], "--range must be a positive number or two that rise, such as 100-1024, got '9-3'"),
        (["--num-cups", "0"], "Invalid value for '--num-cups'"),
        (["--other", "green"], "Invalid value for '--other'"),
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


def test_help_has_every_option_with_its_sentence_and_default():
    shown = " ".join(run("--help").stdout.replace("│", " ").split())
    assert "Mix colors." in shown
    assert "How large they are. [default: 1,8]" in shown
    assert "How long they are. [default: 3-9]" in shown


@pytest.mark.parametrize("options", [*BENCHES, DemoOptions], ids=lambda made: made.__name__)
def test_every_option_of_every_command_has_help_and_every_command_a_line(options):
    name = options.__name__.removesuffix("Options").lower()
    arguments = [name] if name == "demo" else ["bench", name]
    done = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert options.__doc__
    for field in fields(options):
        help = field.metadata["option"].help
        assert help[0].isupper()
        assert help.endswith(".")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--gpu-memory-utilization", "--set kv_cache_fraction=VALUE"),
        ("--max-model-len", "--max-context"),
        ("--max-num-seqs", "--max-sequences"),
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
