"""The `inflight` command."""

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from inflight.core.errors import InflightError

app = typer.Typer(
    help="Reinforcement learning of language models in which the generator never stops.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure; every benchmark prints one JSON line last.", no_args_is_help=True)
app.add_typer(bench, name="bench")

console = Console()
errors = Console(stderr=True)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Peer(StrEnum):
    vllm = "vllm"
    transformers = "transformers"


class SwapPeer(StrEnum):
    vllm = "vllm"


Model = Annotated[str, typer.Option(help="A built-in shape, a directory or a Hugging Face hub id.")]
OnDevice = Annotated[Device, typer.Option(help="Where all of it runs.")]
OfWeights = Annotated[Dtype, typer.Option(help="Of the engine's weights.")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights, data and draws.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result here, with its environment.")]


@app.command()
def demo(
    model: Model = "tiny",
    task: Annotated[str, typer.Option(help="A reasoning-gym task.")] = "spell_backward",
    data: Annotated[
        Path | None, typer.Option(help='Instead of a task: JSON lines, each {"prompt": …, "answer": …}.')
    ] = None,
    device: OnDevice = Device.auto,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of reinforcement learning.")] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Supervised steps before it; by default none for a model of your own.")
    ] = None,
    sync: Annotated[bool, typer.Option(help="Generate and train in turn, for comparison.")] = False,
    group_size: Annotated[int | None, typer.Option(min=2, help="Samples per prompt.")] = None,
    groups_per_step: Annotated[int | None, typer.Option(min=1, help="Prompts per optimizer step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0, help="Of reinforcement learning.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length of an answer at most.")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Directory for steps.jsonl, summary.json and demo.png.")] = None,
    json_file: JsonFile = None,
) -> None:
    """The whole loop on this machine: warm up a small model, then improve it while the generator never stops."""
    from inflight.demo.run import DemoConfig, run_demo
    from inflight.demo.tasks import file_task, gym_task
    from inflight.engine.shapes import SHAPES
    from inflight.observability.environment import write_json

    given = {
        "steps": steps,
        "group_size": group_size,
        "groups_per_step": groups_per_step,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps if warmup_steps is not None or model in SHAPES else 0,
    }
    with _reported():
        chosen = (
            file_task(data, max_tokens=max_tokens or 64) if data else gym_task(task, seed=seed, max_tokens=max_tokens)
        )
        mode = "sync" if sync else "inflight"
        config = DemoConfig(
            model=model,
            out=out or Path("runs") / f"{chosen.name}-{mode}-{time.strftime('%Y%m%d-%H%M%S')}",
            device=device.value,
            sync=sync,
            seed=seed,
            **{name: value for name, value in given.items() if value is not None},
        )
        summary = run_demo(chosen, config, console)
        if json_file:
            write_json(json_file, summary)
    _print_summary(summary, config.out)
    _print_json(summary)
    if summary["interrupted"]:
        raise typer.Exit(130)


