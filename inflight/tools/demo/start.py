"""The model that the demo starts from: a checkpoint in the package, made by the supervised phase with `RECIPE`.

`python benchmarks/demo_start.py` makes it again. With it, reinforcement learning begins seconds after the command.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from inflight.core.errors import ModelLoadError
from inflight.tools.demo.options import DemoOptions
from inflight.tools.demo.trainer import WarmupConfig

START_FILE = Path(__file__).with_name("start.safetensors")
MODEL, TASK = "tiny", "spell_backward"
RECIPE = WarmupConfig(steps=250, seed=0)
PROMPT_TOKENS, ANSWER_TOKENS = 14, 12
"""Maximum numbers of tokens of a prompt of the task, a word of ten letters and an arrow, and of an answer."""


def starts_from_file(options: DemoOptions) -> bool:
    """Return whether a run begins with the checkpoint: with the demo's own model and task, and no `--warmup-steps`."""
    own_task = options.data is None and options.task == TASK and not options.real
    return options.model == MODEL and own_task and options.warmup_steps is None


def load_start(model: nn.Module, path: Path = START_FILE) -> None:
    """Copy the checkpoint into the model. Raises ModelLoadError if the model has other tensors."""
    with safe_open(path, "pt") as file, torch.no_grad():
        parameters = dict(model.named_parameters())
        if set(parameters) != set(file.keys()):
            names = ", ".join(sorted(set(parameters) ^ set(file.keys())))
            raise ModelLoadError(f"{path} does not fit the model, these tensors are only in one of them: {names}")
        for name, parameter in parameters.items():
            parameter.copy_(file.get_tensor(name))
