"""One rank of an FSDP2 trainer on the CPU: python sharded_trainer.py RANK SIZE STORE MODEL DTYPE

Rank 0 launches the engine, and after each of three steps compares the slot that went live with the model put together.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import inflight
from inflight.weights.tensors import published_tensors, slot_views

STEPS = 3


def main(rank: int, size: int, store: str, path: str, dtype: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = None
    if rank == 0:
        engine = inflight.launch(path, device="cpu", dtype=dtype, threads=1, max_sequences=4)
        params = inflight.SamplingParams(max_tokens=200, ignore_eos=True)
        engine.submit([[1, 2, 3]] * 40, params)
    publisher = engine.publisher(model) if engine is not None else inflight.ShardSender(model)
    for step in range(1, STEPS + 1):
        torch.manual_seed(100 * step + rank)
        ids = torch.randint(0, 199, (2, 12))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert publisher.publish() == step
        whole = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in published_tensors(model).items()
        }
        if engine is not None:
            engine.wait_for_version(step)
            same = [slot for slot in publisher._slots if holds(slot, publisher._layout, whole)]
            assert len(same) == 1, "no slot holds the whole model, or two do"
            print(f"version {step} is bit-identical", flush=True)
    publisher.close()
    if engine is not None:
        engine.close()
    dist.destroy_process_group()


def holds(slot, layout, whole: dict[str, torch.Tensor]) -> bool:
    views = slot_views(slot.buffer, layout)
    return all(torch.equal(views[name], whole[name].to(views[name].dtype)) for name in views)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
