"""The `inflight` command. What a command can be told stands in its dataclass of options."""

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from rich.console import Console

from inflight.bench.options import (
    LearningOptions,
    LossOptions,
    ScalingOptions,
    StalenessOptions,
    SwapOptions,
    ThroughputOptions,
    TraceOptions,
)
from inflight.command_line import Output, PlottedOutput, add_command
from inflight.demo.options import DemoOptions

app = typer.Typer(
    help="Reinforcement learning of language models in which the generator never stops.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure something; every benchmark prints one line of JSON last.", no_args_is_help=True)
console = Console()


def demo(options: DemoOptions, output: Output) -> None:
    from inflight.demo.run import run_demo
    from inflight.observability.environment import write_json

    summary = run_demo(options, console)
    if output.json_file:
        write_json(output.json_file, summary)
    _print_json(summary)
    if summary["interrupted"]:
        raise typer.Exit(130)


def benchmark(name: str) -> Callable[[Any, Output], None]:
    """What runs `inflight bench NAME`: a module of that name has `measure`, `table` and, if it can draw, `plot`."""

    def run(options: Any, output: Output) -> None:
        from inflight.observability.environment import write_result
        from inflight.observability.plots import require_matplotlib

        plot = output.plot if isinstance(output, PlottedOutput) else None
        if plot:
            require_matplotlib()
        module = import_module(f"inflight.bench.{name}")
        with console.status("") as status:
            result = module.measure(options, status.update)
        console.print(module.table(result))
        if plot:
            module.plot(plot, result)
        series = result.pop("series", None)
        if output.json_file:
            write_result(output.json_file, result, series)
        _print_json(result)

    return run


def doctor() -> None:
    """Say what this machine can do, and what to change."""
    from inflight.doctor import print_report

    raise typer.Exit(print_report(console))


def _print_json(result: dict[str, Any]) -> None:
    """The last line of output, for programs."""
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}), flush=True)


add_command(app, "demo", demo, DemoOptions, Output)
app.add_typer(bench, name="bench")
for name, options, output in (
    ("throughput", ThroughputOptions, PlottedOutput),
    ("swap", SwapOptions, Output),
    ("staleness", StalenessOptions, Output),
    ("scaling", ScalingOptions, PlottedOutput),
    ("learning", LearningOptions, PlottedOutput),
    ("loss", LossOptions, Output),
    ("trace", TraceOptions, Output),
):
    add_command(bench, name, benchmark(name), options, output)
app.command()(doctor)

if __name__ == "__main__":
    app()
