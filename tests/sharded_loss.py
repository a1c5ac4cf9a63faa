"""One rank of a trainer on the CPU: python sharded_loss.py RANK SIZE STORE SPREAD

SPREAD is fsdp2, ddp or zero3. All ranks have the same batch, so that the mean of their gradients is that of a plain
model, with which it is compared.
"""

import os
import sys

import torch
import torch.distributed as dist
from conftest import make_model
from test_packing import make_batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from inflight.training.loss import policy_loss


def main(rank: int, size: int, store: str, spread: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    plain, batch = make_model("qwen3"), make_batch()
    expected_loss, _ = policy_loss(plain, batch, correction="tis")
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    spread_out = {"fsdp2": by_fsdp2, "ddp": by_ddp, "zero3": by_zero3}[spread]
    loss, gradients = spread_out(make_model("qwen3"), batch)
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert len(gradients) == len(expected)
    print("the gradient is that of a plain model", flush=True)
    dist.destroy_process_group()


def by_fsdp2(model: nn.Module, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    loss, _ = policy_loss(model, batch, correction="tis")
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def by_ddp(model: nn.Module, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, _ = policy_loss(nn.parallel.DistributedDataParallel(model), batch, correction="tis")
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def by_zero3(model: nn.Module, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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
    loss, _ = policy_loss(engine, batch, correction="tis")
    engine.backward(loss)
    return loss.detach(), {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
