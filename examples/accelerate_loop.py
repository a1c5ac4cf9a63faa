"""Training loop with Accelerate and DDP on several ranks. Rank 0's engine generates. Every rank trains on its share.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py [--steps 30]
    accelerate launch examples/accelerate_loop.py           # on GPUs, with the settings of `accelerate config`

The program runs on CPUs over gloo: a tiny model with random weights learns to answer with digits.
"""

import argparse
from itertools import islice

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.model.shapes import shape_config


def reward(rollout: inflight.Rollout) -> float:
    """Return the share of digits in the answer. Only rank 0 calls this."""
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


def main(steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # before the engine: this makes the process group
    rank, size = accelerator.process_index, accelerator.num_processes
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    params = inflight.SamplingParams(n=8, max_tokens=16)
    rewards: list[float] = []

    with inflight.launch("tiny", threads=1) as engine:  # rank 0 launches it, and the others attach to it
        publisher = engine.publisher(model)  # after prepare(): it can wrap, shard or move the model
        publisher.publish()
        prompts = iter([f"Number {i}: " for i in range(8 * steps)][rank::size])  # each rank submits a share
        engine.submit(islice(prompts, 16 // size), params)
        for batch in engine.stream.batches(rollouts=64, score=reward):
            engine.submit(islice(prompts, 8 // size), params)
            loss, _ = inflight.policy_loss(model, batch.to(accelerator.device))  # averaging gives the batch's gradients
            accelerator.backward(loss)
            inflight.clip_and_step(optimizer)  # no step is taken if the gradient is not finite
            publisher.publish()
            rewards.append(engine.stream.last_reward)
            if len(rewards) % 10 == 0:
                accelerator.print(f"step {len(rewards)}  reward {rewards[-1]:.3f}")
        print(f"rank {rank} of {size} took {len(rewards)} steps", flush=True)
    accelerator.print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    main(parser.parse_args().steps)
