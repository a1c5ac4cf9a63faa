"""Measures what the policy loss costs beside the model that it trains.

    python benchmarks/loss_terms.py [FILE]

operations and bytes_per_token: what the loss, its gradient and its statistics run and move (bytes read and written by
PyTorch's operations). loss_ms and model_ms: the median over alternated rounds, on one thread, of the loss from
log-probabilities, and of forward and backward of `small`; share is their ratio.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness import finish
from packing import make_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from inflight.engine.shapes import shape_config
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import TokenScores, score_tokens
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import resolve

OBJECTIVES = ("none", "tis", "ppo_clip", "gspo")
ROUNDS = 5


class _Traffic(TorchDispatchMode):
    """Counts operations, and the bytes of the tensors that they read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return result


def loss_of(name: str, batch: PackedBatch) -> Callable[[], None]:
    """The loss of this objective with its gradient, at ratios on both sides of 1."""
    behavior = batch.behavior_logprobs[batch.drawn]
    logprobs = behavior + 0.3 * torch.randn(len(behavior), generator=torch.Generator().manual_seed(0))
    scores = TokenScores(logprobs.requires_grad_(), None)
    return lambda: loss_of_scores(resolve(name), batch, scores)[0].backward()


def milliseconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    batch = make_batch(groups=8, prompt=40, answer=40)
    model = AutoModelForCausalLM.from_config(shape_config("small"), dtype=torch.float32).train()
    num_tokens = int(batch.loss_mask.sum())
    losses = {name: loss_of(name, batch) for name in OBJECTIVES}
    traffic: dict[str, _Traffic] = {}
    for name, run in losses.items():
        run()
        with _Traffic() as traffic[name]:
            run()
    model_ms: list[float] = []
    loss_ms: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    for _ in range(ROUNDS):
        model_ms.append(milliseconds(lambda: score_tokens(model, batch).logprobs.sum().backward()))
        for name, run in losses.items():
            loss_ms[name].append(milliseconds(run))
    finish(
        "loss-terms",
        {
            "num_tokens": num_tokens,
            "num_packed_tokens": len(batch.input_ids),
            "model_ms": median(model_ms),
            "objectives": {
                name: {
                    "operations": traffic[name].operations,
                    "bytes_per_token": traffic[name].num_bytes / num_tokens,
                    "loss_ms": median(loss_ms[name]),
                    "share": median(loss_ms[name]) / median(model_ms),
                }
                for name in OBJECTIVES
            },
        },
    )


if __name__ == "__main__":
    main()
