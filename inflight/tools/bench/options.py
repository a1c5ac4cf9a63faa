"""Options of every benchmark. Importing this module loads nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from inflight.core.option import DeviceName, option
from inflight.tools.command_line import ModelChoice

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice(ModelChoice):
    """Model, device and dtype of an engine, and the seed."""

    dtype: DtypeName = option("auto", panel="Model")
    """Dtype of the engine's weights."""
    seed: int = option(0, min=0)
    """Seed of weights, data and draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice(EngineChoice):
    """Engine with a choice of generators."""

    backend: Literal["inflight", "vllm"] = option("inflight", panel="Model")
    """Generator. vllm is the one of `make peers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(BackendChoice):
    """Measure the tokens per second of the engine, and of another engine on the same weights."""

    sequences: tuple[int, ...] = option((32,))
    """Sequences drawn at a time. Several numbers, as in 1,8,32, make a sweep."""
    tokens: tuple[int, int] = option((128, 128))
    """Tokens per sequence. A range, as in 100-1024, is sampled uniformly."""
    prompt_tokens: tuple[int, int] = option((32, 32))
    """Tokens of each prompt. A range, as in 100-1024, is sampled uniformly."""
    backlog: int = option(0, min=0)
    """Draw this many times as many sequences, in groups of 8 with one prompt each that end independently, so that
    others wait in the queue. 0: draw all sequences together."""
    peer: Literal["vllm"] | None = option(None)
    """Engine to measure alternately with ours."""
    pairs: int = option(3, min=1)
    """Number of alternated pairs of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice(BackendChoice):
    """Engine, and its load while weights are published."""

    sequences: int = option(32, min=1)
    """Sequences drawn at a time."""
    tokens: int = option(64, min=1)
    """Tokens per sequence."""
    prompt_tokens: int = option(32, min=1)
    """Length of every prompt, in tokens."""
    slots: int = option(2, min=1, max=8)
    """Copies of the weights in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions(LoadChoice):
    """Measure the effect of new weights on a running generator."""

    masters: DtypeName = option("auto", panel="Model")
    """Dtype of the trainer's parameters. auto: the dtype of the engine."""
    tokens: int = option(512, min=64)
    """Tokens per sequence. Then all sequences start again."""
    publishes: int = option(200, min=1)
    """Minimum number of publishes."""
    window: int = option(5, min=1)
    """Publishes in a row, before passes without any as a comparison."""
    busy_publishes: int = option(0, min=0)
    """Minimum number of publishes while the trainer computes without a pause."""
    peer: Literal["vllm"] | None = option(None)
    """Engine whose pause, load and resume are measured in the same run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessOptions(LoadChoice):
    """Measure the age of tokens at the optimizer step that uses them (docs/staleness.md)."""

    steps: int = option(40, min=1)
    """Optimizer steps to measure. Each uses `sequences` sequences, a multiple of 4."""
    mode: str = option("inflight")
    """Schedule of generation: during training (inflight), one batch ahead (one_step_off), alternately with training
    (sync), or a custom schedule (module:name)."""
    ahead: str = option("auto", metavar="N|auto")
    """Lead of the generator with mode inflight: as little as the trainer needs (auto), or this number of batches."""
    publish_every: int = option(1, min=1)
    """Optimizer steps from one publish to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesOptions(EngineChoice):
    """Measure the tokens per second of episodes with tools, and of the same turns without tools."""

    episodes: int = option(256, min=1)
    """Episodes in progress. Three times as many are run."""
    turns: int = option(3, min=2)
    """Drawn turns of each episode, with a tool between two turns."""
    sequences: int = option(64, min=1)
    """Sequences drawn at a time."""
    tokens: int = option(64, min=1)
    """Tokens of each turn."""
    prompt_tokens: int = option(128, min=1)
    """Length of the first message, in tokens."""
    tool_tokens: int = option(16, min=1)
    """Length of a tool's result, in tokens."""
    tool_s: tuple[float, float] = option((0.05, 5.0))
    """Time of each call of a tool, in seconds. A range, as in 0.05-5, is sampled uniformly on a logarithmic scale."""
    publish_s: float = option(1.0, min=0)
    """Time from one publish to the next, in seconds. 0: publish nothing."""
    pairs: int = option(3, min=1)
    """Number of alternated pairs of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Measure the tokens per second from an engine's loop to a trainer."""

    tokens_per_frame: int = option(64, min=1)
    """Tokens of a frame: one for each sequence that decodes."""
    tokens: int = option(512, min=1)
    """Tokens of each sequence. The first sequences are shorter, so that sequences end at different times."""
    seconds: float = option(10.0, min=0.1)
    """Duration of the measurement, in seconds."""
    journal: bool = option(False)
    """Write a journal in the temporary directory."""
    seed: int = option(0, min=0)
    """Seed of the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Measure the host time of a decoding pass, with a device that takes no time."""

    model: str = option("tiny")
    """Built-in shape, directory or Hugging Face hub id, of an architecture that runs fused on a CPU."""
    sequences: tuple[int, ...] = option((64, 256))
    """Sequences drawn at a time. Several numbers make a sweep."""
    steps: int = option(500, min=1)
    """Number of timed passes."""
    prompt_tokens: tuple[int, int] = option((100, 1024))
    """Tokens of each prompt. A range, as in 100-1024, is sampled uniformly."""
    backlog: int = option(0, min=0)
    """Mean number of tokens of samples in groups of 8, while others wait in the queue; all passes are timed. 0: time
    passes in which no sequence starts or ends."""
    seed: int = option(0, min=0)
    """Seed of weights, data and draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningOptions(ModelChoice):
    """Compare the time to a reward between a generator that never stops and other schedules."""

    dtype: DtypeName = option("auto", panel="Model")
    """Dtype of the engine's weights."""
    modes: tuple[str, ...] = option(("inflight", "sync", "one_step_off"))
    """Schedules to compare."""
    seeds: tuple[int, ...] = option((0, 1, 2), min=0)
    """Seeds. Each has one warm-up, and all its runs start from there."""
    steps: int = option(200, min=1)
    """Optimizer steps of a run."""
    sequences: int = option(512, min=1)
    """Rollouts of an optimizer step, in groups of 8. A multiple of 8."""
    tokens: int = option(0, min=0)
    """Maximum number of tokens of an answer. 0: the length of the longest answer of the task."""
    objective: str = option("ppo_clip")
    """Objective of all modes. It corrects for tokens of older versions."""
    learning_rate: float = option(3e-4, min=0)
    """Peak learning rate of reinforcement learning."""
    warmup_steps: int = option(250, min=0)
    """Supervised steps before reinforcement learning, for built-in shapes only."""
    warmup_learning_rate: float = option(2e-3, min=0)
    """Peak learning rate of the supervised steps."""
    demonstrations: int = option(300, min=1)
    """Worked examples of the supervised steps, each seen many times. A large model memorizes a small number of examples
    and learns nothing else."""
    target: float | None = option(None, min=0, shown="0.9 of the lowest final reward of the modes, per seed")
    """Reward for the time measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Measure log-probabilities that are computed without storing the logits."""

    device: DeviceName = option("auto", panel="Model")
    """Device of all tensors."""
    dtype: DtypeName = option("auto", panel="Model")
    """Dtype of hidden states and output weight."""
    hidden: int = option(512, min=1, panel="Model")
    """Width of a hidden state."""
    vocab: int = option(32_768, min=2, panel="Model")
    """Size of the vocabulary."""
    tokens: int = option(4096, min=1)
    """Number of tokens: rows of hidden states."""
    sampling_mask: int = option(0, min=0)
    """Tokens in the sampling mask of each row. 0: no sampling masks."""
    pairs: int = option(5, min=1)
    """Number of alternated pairs of runs."""
    seed: int = option(0, min=0)
    """Seed of all tensors."""
