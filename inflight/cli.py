"""The `inflight` command. What a command can be told stands in its dataclass of options."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from inflight.bench import options as bench_options
from inflight.command_line import Output, PlottedOutput, add_command, argument, option, reported
from inflight.core.extras import needing
from inflight.core.version import __version__
from inflight.demo.options import DemoOptions
from inflight.report.command import ReportOptions, report
from inflight.server.command import ServedModel, allow_files, check_model, log_engine, log_to_stderr, option_hint
from inflight.server.options import ServerOptions
from inflight.watch.options import WatchOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure something; every benchmark prints one line of JSON last.", no_args_is_help=True)
console = Console()


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
    from inflight.demo.run import run_demo

    summary = run_demo(options, console)
    _hand_over(summary, output)
    if summary["interrupted"]:
        raise typer.Exit(130)


def benchmark(name: str) -> Callable[[Any, Output], None]:
    """What runs `inflight bench NAME`: a module of that name has `measure`, which raises InflightError or ValueError,
    `table` and, if it can draw, `plot`. It ends with code 1 where a part of what was to be measured has `failed`."""

    def run(options: Any, output: Output) -> None:
        from inflight.observability.plots import require_matplotlib
        from inflight.observability.progress import shown_on

        plot = output.plot if isinstance(output, PlottedOutput) else None
        if plot:
            require_matplotlib()
        module = import_module(f"inflight.bench.{name}")
        with shown_on(console) as progress:
            result = module.measure(options, progress)
        console.print(module.table(result))
        if plot:
            module.plot(plot, result)
        _hand_over(result, output, series=result.pop("series", None))
        if result.get("failed"):
            raise typer.Exit(1)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Say what is in a journal of a token stream, which `launch(…, journal=DIR)` keeps."""

    directory: Path = argument("The directory of the journal.", metavar="DIR")
    groups: int = option(0, "Show so many of the first groups.", min=0)
    model: str | None = option(None, "A directory or a Hugging Face hub id, whose tokenizer makes text of the tokens.")


def replay(options: ReplayOptions, output: Output) -> None:
    from inflight.journal_replay import report

    _hand_over(report(console, options.directory, num_groups=options.groups, model=options.model), output)


def serve(model: ServedModel, options: ServerOptions) -> None:
    from inflight.fleet.engine import Engine

    with needing("serve", "serving"):
        from inflight.core.http_thread import listen
        from inflight.server.connections import OTHER_FILES
        from inflight.server.http_server import HttpServer
    log_to_stderr(model.log_level)
    allow_files(options.max_connections + OTHER_FILES)
    engine_options = model.engine_options()
    listening = listen(options.host, options.port)  # a port or a model that is not there is refused before loading
    check_model(engine_options)
    with console.status(f"loading {model.model}"):
        engine = Engine(engine_options)
    log_engine(engine.info)
    with engine, HttpServer(engine, options, listening) as server:
        console.print(f"{model.model} is served at {server.url}", markup=False, highlight=False, soft_wrap=True)
        server.wait()


def watch(options: WatchOptions) -> None:
    from inflight.watch.command import watch

    watch(options, console)


def doctor() -> None:
    """Say what this machine can do, and what to change."""
    from inflight.doctor import print_report

    raise typer.Exit(print_report(console))


def keys(directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")]) -> None:
    """Make keys with which an engine is reached over TCP."""
    from inflight.core.keys import make_keys

    with reported():
        make_keys(directory)
    console.print(
        f"{directory} holds engine.key_secret and client.key_secret, which are for one machine each, and the public "
        "engine.key and client.key.\n"
        "On the engine's machine keep engine.key_secret and the *.key of every client:\n"
        f'    inflight.launch(model, listen="tcp://0.0.0.0:5600", keys="{directory}")\n'
        "On a client's machine, in a directory of mode 700, keep client.key_secret and engine.key:\n"
        f'    inflight.attach("tcp://HOST:5600", keys="{directory}")',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _hand_over(result: dict[str, Any], output: Output, *, series: list[dict[str, Any]] | None = None) -> None:
    """Write a result to the file that was asked for, and print it as the last line of output, for programs."""
    if output.json_file:
        from inflight.observability.environment import write_result

        write_result(output.json_file, result, series)
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}), flush=True)


add_command(app, "demo", demo, DemoOptions, Output)
app.add_typer(bench, name="bench")
for name, options, output in (
    ("throughput", bench_options.ThroughputOptions, PlottedOutput),
    ("swap", bench_options.SwapOptions, Output),
    ("staleness", bench_options.StalenessOptions, Output),
    ("sweep", bench_options.SweepOptions, Output),
    ("stream", bench_options.StreamOptions, Output),
    ("scaling", bench_options.ScalingOptions, PlottedOutput),
    ("host", bench_options.HostOptions, Output),
    ("learning", bench_options.LearningOptions, PlottedOutput),
    ("loss", bench_options.LossOptions, Output),
    ("trace", bench_options.TraceOptions, Output),
):
    add_command(bench, name, benchmark(name), options, output)
add_command(app, "replay", replay, ReplayOptions, Output)
add_command(app, "watch", watch, WatchOptions)
add_command(app, "report", partial(report, console), ReportOptions)
add_command(app, "serve", serve, ServedModel, ServerOptions, hint=option_hint)
app.command()(doctor)
app.command()(keys)

if __name__ == "__main__":
    app()
