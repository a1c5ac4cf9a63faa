"""Options of `inflight demo`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inflight.core.option import option
from inflight.tools.command_line import ModelChoice
from inflight.tools.watch.options import PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions(ModelChoice):
    """Run the whole loop on this machine: improve a small model while the generator never stops."""

    real: bool = option(False)
    """Train SmolLM2-135M-Instruct, a real language model, to answer questions in one word."""
    task: str = option("spell_backward", panel="Task")
    """Task of reasoning-gym to learn."""
    data: Path | None = option(None, panel="Task")
    """File to learn from instead of a task: JSON lines, each {"prompt": …, "answer": …}."""
    max_tokens: int | None = option(None, min=1, shown="what the task needs, or 64", panel="Task")
    """Maximum number of tokens of an answer."""
    steps: int | None = option(None, min=1, shown="180, or 80 with --real")
    """Optimizer steps of reinforcement learning."""
    warmup_steps: int | None = option(
        None,
        min=0,
        shown="a checkpoint instead for the demo's own model and task, 250 for others that are built in, else 0",
    )
    """Supervised steps before reinforcement learning, from random weights."""
    backend: Literal["inflight", "vllm"] = option("inflight", panel="Model")
    """Generator. vllm is an installed vLLM, or the one of `make peers`."""
    sync: bool = option(False)
    """Generate and train alternately, for comparison."""
    ahead: str = option("auto", metavar="N|auto")
    """Lead of the generator: as little as the trainer needs (auto), or this number of batches."""
    group_size: int = option(8, min=2)
    """Samples per prompt."""
    groups_per_step: int | None = option(None, min=1, shown="64, or 2 with --real")
    """Prompts per optimizer step."""
    learning_rate: float | None = option(None, min=0, shown="0.0004, or 0.0001 with --real")
    """Peak learning rate of reinforcement learning."""
    seed: int = option(0, min=0)
    """Seed of weights, data and draws."""
    restarts: int = option(3, min=0)
    """Maximum number of restarts of the engine."""
    out: Path | None = option(None, shown="runs/TASK-MODE-TIME", panel="Output")
    """Directory for steps.jsonl, events.jsonl, summary.json, demo.png and checkpoints. A run of the demo in it is
    replaced, unless `resume` names it."""
    web: bool = option(False, panel="Output")
    """Show the run on a live page on this machine."""
    web_port: int = option(PORT, min=0, max=65535, panel="Output")
    """Port of that page. 0: the system chooses one."""
    save_every: int = option(20, min=0, panel="Output")
    """Steps between two checkpoints in that directory. The last step has one, too. 0: no checkpoints."""
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = option("none", panel="Output")
    """Library that also receives all metrics, if it is installed. TensorBoard and offline runs of Weights & Biases
    write into the directory of the run, and trackio into its own."""
    resume: Path | None = option(None, metavar="DIR", panel="Output")
    """Directory of a killed or interrupted run to continue from its newest checkpoint. Its options are used again,
    except --device, --web, --web-port and --json. --steps makes the run longer."""
