"""The trainer's side of a loop on this machine: its model, and its share of the cores."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from inflight.core.errors import ModelLoadError
from inflight.engine.loading import load_tokenizer
from inflight.engine.shapes import SHAPES, shape_config


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads of each side; 0 for the engine leaves torch's own choice."""

    trainer: int
    engine: int


def split_cores(device: torch.device) -> Threads:
    """Give trainer and engine half of the cores each; on a GPU the trainer keeps them all."""
    cores = torch.get_num_threads()
    return Threads(cores, 0) if device.type == "cuda" else Threads(max(1, cores // 2), max(1, cores - cores // 2))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads in this process for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Spare publishes the quarter of a second that a full garbage collection takes now and then."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # some libraries report what is never collected as leaked when the process ends


def load_trainer(name: str, device: torch.device) -> PreTrainedModel:
    """Load the trainer's model in fp32, with gradients. Raises ModelLoadError."""
    if name in SHAPES:
        with torch.device(device):  # random numbers for billions of weights take minutes on a CPU
            return AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.float32)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load model {name!r}: {str(error).splitlines()[0]}") from error
    nn.Module.to(model, device)
    return model


def require_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Raises ModelLoadError if it has none."""
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise ModelLoadError(f"model {name!r} has no tokenizer, which the demo needs to read and write text")
    return tokenizer
