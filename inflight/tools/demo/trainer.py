"""The trainer's side of a loop on this machine: its share of the cores, its model, and the short supervised phase that
gives a small model something for reinforcement learning to improve."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from inflight.core.errors import FileWriteError, ModelLoadError
from inflight.core.files import file_errors
from inflight.engine.model.checkpoints import load_checkpoint
from inflight.engine.model.loading import load_config, load_tokenizer
from inflight.engine.model.shapes import SHAPES
from inflight.training.model.forward import bf16_on_gpu
from inflight.training.schedules import Example


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads of each side; 0 for the engine: the default of torch."""

    trainer: int
    engine: int


LARGE_MODEL = 10_000_000
"""Number of parameters above which a trainer is faster with all cores, although the engine needs some of them
(docs/performance.md)."""


def split_cores(device: torch.device, model: nn.Module | None = None) -> Threads:
    """Give the engine half of the cores. The trainer of a large model gets all of them, other trainers the other half.
    On a GPU the trainer keeps all cores."""
    cores = torch.get_num_threads()
    if device.type == "cuda":
        return Threads(cores, 0)
    is_large = model is not None and sum(p.numel() for p in model.parameters()) >= LARGE_MODEL
    return Threads(cores if is_large else max(1, cores // 2), max(1, cores - cores // 2))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads of this process until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_trainer(name: str, device: torch.device) -> PreTrainedModel:
    """Load the trainer's model in fp32, with gradients. Raises ModelLoadError, or UnsupportedModelError if an engine
    cannot draw with it."""
    config = load_config(name)
    if name in SHAPES:
        with torch.device(device):  # random numbers for billions of weights take minutes on a CPU
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        model = load_checkpoint(name, config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot load model {name!r}: {str(error).splitlines()[0]}") from error
    nn.Module.to(model, device)
    return model


def require_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Raises ModelLoadError if it has none."""
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise ModelLoadError(f"model {name!r} has no tokenizer, and the demo needs one to read and write text")
    return tokenizer


@contextmanager
def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, parent: Path) -> Iterator[str]:
    """Store a model and its tokenizer in a new hidden directory of `parent` until the block ends, and yield the path.
    Raises FileWriteError."""
    with ExitStack() as at_end:
        with file_errors(FileWriteError, f"cannot write to {parent}"):
            own = tempfile.TemporaryDirectory(prefix=".start-", dir=parent.absolute(), ignore_cleanup_errors=True)
            directory = Path(at_end.enter_context(own), "start")
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        yield str(directory)


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    steps: int
    seed: int
    demonstrations: int = 300
    """Number of worked examples, each seen many times. With few examples much is left to learn."""
    batch_size: int = 64
    learning_rate: float = 2e-3


def warm_up(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    config: WarmupConfig,
) -> Iterator[float]:
    """Train on the next tokens of the answers, not of the prompts, of a few demonstrations; yield the loss of every
    step."""
    generator = torch.Generator().manual_seed(config.seed)
    picked = torch.randperm(len(examples), generator=generator)[: config.demonstrations].tolist()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = ramp_and_decay(optimizer, ramp=20, steps=config.steps, floor=0.05)
    device = next(model.parameters()).device
    rows = [_encode(tokenizer, examples[index]) for index in picked]
    model.train()
    for _ in range(config.steps):
        chosen = torch.randint(len(rows), (config.batch_size,), generator=generator).tolist()
        ids, targets = map(list, zip(*(rows[index] for index in chosen), strict=True))
        ids_BS = pad_sequence(ids, batch_first=True).to(device)  # on the right: causality hides the padding
        targets_BS = pad_sequence(targets, batch_first=True, padding_value=-100).to(device)
        with bf16_on_gpu(model):
            logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
        loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), targets_BS[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield loss.item()
    model.eval()


def make_optimizer(
    parameters: Iterable[nn.Parameter], learning_rate: float, *, ramp: int, steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return the optimizer of reinforcement learning, and the schedule of its learning rate over `steps`."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    return optimizer, ramp_and_decay(optimizer, ramp=ramp, steps=steps, floor=0.1)


def ramp_and_decay(optimizer: torch.optim.Optimizer, *, ramp: int, steps: int, floor: float) -> LambdaLR:
    """Schedule a learning rate that rises over `ramp` steps and then falls linearly to `floor` times its peak at
    `steps`."""

    def factor(step: int) -> float:
        if step < ramp:
            return (step + 1) / ramp
        return max(floor, 1 - (1 - floor) * (step - ramp) / max(1, steps - ramp))

    return LambdaLR(optimizer, factor)


def _encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of prompt, answer and end of text, if the tokenizer has one, and the same as targets with −100 on
    the prompt: i64[S]."""
    prompt = list(tokenizer(example.prompt)["input_ids"])
    answer = list(tokenizer(example.metadata["answer"], add_special_tokens=False)["input_ids"])
    answer += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor(prompt + answer), torch.tensor([-100] * len(prompt) + answer)
