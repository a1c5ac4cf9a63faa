"""One rank of a trainer on the CPU: python sharded_trainer.py RANK SIZE STORE MODEL SPREAD DTYPE

SPREAD is fsdp2, zero3 (DeepSpeed, trained in float32) or zero3-bf16. Rank 0 launches the engine, and for each of three
versions compares the slot that went live with the model put together when it was published. The other ranks send late,
so that another step is due before the version is copied.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import inflight
from inflight.weights.tensor_names import EngineNames
from inflight.weights.tensors import published_tensors
from inflight.weights.trainer.sharded import ShardGroup

VERSIONS = 3
LATE_S = 0.3
Step = Callable[[torch.Tensor], None]
Whole = Callable[[], dict[str, torch.Tensor]]


def main(rank: int, size: int, store: str, path: str, spread: str, dtype: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    has_towers = AutoConfig.from_pretrained(path).sub_configs
    auto = AutoModelForImageTextToText if has_towers else AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32)
    model, train, whole = by_fsdp2(model) if spread == "fsdp2" else by_zero3(model, bf16=spread == "zero3-bf16")
    engine = None
    if rank == 0:
        engine = inflight.launch(path, device="cpu", dtype=dtype, threads=1, max_sequences=4)
        params = inflight.SamplingParams(max_tokens=200, ignore_eos=True)
        engine.submit([[1, 2, 3]] * 40, params)
    ShardGroup.send = send_late(ShardGroup.send)
    publisher = engine.publisher(model) if engine is not None else inflight.ShardSender(model)
    for version in range(1, VERSIONS + 1):
        torch.manual_seed(100 * version + rank)
        train(torch.randint(0, 199, (2, 12)))
        assert publisher.publish() == version
        expected = whole()
        train(torch.randint(0, 199, (2, 12)))
        if engine is not None:
            engine.wait_for_version(version)
            names = EngineNames(publisher._target.views[0])
            ours = {names(name): tensor for name, tensor in expected.items()}
            same = [views for views in publisher._target.views if holds(views, ours)]
            assert len(same) == 1, "no slot holds the whole model, or two do"
            print(f"version {version} is bit-identical", flush=True)
    publisher.close()
    if engine is not None:
        engine.close()
    dist.destroy_process_group()


def send_late(send: Callable[..., None]) -> Callable[..., None]:
    def late(*arguments) -> None:
        time.sleep(LATE_S)
        send(*arguments)

    return late


def by_fsdp2(model: nn.Module) -> tuple[nn.Module, Step, Whole]:
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def whole() -> dict[str, torch.Tensor]:
        tensors = published_tensors(model)
        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}

    return model, train, whole


def by_zero3(model: nn.Module, bf16: bool) -> tuple[nn.Module, Step, Whole]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles a faster all_reduce first, which takes over a minute
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},  # some norms stay whole
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
        },
    )

    def train(ids: torch.Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    def whole() -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            return {name: tensor.detach().clone() for name, tensor in published_tensors(engine).items()}

    return engine, train, whole


def holds(views: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(views[name], whole[name].to(views[name].dtype)) for name in views)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
