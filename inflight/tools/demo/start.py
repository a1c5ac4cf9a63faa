"""The model that the demo starts from: a checkpoint in the package, made by the supervised phase with `RECIPE`.

`python benchmarks/demo_start.py` makes it again. With it, reinforcement learning begins seconds after the command.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from inflight.core.errors import ModelLoadError
from inflight.core.files import replacing
from inflight.tools.demo.options import DemoOptions
from inflight.tools.demo.tasks import Task
from inflight.tools.demo.trainer import WarmupConfig, warm_up

START_FILE = Path(__file__).with_name("start.safetensors")
MODEL, TASK = "tiny", "spell_backward"
RECIPE = WarmupConfig(steps=250, seed=0)


def starts_from_file(options: DemoOptions) -> bool:
    """Return whether a run begins with the checkpoint: with the demo's own model and task, and no `--warmup-steps`."""
    own_task = options.data is None and options.task == TASK and not options.real
    return options.model == MODEL and own_task and options.warmup_steps is None


def write_start(
    path: Path,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    evaluate: Callable[[], float],
    recipe: WarmupConfig = RECIPE,
) -> None:
    """Train the model by the recipe and write it, with the recipe and its held-out accuracy as metadata."""
    for _ in warm_up(model, tokenizer, task.train, recipe):
        pass
    metadata = {"recipe": json.dumps(asdict(recipe)), "accuracy": str(evaluate()), "torch": torch.__version__}
    with replacing(path) as partial:
        save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, partial, metadata)


def load_start(model: nn.Module, path: Path = START_FILE) -> None:
    """Copy the checkpoint into the model. Raises ModelLoadError if the model has other tensors."""
    with safe_open(path, "pt") as file, torch.no_grad():
        parameters = dict(model.named_parameters())
        if set(parameters) != set(file.keys()):
            names = ", ".join(sorted(set(parameters) ^ set(file.keys())))
            raise ModelLoadError(f"{path} does not fit the model, these tensors are only in one of them: {names}")
        for name, parameter in parameters.items():
            parameter.copy_(file.get_tensor(name))


def start_metadata(path: Path = START_FILE) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()