@bench.command()
def staleness(
    model: Model = "tiny",
    device: OnDevice = Device.auto,
    dtype: OfWeights = Dtype.auto,
    sequences: Annotated[int, typer.Option(min=1, help="Drawn at a time, and consumed per step.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Drawn per sequence.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, each followed by a publish.")] = 40,
    slots: Annotated[int, typer.Option(min=1, help="Copies of the weights in the engine.")] = 2,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """How old are the tokens that an optimizer step consumes? All names are those of the README's table."""
    from inflight.bench.staleness import StalenessBench, measure_staleness

    with _reported():
        settings = StalenessBench(
            model=model,
            device=device.value,
            dtype=dtype.value,
            sequences=sequences,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            steps=steps,
            slots=slots,
            seed=seed,
        )
        result = measure_staleness(settings)
    _finish_bench(result, json_file)


@bench.command()
def throughput(
    model: Model = "tiny",
    device: OnDevice = Device.auto,
    dtype: OfWeights = Dtype.auto,
    sequences: Annotated[str, typer.Option(help="Drawn at a time; several as in 1,8,32 make a sweep.")] = "32",
    tokens: Annotated[str, typer.Option(help="Drawn per sequence; 100-1024 draws lengths uniformly.")] = "128",
    prompt_tokens: Annotated[str, typer.Option(help="Likewise.")] = "32",
    peer: Annotated[list[Peer] | None, typer.Option(help="Measured in alternation; may be given twice.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Alternated runs of ours and a peer.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of each side; 0 is torch's own choice.")] = 0,
    seed: Seed = 0,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Write tokens/s against sequences here, as PNG.")] = None,
) -> None:
    """How many tokens per second, and how many does another engine draw on the same weights?"""
    from inflight.bench.plots import require_matplotlib
    from inflight.bench.throughput import ThroughputBench, measure_throughput, plot_throughput, throughput_table

    with _reported():
        if plot:
            require_matplotlib()
        settings = ThroughputBench(
            model=model,
            device=device.value,
            dtype=dtype.value,
            sequences=_numbers("--sequences", sequences),
            tokens=_lengths("--tokens", tokens),
            prompt_tokens=_lengths("--prompt-tokens", prompt_tokens),
            peers=tuple(dict.fromkeys(chosen.value for chosen in peer or ())),
            pairs=pairs,
            threads=threads,
            seed=seed,
        )
        with console.status("") as status:
            result = measure_throughput(settings, status.update)
    console.print(throughput_table(result))
    if plot:
        plot_throughput(plot, result)
    _finish_bench(result, json_file)


@bench.command()
def swap(
    model: Model = "tiny",
    device: OnDevice = Device.auto,
    dtype: OfWeights = Dtype.auto,
    sequences: Annotated[int, typer.Option(min=1, help="In flight while weights are published.")] = 32,
    tokens: Annotated[int, typer.Option(min=64, help="Drawn per sequence, then all begin anew.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    publishes: Annotated[int, typer.Option(min=1)] = 200,
    slots: Annotated[int, typer.Option(min=1, max=8)] = 2,
    masters: Annotated[Dtype, typer.Option(help="Of the trainer's parameters; auto: as the engine's.")] = Dtype.auto,
    peer: Annotated[
        SwapPeer | None, typer.Option(help="Pause, load and resume of this engine, in the same run.")
    ] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """What does a running generator feel of new weights?"""
    from inflight.bench.swap import SwapBench, measure_swap, swap_table

    with _reported():
        settings = SwapBench(
            model=model,
            device=device.value,
            dtype=dtype.value,
            sequences=sequences,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            publishes=publishes,
            slots=slots,
            peer=peer.value if peer else None,
            seed=seed,
            masters=masters.value,
        )
        with console.status("") as status:
            result = measure_swap(settings, status.update)
    console.print(swap_table(result))
    _finish_bench(result, json_file)


@bench.command()
def scaling(
    model: Model = "tiny",
    device: OnDevice = Device.auto,
    dtype: OfWeights = Dtype.auto,
    sequences: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,2,4,8,16,32,64,128,256",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Context of each of those sequences.")] = 256,
    contexts: Annotated[str, typer.Option(help="Context lengths, at 16 sequences.")] = "64,128,256,512,1024,2048",
    tokens: Annotated[int, typer.Option(min=1, help="Decode steps that are measured at each point.")] = 32,
    queued: Annotated[int, typer.Option(min=0, help="Requests that wait; 0 leaves this part out.")] = 10_000,
    pairs: Annotated[int, typer.Option(min=1, help="Alternated runs without and with that queue.")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 is torch's own choice.")] = 0,
    seed: Seed = 0,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Write both curves here, as PNG.")] = None,
) -> None:
    """What does a decode step cost with more sequences, with longer ones, and with a long queue behind it?"""
    from inflight.bench.plots import require_matplotlib
    from inflight.bench.scaling import ScalingBench, measure_scaling, plot_scaling, scaling_table

    with _reported():
        if plot:
            require_matplotlib()
        settings = ScalingBench(
            model=model,
            device=device.value,
            dtype=dtype.value,
            sequences=_numbers("--sequences", sequences),
            prompt_tokens=prompt_tokens,
            contexts=_numbers("--contexts", contexts),
            tokens=tokens,
            queued=queued,
            pairs=pairs,
            threads=threads,
            seed=seed,
        )
        with console.status("") as status:
            result = measure_scaling(settings, status.update)
    console.print(scaling_table(result))
    if plot:
        plot_scaling(plot, result)
    _finish_bench(result, json_file)


@bench.command()
def learning(
    model: Model = "tiny",
    device: OnDevice = Device.auto,
    dtype: OfWeights = Dtype.auto,
    modes: Annotated[str, typer.Option(help="Schedules to compare.")] = "inflight,sync,one_step_off",
    seeds: Annotated[str, typer.Option(help="Each with a warm-up from which all of its runs begin.")] = "0,1,2",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of a run.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Rollouts of a step, in groups of 8.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Of an answer at most; 0: what the task needs.")] = 0,
    correction: Annotated[str, typer.Option(help="For tokens of older versions, in all modes.")] = "tis",
    learning_rate: Annotated[float | None, typer.Option(min=0, help="Its peak.")] = None,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Supervised steps, for built-in shapes.")] = 250,
    warmup_learning_rate: Annotated[float, typer.Option(min=0, help="Its peak in those steps.")] = 2e-3,
    demonstrations: Annotated[int, typer.Option(min=1, help="Worked examples that those steps see.")] = 300,
    target: Annotated[
        float | None, typer.Option(min=0, help="A reward; by default 0.9 of the least final reward of the modes.")
    ] = None,
    lags: Annotated[
        str | None, typer.Option(help="In place of modes: corrections at these forced version lags, as in 1,4,16.")
    ] = None,
    corrections: Annotated[str, typer.Option(help="With --lags.")] = "none,tis,icepop,ppo_clip,gspo,second_moment",
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves of the reward here, as PNG.")] = None,
) -> None:
    """How soon does reward rise, with a generator that never stops and with schedules in which it does?"""
    from inflight.bench import learning as modes_bench
    from inflight.bench import learning_lags as lags_bench
    from inflight.bench.learning_plots import plot_lags, plot_learning
    from inflight.bench.learning_run import LearningBench
    from inflight.bench.plots import require_matplotlib

    with _reported():
        if plot:
            require_matplotlib()
        given = {"steps": steps, "sequences": sequences, "learning_rate": learning_rate}
        defaults = lags_bench.DEFAULTS if lags else {}
        settings = LearningBench(
            model=model,
            device=device.value,
            dtype=dtype.value,
            modes=_names(modes),
            seeds=_numbers("--seeds", seeds, least=0),
            tokens=tokens,
            correction=correction,
            warmup_steps=warmup_steps,
            warmup_learning_rate=warmup_learning_rate,
            demonstrations=demonstrations,
            target=target,
            **defaults | {name: value for name, value in given.items() if value is not None},
        )
        with console.status("") as status:
            if lags:
                ablation = lags_bench.LagBench(
                    lags=_numbers("--lags", lags, least=0), corrections=_names(corrections), learning=settings
                )
                result = lags_bench.measure_lags(ablation, status.update)
            else:
                result = modes_bench.measure_learning(settings, status.update)
    console.print(lags_bench.lags_table(result) if lags else modes_bench.learning_table(result))
    if plot:
        (plot_lags if lags else plot_learning)(plot, result)
    _finish_bench(result, json_file, printed=modes_bench.without_curves(result))


@bench.command()
def loss(
    device: OnDevice = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="Of hidden states and weight.")] = Dtype.auto,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of hidden states.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1)] = 512,
    vocab: Annotated[int, typer.Option(min=2)] = 32_768,
    kept: Annotated[int, typer.Option(min=0, help="Tokens in the kept set of each row; 0: no kept sets.")] = 0,
    pairs: Annotated[int, typer.Option(min=1, help="Alternated runs of ours and the naive way.")] = 5,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """What do log-probabilities cost without holding the logits?"""
    from inflight.bench.loss import LossBench, loss_table, measure_loss

    with _reported():
        settings = LossBench(
            device=device.value,
            dtype=dtype.value,
            tokens=tokens,
            hidden=hidden,
            vocab=vocab,
            kept=kept,
            pairs=pairs,
            seed=seed,
        )
        with console.status("") as status:
            result = measure_loss(settings, status.update)
    console.print(loss_table(result))
    _finish_bench(result, json_file)


