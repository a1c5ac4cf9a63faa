"""The settings of `inflight demo`, which are its command line too (`inflight.tools.command_line`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inflight.core.option import option
from inflight.tools.command_line import SEED_HELP, ModelChoice
from inflight.tools.watch.options import PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions(ModelChoice):
    """Run the whole loop on this machine: improve a small model while the generator never stops."""

    real: bool = option(
        False,
        "Train SmolLM2-135M-Instruct, a real language model, to answer questions in one word.",
    )
    task: str = option("spell_backward", "The task of reasoning-gym to learn.", panel="Task")
    data: Path | None = option(
        None, 'A file to learn instead of a task: JSON lines, each {"prompt": …, "answer": …}.', panel="Task"
    )
    max_tokens: int | None = option(
        None, "Tokens of an answer at most.", min=1, shown="what the task needs, or 64", panel="Task"
    )
    steps: int | None = option(
        None, "Optimizer steps of reinforcement learning.", min=1, shown="180, or 40 with --real"
    )
    warmup_steps: int | None = option(
        None,
        "Supervised steps before them, from random weights.",
        min=0,
        shown="a checkpoint instead for the demo's own model and task, 250 for others that are built in, else 0",
    )
    backend: Literal["inflight", "vllm"] = option(
        "inflight", "What generates; vllm is one that is installed, or that of `make peers`.", panel="Model"
    )
    sync: bool = option(False, "Generate and train in turn, for comparison.")
    group_size: int = option(8, "Samples per prompt.", min=2)
    groups_per_step: int | None = option(None, "Prompts per optimizer step.", min=1, shown="64, or 8 with --real")
    learning_rate: float | None = option(
        None, "The peak learning rate of reinforcement learning.", min=0, shown="0.0004, or 0.0001 with --real"
    )
    seed: int = option(0, SEED_HELP, min=0)
    restarts: int = option(3, "How often an engine that ends is replaced by another one.", min=0)
    out: Path | None = option(
        None,
        "The directory for steps.jsonl, events.jsonl, summary.json and demo.png.",
        shown="runs/TASK-MODE-TIME",
        panel="Output",
    )
    web: bool = option(False, "Show the run on a page that keeps up with it, on this machine.", panel="Output")
    web_port: int = option(
        PORT, "The port of that page; 0 lets the system choose one.", min=0, max=65535, panel="Output"
    )
    save_every: int = option(
        20,
        "Steps between two checkpoints in that directory; the last step has one, too. 0: none.",
        min=0,
        panel="Output",
    )
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = option(
        "none",
        "Where every number of every step goes besides, if its library is installed: TensorBoard and offline runs of "
        "Weights & Biases into the directory, trackio to where it keeps its runs.",
        panel="Output",
    )
    resume: Path | None = option(
        None,
        "The directory of a run that was killed or interrupted, to go on from its newest checkpoint. All other options "
        "are those of that run, but for --device, --web and --json.",
        metavar="DIR",
        panel="Output",
    )
