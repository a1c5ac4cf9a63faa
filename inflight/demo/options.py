"""The settings of `inflight demo`, which are its command line too (`inflight.command_line`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from inflight.command_line import Device, Model, Seed


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Run the whole loop on this machine: warm up a small model, then improve it while the generator never stops."""

    model: Model = "tiny"
    device: Device = "auto"
    task: Annotated[str, typer.Option(help="The task of reasoning-gym to learn.", rich_help_panel="Task")] = (
        "spell_backward"
    )
    data: Annotated[
        Path | None,
        typer.Option(
            help='A file to learn instead of a task: JSON lines, each {"prompt": …, "answer": …}.',
            rich_help_panel="Task",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of an answer at most.",
            show_default="what the task needs, or 64",
            rich_help_panel="Task",
        ),
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of reinforcement learning.")] = 200
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            min=0, help="Supervised steps before them.", show_default="250, or 0 for a model that is not built in"
        ),
    ] = None
    sync: Annotated[bool, typer.Option(help="Generate and train in turn, for comparison.")] = False
    group_size: Annotated[int, typer.Option(min=2, help="Samples per prompt.")] = 8
    groups_per_step: Annotated[int, typer.Option(min=1, help="Prompts per optimizer step.")] = 128
    learning_rate: Annotated[float, typer.Option(min=0, help="The peak learning rate of reinforcement learning.")] = (
        3e-4
    )
    seed: Seed = 0
    out: Annotated[
        Path | None,
        typer.Option(
            help="The directory for steps.jsonl, summary.json and demo.png.",
            show_default="runs/TASK-MODE-TIME",
            rich_help_panel="Output",
        ),
    ] = None