@bench.command()
def trace(
    model: Model = "tiny",
    device: OnDevice = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights, the engine's and the trainer's.")] = Dtype.auto,
    sequences: Annotated[int, typer.Option(min=4, help="Drawn at a time, and consumed per step.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Drawn per sequence.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    seconds: Annotated[float, typer.Option(min=0.01, help="Traced.")] = 2.0,
    warmup_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps before that.")] = 5,
    micro_batch_tokens: Annotated[int, typer.Option(min=0, help="Of a training pass at most; 0: no bound.")] = 8192,
    out: Annotated[Path, typer.Option(help="The trace: .json or .json.gz.")] = Path("trace.json.gz"),
    details: Annotated[bool, typer.Option(help="Every torch operator and CUDA call too.")] = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """What do decoding, publishing and training do at the same time? Writes a trace for ui.perfetto.dev."""
    from inflight.bench.trace import TraceBench, measure_trace, trace_table

    with _reported():
        settings = TraceBench(
            model=model,
            device=device.value,
            dtype=dtype.value,
            sequences=sequences,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            seconds=seconds,
            warmup_steps=warmup_steps,
            micro_batch_tokens=micro_batch_tokens,
            out=str(out),
            details=details,
            seed=seed,
        )
        with console.status("") as status:
            result = measure_trace(settings, status.update)
    console.print(trace_table(result))
    _finish_bench(result, json_file)


@app.command()
def doctor() -> None:
    """What this machine can do, and what to change."""
    from inflight.doctor import print_report

    raise typer.Exit(print_report(console))


class _reported:
    """Errors that a user can cause are told in a sentence, without a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (InflightError, ValueError, OSError)):
            errors.print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(2) from error
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(130) from error


def _print_summary(summary: dict, out: Path) -> None:
    def number(value: float | None, form: str = "{:.3f}") -> str:
        return "–" if value is None else form.format(value)

    def spread(name: str) -> str:
        values = summary.get(name) or {}
        return " / ".join(f"{key} {value:,.2f}" for key, value in values.items()) or "–"

    before, after = summary["accuracy_before"], summary["accuracy_after"]
    console.print()
    if summary["interrupted"]:
        console.print(f"interrupted after {summary['steps']} steps")
    console.print(f"held-out accuracy  {number(before)} before, {number(after)} after reinforcement learning")
    console.print(f"swaps              {summary['num_swaps']}, of which {summary['num_swaps_in_flight']} in flight")
    console.print(f"swap_ms            {spread('swap_ms')}")
    console.print(f"weight_lag_ms      {spread('weight_lag_ms')}")
    console.print(f"token_age_ms       {spread('token_age_ms')}")
    console.print(f"version_lag        {spread('version_lag')}")
    console.print(
        f"time               {summary['seconds']:.0f} s, {number(summary['seconds_rl'], '{:.0f}')} s of them RL"
    )
    console.print(f"written            {out}/steps.jsonl, summary.json, demo.png")


def _finish_bench(result: dict, json_file: Path | None, *, printed: dict | None = None) -> None:
    """Write the result, and print it or a shorter one."""
    from inflight.observability.environment import environment, write_json

    if json_file:
        with _reported():
            write_json(json_file, result | {"environment": environment()})
    _print_json(printed or result)


def _names(text: str) -> tuple[Any, ...]:
    """ "none, tis" as names, each once; whoever takes them checks that they exist."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(option: str, text: str, *, least: int = 1) -> tuple[int, ...]:
    """ "1,8,32" as numbers. Raises ValueError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        kind = "positive numbers" if least else "numbers"
        raise ValueError(f"{option} must be one or more {kind} such as 1,8,32, got {text!r}")
    return numbers


def _lengths(option: str, text: str) -> tuple[int, int]:
    """ "128" or "100-1024" as the least and the most. Raises ValueError."""
    first, _, last = text.partition("-")
    try:
        least, most = int(first), int(last or first)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise ValueError(f"{option} must be a positive number or two that rise, such as 100-1024, got {text!r}")
    return least, most


def _print_json(result: dict) -> None:
    """The last line of output, for programs."""
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}), flush=True)


if __name__ == "__main__":
    app()
