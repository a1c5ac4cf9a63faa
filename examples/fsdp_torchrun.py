"""Training loop with FSDP2 on several ranks. FSDP2 shards the model, and rank 0's engine generates. Every rank trains
on its share of each batch.

    torchrun --nproc-per-node 2 examples/fsdp_torchrun.py [STEPS]

The program runs on CPUs over gloo: a tiny model with random weights learns to answer with digits.
"""

import sys
from itertools import islice

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
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    params = inflight.SamplingParams(n=8, max_tokens=16)

    with inflight.launch("tiny", threads=1) as engine:  # rank 0 launches it, and the others attach to it
        publisher = engine.publisher(model)
        publisher.publish()
        prompts = iter([f"Number {i}: " for i in range(8 * steps)][rank::size])  # each rank submits a share
        engine.submit(islice(prompts, 16 // size), params)
        rewards: list[float] = []
        for batch in engine.stream.batches(rollouts=64, score=reward):
            engine.submit(islice(prompts, 8 // size), params)
            loss, _ = inflight.policy_loss(model, batch)  # of this rank's share; averaging gives the batch's gradients
            loss.backward()
            inflight.clip_and_step(optimizer)
            publisher.publish()
            rewards.append(engine.stream.last_reward)
            if rank == 0 and len(rewards) % 10 == 0:
                print(f"step {len(rewards)}  reward {rewards[-1]:.3f}", flush=True)
        print(f"rank {rank} of {size} took {len(rewards)} steps", flush=True)
    if rank == 0:
        print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
