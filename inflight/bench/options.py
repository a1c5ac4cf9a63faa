"""The settings of every benchmark, each of which is its command line too (`inflight.command_line`).

The docstring of a class is what `inflight bench NAME --help` begins with. Importing this module loads nothing heavy.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from inflight.command_line import Device, Model, Seed

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[DtypeName, typer.Option(help="The dtype of the engine's weights.", rich_help_panel="Model")]
PromptTokens = Annotated[int, typer.Option(min=1, help="The length of every prompt, in tokens.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads of each engine; 0 leaves torch's own choice.")]
Pairs = Annotated[int, typer.Option(min=1, help="How often the runs that are compared alternate.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """How many tokens per second does the engine draw, and how many does another engine draw on the same weights?"""

    model: Model = "tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"
    sequences: Annotated[
        tuple[int, ...], typer.Option(help="Sequences drawn at a time; several numbers, as in 1,8,32, make a sweep.")
    ] = (32,)
    tokens: Annotated[
        tuple[int, int], typer.Option(help="Tokens drawn per sequence; a range, as in 100-1024, draws it uniformly.")
    ] = (128, 128)
    prompt_tokens: Annotated[
        tuple[int, int], typer.Option(help="Tokens of each prompt; a range, as in 100-1024, draws it uniformly.")
    ] = (32, 32)
    peers: Annotated[
        tuple[Literal["vllm", "transformers"], ...],
        typer.Option("--peer", help="An engine to measure in alternation with ours; may be given twice."),
    ] = ()
    pairs: Pairs = 3
    threads: Threads = 0
    seed: Seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions:
    """What does a running generator feel of new weights?"""

    model: Model = "tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"
    masters: Annotated[
        DtypeName,
        typer.Option(help="The dtype of the trainer's parameters; auto takes the engine's.", rich_help_panel="Model"),
    ] = "auto"
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in flight while weights are published.")] = 32
    tokens: Annotated[
        int, typer.Option(min=64, help="Tokens drawn per sequence, after which all sequences begin anew.")
    ] = 512
    prompt_tokens: PromptTokens = 32
    publishes: Annotated[int, typer.Option(min=1, help="How often weights are published, at least.")] = 200
    window: Annotated[
        int, typer.Option(min=1, help="Publishes one after another, before passes without any to compare with.")
    ] = 5
    slots: Annotated[int, typer.Option(min=1, max=8, help="Copies of the weights that the engine holds.")] = 2
    peer: Annotated[
        Literal["vllm"] | None,
        typer.Option(help="An engine whose pause, load and resume are measured in the same run."),
    ] = None
    seed: Seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessOptions:
    """How old are the tokens that an optimizer step consumes? docs/staleness.md tells what the measures mean."""

    model: Model = "tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"
    sequences: Annotated[int, typer.Option(min=1, help="Sequences drawn at a time, and consumed per step.")] = 32
    tokens: Annotated[int, typer.Option(min=1, help="Tokens drawn per sequence.")] = 64
    prompt_tokens: PromptTokens = 32
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, each followed by a publish.")] = 40
    slots: Annotated[int, typer.Option(min=1, help="Copies of the weights that the engine holds.")] = 2
    seed: Seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """What does a decode step cost with more sequences, with longer ones, and with a long queue behind it?"""

    model: Model = "tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"
    sequences: Annotated[tuple[int, ...], typer.Option(help="Numbers of sequences to measure a decode step with.")] = (
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
    )
    prompt_tokens: Annotated[int, typer.Option(min=1, help="The context of each of those sequences, in tokens.")] = 256
    contexts: Annotated[
        tuple[int, ...], typer.Option(help="Lengths of context to measure a decode step of 16 sequences with.")
    ] = (64, 128, 256, 512, 1024, 2048)
    tokens: Annotated[int, typer.Option(min=1, help="Decode steps that are measured at each point.")] = 32
    queued: Annotated[int, typer.Option(min=0, help="Requests that wait in the queue; 0 leaves this part out.")] = (
        10_000
    )
    pairs: Annotated[int, typer.Option(min=1, help="How often runs without and with that queue alternate.")] = 5
    threads: Threads = 0
    seed: Seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningOptions:
    """How soon does reward rise, with a generator that never stops and with schedules in which it does?

    With --lags it compares corrections instead, on tokens of a known age.
    """

    model: Model = "tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"
    modes: Annotated[tuple[str, ...], typer.Option(help="The schedules to compare.")] = (
        "inflight",
        "sync",
        "one_step_off",
    )
    seeds: Annotated[
        tuple[int, ...], typer.Option(min=0, help="Seeds; each has a warm-up from which all of its runs begin.")
    ] = (0, 1, 2)
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps of a run.", show_default="200; 120 with --lags")
    ] = None
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Rollouts of an optimizer step, in groups of 8.", show_default="512; 256 with --lags"),
    ] = None
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of an answer at most; 0 is what the task's longest answer needs.")
    ] = 0
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            "--correction",
            help="The objective, which corrects for tokens of older versions, in all modes.",
        ),
    ] = "tis"
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0, help="The peak learning rate of reinforcement learning.", show_default="3e-4; 2e-4 with --lags"
        ),
    ] = None
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Supervised steps before it; only built-in shapes take them.")
    ] = 250
    warmup_learning_rate: Annotated[
        float, typer.Option(min=0, help="The peak learning rate of the supervised steps.")
    ] = 2e-3
    demonstrations: Annotated[
        int,
        typer.Option(
            min=1,
            help="Worked examples that the supervised steps see, over and over. A large model learns a few by heart "
            "and nothing else.",
        ),
    ] = 300
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="The reward whose time is measured.",
            show_default="0.9 of the least final reward of the modes, per seed",
        ),
    ] = None
    lags: Annotated[
        tuple[int, ...],
        typer.Option(min=0, help="Compare corrections at these forced ages of every token, in versions, as in 1,4,16."),
    ] = ()
    corrections: Annotated[tuple[str, ...], typer.Option(help="The corrections that --lags compares.")] = (
        "none",
        "tis",
        "icepop",
        "ppo_clip",
        "gspo",
        "second_moment",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What do log-probabilities cost without holding the logits?"""

    device: Device = "auto"
    dtype: Annotated[
        DtypeName, typer.Option(help="The dtype of hidden states and output weight.", rich_help_panel="Model")
    ] = "auto"
    hidden: Annotated[int, typer.Option(min=1, help="The width of a hidden state.", rich_help_panel="Model")] = 512
    vocab: Annotated[int, typer.Option(min=2, help="The size of the vocabulary.", rich_help_panel="Model")] = 32_768
    tokens: Annotated[int, typer.Option(min=1, help="Tokens, which are rows of hidden states.")] = 4096
    kept: Annotated[
        int, typer.Option(min=0, help="Tokens in the sampling mask of each row; 0 leaves sampling masks out.")
    ] = 0
    pairs: Pairs = 5
    seed: Seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What do decoding, publishing and training do at the same time? Writes a trace for ui.perfetto.dev."""

    model: Model = "tiny"
    device: Device = "auto"
    dtype: Annotated[
        DtypeName,
        typer.Option(help="The dtype of the weights of both engine and trainer.", rich_help_panel="Model"),
    ] = "auto"
    sequences: Annotated[int, typer.Option(min=4, help="Sequences drawn at a time, and consumed per step.")] = 32
    tokens: Annotated[int, typer.Option(min=1, help="Tokens drawn per sequence.")] = 128
    prompt_tokens: PromptTokens = 32
    seconds: Annotated[float, typer.Option(min=0.01, help="How many seconds are traced.")] = 2.0
    warmup_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps before the trace begins.")] = 5
    micro_batch_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a training pass at most; 0 sets no bound.")
    ] = 8192
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="The file of the trace, which ends in .json or .json.gz.", rich_help_panel="Output"
        ),
    ] = "trace.json.gz"
    details: Annotated[bool, typer.Option(help="Trace every torch operator and CUDA call too.")] = False
    seed: Seed = 0
