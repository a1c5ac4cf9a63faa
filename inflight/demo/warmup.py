"""The short supervised phase that gives the demo's model something for reinforcement learning to improve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from inflight.training.grpo import Example


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    steps: int
    demonstrations: int = 300
    """Worked examples that it sees, over and over; few, so that much is left to learn."""
    batch_size: int = 64
    learning_rate: float = 2e-3


def warm_up(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    config: WarmupConfig,
    *,
    seed: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train on the next tokens of the answers, not of the prompts, of a few demonstrations."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(len(examples), generator=generator)[: config.demonstrations].tolist()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = ramp_and_decay(optimizer, ramp=20, steps=config.steps, floor=0.05)
    device = next(model.parameters()).device
    rows = [_encode(tokenizer, examples[index]) for index in picked]
    model.train()
    for step in range(1, config.steps + 1):
        chosen = torch.randint(len(rows), (config.batch_size,), generator=generator).tolist()
        ids, targets = map(list, zip(*(rows[index] for index in chosen), strict=True))
        ids_BS = pad_sequence(ids, batch_first=True).to(device)  # on the right, where causality hides the padding
        targets_BS = pad_sequence(targets, batch_first=True, padding_value=-100).to(device)
        logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
        loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), targets_BS[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        on_step(step, loss.item())
    model.eval()


def ramp_and_decay(
    optimizer: torch.optim.Optimizer, *, ramp: int, steps: int, floor: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Schedule a learning rate that rises over `ramp` steps and then falls linearly to `floor` times its peak at
    `steps`."""

    def factor(step: int) -> float:
        if step < ramp:
            return (step + 1) / ramp
        return max(floor, 1 - (1 - floor) * (step - ramp) / max(1, steps - ramp))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of prompt, answer and end of text, and the same as targets with −100 on the prompt: i64[S]."""
    prompt = list(tokenizer(example.prompt)["input_ids"])
    answer = [*tokenizer(example.metadata["answer"])["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(prompt + answer), torch.tensor([-100] * len(prompt) + answer)
