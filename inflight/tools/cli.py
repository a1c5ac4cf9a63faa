"""The `inflight` command. The options of each command are the fields of a dataclass."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from inflight.core.extras import needing
from inflight.core.garbage import without_full_collections
from inflight.core.option import argument, option
from inflight.core.version import __version__
from inflight.server.options import ServerOptions
from inflight.tools.bench import options as bench_options
from inflight.tools.command_line import Output, add_command, plain_console, reported
from inflight.tools.demo.options import DemoOptions
from inflight.tools.report import ReportOptions, report
from inflight.tools.serve import ServedModel, allow_files, check_model, log_engine, log_to_stderr, option_hint
from inflight.tools.watch.options import WatchOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Run a benchmark. Its last line of output is JSON.", no_args_is_help=True)
console = plain_console()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"inflight {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models in which the generator never stops."""


def demo(options: DemoOptions, output: Output) -> None:
    from inflight.tools.demo.run import run_demo

    summary = run_demo(options, console)
    _hand_over(summary, output)
    if summary["interrupted"]:
        raise typer.Exit(130)


def benchmark(name: str) -> Callable[[Any, Output], None]:
    """Return the function that runs `inflight bench NAME`.

    The module of that name has `measure`. It raises InflightError or ValueError.
    """

    def run(options: Any, output: Output) -> None:
        from inflight.tools.bench.shown import show
        from inflight.tools.progress import shown_on

        with shown_on(console) as progress:
            measured = import_module(f"inflight.tools.bench.{name}").measure(options, progress)
        result = {"bench": name, **asdict(options), **measured}
        series = result.pop("series", None)
        show(console, result, options)
        _hand_over(result, output, series=series)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Print counts, times and damage of a journal of a token stream, as kept by `launch(…, journal=DIR)`, as JSON."""

    directory: Path = argument(metavar="DIR")
    """Directory of the journal."""


def replay(options: ReplayOptions, output: Output) -> None:
    from inflight.tools.journal_replay import content

    _hand_over(content(console, options.directory), output)


def serve(model: ServedModel, options: ServerOptions) -> None:
    from inflight.fleet.engine import Engine

    with needing("serve", "serving"):
        from inflight.core.http_thread import listen
        from inflight.server.http_server import OTHER_FILES, HttpServer
    log_to_stderr(model.log_level)
    allow_files(options.max_connections + OTHER_FILES)
    engine_options = model.engine_options()
    listening = listen(options.host, options.port)  # a port or a model that is not there is refused before loading
    check_model(engine_options)
    with console.status(Text(f"loading {model.model}")):
        engine = Engine(engine_options)
    log_engine(engine.info)
    with engine, HttpServer(engine, options, listening) as server, without_full_collections():
        console.print(f"{model.model} is served at {server.url}")
        server.wait()


def watch(options: WatchOptions) -> None:
    from inflight.tools.watch.command import watch

    watch(options, console)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Report the abilities of this machine, with advice, or the memory that a model needs."""

    model: str = option("")
    """Print the memory of engine and trainer of this model: a built-in shape, directory or Hugging Face hub id."""
    sequences: int = option(64, min=1)
    """Sequences drawn at a time."""
    context: int = option(4096, min=1)
    """Tokens of each sequence, with its prompt."""
    gpu_gib: float = option(0.0, min=0, shown="the GPU's, 80 without one")
    """Memory of the GPU, in GiB."""


def doctor(options: DoctorOptions) -> None:
    from inflight.tools.doctor import gpu_gib, print_report

    if not options.model:
        for field in fields(options):
            if getattr(options, field.name) != field.default:
                raise ValueError(f"--{field.name.replace('_', '-')} is for the memory of a model; add --model")
        raise typer.Exit(print_report(console))
    from inflight.tools.memory_budget import print_budget

    print_budget(
        options.model,
        sequences=options.sequences,
        context=options.context,
        gpu_gib=options.gpu_gib or gpu_gib(),
        console=console,
    )


def keys(directory: Annotated[Path, typer.Argument(help="Directory that does not exist yet.")]) -> None:
    """Make keys for an engine that clients reach over TCP."""
    from inflight.core.keys import make_keys

    with reported():
        make_keys(directory)
    console.print(
        f"{directory} holds engine.key_secret and client.key_secret, which are for one machine each, and the public "
        "engine.key and client.key.\n"
        "On the engine's machine keep engine.key_secret and the *.key of every client:\n"
        f'    inflight.launch(model, listen="tcp://0.0.0.0:5600", keys="{directory}")\n'
        "On a client's machine, in a directory of mode 700, keep client.key_secret and engine.key:\n"
        f'    inflight.attach("tcp://HOST:5600", keys="{directory}")'
    )


def _hand_over(result: dict[str, Any], output: Output, *, series: list[dict[str, Any]] | None = None) -> None:
    """Print a result as the last line of output, and then write it to the file of --json. If the file cannot be
    written, the result of a long measurement is not lost."""
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}), flush=True)
    if output.json_file:
        from inflight.tools.environment import write_result

        write_result(output.json_file, result, series)


add_command(app, "demo", demo, DemoOptions, Output)
app.add_typer(bench, name="bench")
for name, options in (
    ("throughput", bench_options.ThroughputOptions),
    ("swap", bench_options.SwapOptions),
    ("staleness", bench_options.StalenessOptions),
    ("episodes", bench_options.EpisodesOptions),
    ("stream", bench_options.StreamOptions),
    ("host", bench_options.HostOptions),
    ("learning", bench_options.LearningOptions),
    ("loss", bench_options.LossOptions),
):
    add_command(bench, name, benchmark(name), options, Output)
add_command(app, "replay", replay, ReplayOptions, Output)
add_command(app, "watch", watch, WatchOptions)
add_command(app, "report", partial(report, console), ReportOptions)
add_command(app, "serve", serve, ServedModel, ServerOptions, hint=option_hint)
add_command(app, "doctor", doctor, DoctorOptions)
app.command()(keys)

if __name__ == "__main__":
    app()
