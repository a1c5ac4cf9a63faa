"""GRPO with FSDP2 on several ranks. FSDP2 shards the model, and rank 0's engine generates. Every rank trains on its
share of each batch.

    torchrun --nproc-per-node 2 examples/fsdp_torchrun.py [STEPS]

The program runs on CPUs over gloo: a tiny model with random weights learns to answer with digits.
"""

import sys
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.model.shapes import shape_config


def reward(rollout: inflight.Rollout) -> float:
    """Return the share of digits in the answer. Only rank 0 calls this."""
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


def main(steps: int = 30) -> None:
    dist.init_process_group("gloo")  # before the engine: ranks find it over the process group
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = (f"Number {i}: " for i in count())  # only rank 0 submits them
    config = inflight.GRPOConfig(steps=steps, groups_per_step=8, sampling=inflight.SamplingParams(n=8, max_tokens=16))
    rewards: list[float] = []

    with inflight.launch("tiny", threads=1) as engine:  # rank 0 launches it, and the others attach to it
        publisher = engine.publisher(model)  # after fully_shard, on all ranks
        for report in inflight.grpo(engine, publisher, model, optimizer, prompts, reward, config):
            rewards.append(report.reward)  # the same on every rank
            if rank == 0 and report.step % 10 == 0:
                print(f"step {report.step}  reward {report.reward:.3f}", flush=True)
        print(f"rank {rank} of {size} took {len(rewards)} steps", flush=True)
    if rank == 0:
        print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
