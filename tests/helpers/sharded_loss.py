"""One rank of a trainer on the CPU: python sharded_loss.py RANK SIZE STORE SPREAD

SPREAD is fsdp2, fsdp2-lora, ddp or zero3. Ranks have batches of different sizes, in different numbers of micro-batches.
The mean of their gradients is compared with the gradient of a plain model on all rollouts together.
"""

import os
import sys
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from made_batches import make_group
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model.forward import transformers_model
from inflight.training.objective.loss import policy_loss

Gradients = dict[str, torch.Tensor]


def main(rank: int, size: int, store: str, spread: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    rng = np.random.default_rng(0)
    of_ranks = [make_group(rng, 0, 5, 12) + make_group(rng, 1, 4, 3), make_group(rng, 2, 2, 7)]
    advantages = [rng.normal(size=len(rollouts)).tolist() for rollouts in of_ranks]
    plain = make(spread)
    expected_loss, _ = policy_loss(plain, pack([*of_ranks[0], *of_ranks[1]], [*advantages[0], *advantages[1]]))
    expected_loss.backward()

    batch = pack(of_ranks[rank], advantages[rank])
    batch = replace(batch, totals=batch.totals.across_ranks())
    parts = batch.micro_batches(1000 if spread == "zero3" else 90)
    agreed = torch.tensor(len(parts))
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    assert spread == "zero3" or rank == 0 or len(parts) < agreed
    parts = batch.micro_batches(1000 if spread == "zero3" else 90, at_least=int(agreed))
    by = {"fsdp2": by_fsdp2, "fsdp2-lora": by_fsdp2, "ddp": by_ddp, "zero3": by_zero3}[spread]
    loss, gradients = by(make(spread), parts)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / size, expected_loss.detach(), rtol=1e-4, atol=1e-6)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)
    print("the gradient is that of a plain model", flush=True)
    dist.destroy_process_group()


def make(spread: str) -> nn.Module:
    model = make_model("qwen3")
    if spread != "fsdp2-lora":
        return model
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def accumulate(model: nn.Module, parts: list[PackedBatch]) -> torch.Tensor:
    total = torch.zeros(())
    for part in parts:
        loss, _ = policy_loss(model, part)
        loss.backward()
        total += loss.detach()
    return total


def by_fsdp2(model: nn.Module, parts: list[PackedBatch]) -> tuple[torch.Tensor, Gradients]:
    for layer in transformers_model(model).model.layers:
        fully_shard(layer)
    fully_shard(model)
    loss = accumulate(model, parts)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def by_ddp(model: nn.Module, parts: list[PackedBatch]) -> tuple[torch.Tensor, Gradients]:
    loss = accumulate(nn.parallel.DistributedDataParallel(model), parts)
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def by_zero3(model: nn.Module, parts: list[PackedBatch]) -> tuple[torch.Tensor, Gradients]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles a faster all_reduce first, which takes over a minute
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )
    [part] = parts
    loss, _ = policy_loss(engine, part)
    engine.backward(loss)
    return loss.detach(), {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
