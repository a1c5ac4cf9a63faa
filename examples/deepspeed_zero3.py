"""Training loop with DeepSpeed ZeRO-3 on several ranks. DeepSpeed shards the model, and rank 0's engine generates.
Every rank trains on its share of each batch.

    torchrun --nproc-per-node 2 examples/deepspeed_zero3.py [--steps 30]
    deepspeed --num_gpus 2 examples/deepspeed_zero3.py

The program runs on CPUs over gloo: a tiny model with random weights learns to answer with digits.
"""

import argparse
import os
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads this when it is imported
import deepspeed

import inflight
from inflight.engine.model.shapes import shape_config

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,  # unused: the stream makes the batches
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": torch.cuda.is_available()},
}


def reward(rollout: inflight.Rollout) -> float:
    """Return the share of digits in the answer. Only rank 0 calls this."""
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


def main(steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        ops: Any = deepspeed.ops
        ops.__compatible_ops__ = {}  # avoids compiling its all_reduce for over a minute
    deepspeed.init_distributed()  # before the engine: ranks find it over the process group
    rank, size = dist.get_rank(), dist.get_world_size()
    module = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    model, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG)
    device = next(model.parameters()).device
    params = inflight.SamplingParams(n=8, max_tokens=16)
    rewards: list[float] = []

    with inflight.launch("tiny", threads=1) as engine:  # rank 0 launches it, and the others attach to it
        publisher = engine.publisher(model, check_finite=True)  # after initialize(): it shards the model
        publisher.publish()
        prompts = iter([f"Number {i}: " for i in range(8 * steps)][rank::size])  # each rank submits a share
        engine.submit(islice(prompts, 16 // size), params)
        for batch in engine.stream.batches(rollouts=64, score=reward):
            engine.submit(islice(prompts, 8 // size), params)
            loss, _ = inflight.policy_loss(model, batch.to(device))  # averaging gives the batch's gradients
            model.backward(loss)
            model.step()
            publisher.publish()
            rewards.append(engine.stream.last_reward)
            if rank == 0 and len(rewards) % 10 == 0:
                print(f"step {len(rewards)}  reward {rewards[-1]:.3f}", flush=True)
        print(f"rank {rank} of {size} took {len(rewards)} steps", flush=True)
    if rank == 0:
        print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--local_rank", type=int, help="DeepSpeed's launcher gives it")
    main(parser.parse_args().steps)
