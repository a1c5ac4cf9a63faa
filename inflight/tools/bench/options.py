"""The settings of every benchmark, each of which is its command line too (`inflight.tools.command_line`).

The docstring of a class is what `inflight bench NAME --help` begins with. Importing this module loads nothing heavy.
"""

from dataclasses import dataclass
from typing import Literal

from inflight.core.option import DEVICE_HELP, DeviceName, option
from inflight.tools.command_line import SEED_HELP, ModelChoice

BackendName = Literal["inflight", "vllm"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

SERVER = "A server"
PROMPT_HELP = "The length of every prompt, in tokens."
THREADS_HELP = "CPU threads of each engine; 0 leaves torch's own choice."
PAIRS_HELP = "How often the runs that are compared alternate."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice(ModelChoice):
    """The model, the device and the dtype of an engine."""

    dtype: DtypeName = option("auto", "The dtype of the engine's weights.", panel="Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice(EngineChoice):
    """The same, and what generates with them."""

    backend: BackendName = option("inflight", "What generates; vllm is that of `make peers`.", panel="Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(BackendChoice):
    """How many tokens per second does the engine draw, and how many does another engine draw on the same weights?"""

    sequences: tuple[int, ...] = option(
        (32,), "Sequences drawn at a time; several numbers, as in 1,8,32, make a sweep."
    )
    tokens: tuple[int, int] = option(
        (128, 128), "Tokens drawn per sequence; a range, as in 100-1024, draws it uniformly."
    )
    prompt_tokens: tuple[int, int] = option(
        (32, 32), "Tokens of each prompt; a range, as in 100-1024, draws it uniformly."
    )
    backlog: int = option(
        0,
        "Draw so many times as many sequences, in groups of 8 with one prompt each that end independently, so that "
        "others wait; 0 draws all of them together.",
        min=0,
    )
    peers: tuple[Literal["vllm", "transformers"], ...] = option(
        (), "An engine to measure in alternation with ours; may be given twice.", "--peer"
    )
    pairs: int = option(3, PAIRS_HELP, min=1)
    threads: int = option(0, THREADS_HELP, min=0)
    seed: int = option(0, SEED_HELP, min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions(BackendChoice):
    """What does a running generator feel of new weights?"""

    masters: DtypeName = option(
        "auto", "The dtype of the trainer's parameters; auto takes the engine's.", panel="Model"
    )
    sequences: int = option(32, "Sequences in flight while weights are published.", min=1)
    tokens: int = option(512, "Tokens drawn per sequence, after which all sequences begin anew.", min=64)
    prompt_tokens: int = option(32, PROMPT_HELP, min=1)
    publishes: int = option(200, "How often weights are published, at least.", min=1)
    window: int = option(5, "Publishes one after another, before passes without any to compare with.", min=1)
    busy_publishes: int = option(
        0, "How often weights are published, at least, while the trainer computes without a pause.", min=0
    )
    pieces_us: tuple[int, ...] = option(
        (0,),
        "The lengths, in µs, of the pieces in which they are copied then, one after another; 0 is one piece.",
        min=0,
    )
    slots: int = option(2, "Copies of the weights that the engine holds.", min=1, max=8)
    peer: Literal["vllm"] | None = option(None, "An engine whose pause, load and resume are measured in the same run.")
    seed: int = option(0, SEED_HELP, min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessOptions(BackendChoice):
    """How old are the tokens that an optimizer step consumes? docs/staleness.md tells what the measures mean.

    With --target it asks the same of any server that can be updated, ours or another one: clients draw from it while a
    trainer updates it at a fixed rate.
    """

    sequences: int = option(32, "Sequences drawn at a time, and consumed per step.", min=1)
    tokens: int = option(64, "Tokens drawn per sequence.", min=1)
    prompt_tokens: int = option(32, PROMPT_HELP, min=1)
    steps: int = option(40, "Optimizer steps that are measured, or updates of a server.", min=1)
    mode: str = option(
        "inflight",
        "When prompts are drawn: while the trainer trains (inflight), a batch ahead (one_step_off), alternately "
        "with training (sync), or by a custom schedule (module:name).",
    )
    publish_every: int = option(1, "Optimizer steps from one publish to the next.", min=1)
    slots: int = option(2, "Copies of the weights that the engine holds.", min=1)
    seed: int = option(0, SEED_HELP, min=0)
    target: str | None = option(
        None, "The URL of a server to measure; it must serve the model in --weights.", metavar="URL", panel=SERVER
    )
    weights: str = option(
        "runs/truth-teller",
        "A directory that the server can read, for a model of this shape whose tokens tell the version of its weights. "
        "It is written if it is not there.",
        metavar="DIR",
        panel=SERVER,
    )
    api: Literal["inflight", "vllm"] = option("inflight", "How the server is updated.", panel=SERVER)
    pause: str = option(
        "",
        "How the server is paused during an update: keep, wait or abort. Only inflight needs none.",
        shown="none",
        panel=SERVER,
    )
    interval_ms: float = option(500.0, "Milliseconds between two updates, if the server keeps up.", min=1, panel=SERVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How many tokens per second get from an engine's loop to a trainer?"""

    tokens_per_frame: int = option(64, "Tokens of a frame, which are sequences that decode together.", min=1)
    tokens: int = option(512, "Tokens of each sequence; the first ones are shorter, so that they end in turn.", min=1)
    seconds: float = option(10.0, "How long frames are sent.", min=0.1)
    journal: bool = option(False, "Whether the reader keeps a journal, in the temporary directory.")
    seed: int = option(0, SEED_HELP, min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What does a decoding pass cost the host, with a device that takes no time?"""

    model: str = option("tiny", "A built-in shape, a directory or a Hugging Face hub id, that runs fused on a CPU.")
    sequences: tuple[int, ...] = option((64, 256), "Sequences drawn at a time; several numbers make a sweep.")
    steps: int = option(500, "Passes that are timed.", min=1)
    prompt_tokens: tuple[int, int] = option(
        (100, 1024), "Tokens of each prompt; a range, as in 100-1024, draws it uniformly."
    )
    backlog: int = option(
        0,
        "Time all passes of groups of 8 whose samples end after so many tokens on average, while others wait; 0 times "
        "passes in which nothing joins or leaves.",
        min=0,
    )
    seed: int = option(0, SEED_HELP, min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningOptions(EngineChoice):
    """How soon does reward rise, with a generator that never stops and with schedules in which it does?

    With --lags it compares corrections instead, on tokens of a known age.
    """

    modes: tuple[str, ...] = option(("inflight", "sync", "one_step_off"), "The schedules to compare.")
    seeds: tuple[int, ...] = option((0, 1, 2), "Seeds; each has a warm-up from which all of its runs begin.", min=0)
    steps: int | None = option(None, "Optimizer steps of a run.", min=1, shown="200; 120 with --lags")
    sequences: int | None = option(
        None, "Rollouts of an optimizer step, in groups of 8.", min=1, shown="512; 256 with --lags"
    )
    tokens: int = option(0, "Tokens of an answer at most; 0 is what the task's longest answer needs.", min=0)
    objective: str = option(
        "ppo_clip",
        "The objective, which corrects for tokens of older versions, in all modes.",
        "--objective",
        "--correction",
    )
    learning_rate: float | None = option(
        None, "The peak learning rate of reinforcement learning.", min=0, shown="3e-4; 2e-4 with --lags"
    )
    warmup_steps: int = option(250, "Supervised steps before it; only built-in shapes take them.", min=0)
    warmup_learning_rate: float = option(2e-3, "The peak learning rate of the supervised steps.", min=0)
    demonstrations: int = option(
        300,
        "Worked examples that the supervised steps see, over and over. A large model learns a few by heart and nothing "
        "else.",
        min=1,
    )
    target: float | None = option(
        None,
        "The reward whose time is measured.",
        min=0,
        shown="0.9 of the least final reward of the modes, per seed",
    )
    lags: tuple[int, ...] = option(
        (), "Compare corrections at these forced ages of every token, in versions, as in 1,4,16.", min=0
    )
    corrections: tuple[str, ...] = option(
        ("none", "tis", "icepop", "ppo_clip", "gspo", "second_moment"), "The corrections that --lags compares."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What do log-probabilities cost without holding the logits?"""

    device: DeviceName = option("auto", DEVICE_HELP, panel="Model")
    dtype: DtypeName = option("auto", "The dtype of hidden states and output weight.", panel="Model")
    hidden: int = option(512, "The width of a hidden state.", min=1, panel="Model")
    vocab: int = option(32_768, "The size of the vocabulary.", min=2, panel="Model")
    tokens: int = option(4096, "Tokens, which are rows of hidden states.", min=1)
    sampling_mask: int = option(0, "Tokens in the sampling mask of each row; 0 leaves sampling masks out.", min=0)
    pairs: int = option(5, PAIRS_HELP, min=1)
    seed: int = option(0, SEED_HELP, min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(EngineChoice):
    """What do decoding, publishing and training do at the same time? Writes a trace for ui.perfetto.dev."""

    dtype: DtypeName = option("auto", "The dtype of the weights of both engine and trainer.", panel="Model")
    sequences: int = option(32, "Sequences drawn at a time, and consumed per step.", min=4)
    tokens: int = option(128, "Tokens drawn per sequence.", min=1)
    prompt_tokens: int = option(32, PROMPT_HELP, min=1)
    seconds: float = option(2.0, "How many seconds are traced.", min=0.01)
    warmup_steps: int = option(5, "Optimizer steps before the trace begins.", min=1)
    micro_batch_tokens: int = option(8192, "Tokens of a training pass at most; 0 sets no bound.", min=0)
    out: str = option(
        "trace.json.gz",
        "The file of the trace, which ends in .json or .json.gz.",
        metavar="PATH",
        panel="Output",
    )
    details: bool = option(False, "Trace every torch operator and CUDA call too.")
    seed: int = option(0, SEED_HELP, min=0)
