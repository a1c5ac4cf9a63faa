"""Slow judge, and evaluation during training: neither stops the generator or the trainer.

    python examples/slow_reward.py [MODEL [LOGGER]]

An `async` function judges every answer. It waits 200 ms, like a call to another service. Every tenth version answers
held-out prompts greedily while training continues. MODEL is a directory, a Hugging Face hub id or a built-in shape
(default: tiny, random weights, trained from scratch to answer with digits; half a minute on two cores). LOGGER is
jsonl, tensorboard, wandb or trackio. It stores the metrics of every step under runs/slow_reward.
"""

import asyncio
import sys
from itertools import islice

import torch
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.model.shapes import SHAPES, shape_config
from inflight.observability.loggers import LoggerName

STEPS = 40


async def judge(rollout: inflight.Rollout) -> float:
    await asyncio.sleep(0.2)
    return share_of_digits(rollout)


def share_of_digits(rollout: inflight.Rollout) -> float:
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


def main(name: str = "tiny", logger: LoggerName = "jsonl") -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the generator uses the other half of the cores
    torch.manual_seed(0)
    if name in SHAPES:
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = (f"Number {i}: " for i in range(8 * STEPS))
    held_out = [f"Number {1000 + i}: " for i in range(32)]
    params = inflight.SamplingParams(n=8, max_tokens=16)
    greedy = inflight.SamplingParams(temperature=0, max_tokens=16)

    with (
        inflight.open_logger(logger, "runs/slow_reward") as log,
        inflight.launch(name, threads=torch.get_num_threads(), slots=3) as engine,  # the third holds a pinned version
    ):
        publisher = engine.publisher(model)
        version = publisher.publish()
        evaluations: dict[int, list[int]] = {}
        engine.submit(islice(prompts, 24), params)
        for step, batch in enumerate(engine.stream.batches(rollouts=64, score=inflight.Scorer(judge, timeout_s=10)), 1):
            engine.submit(islice(prompts, 8), params)
            loss, stats = inflight.policy_loss(model, batch)
            loss.backward()
            inflight.clip_and_step(optimizer, max_grad_norm=1.0)
            version = publisher.publish()
            log.log(step, {"reward": engine.stream.last_reward, **stats.as_dict()})
            if step % 10 == 0:
                evaluations[step] = engine.submit(held_out, greedy, version=version, train=False)
                print(f"step {step}  reward {engine.stream.last_reward:.3f}  ESS {stats.ess:.3f}")
        for step, ids in evaluations.items():
            scores = [share_of_digits(rollout) for [rollout] in engine.stream.groups(ids)]
            print(f"held out, after step {step}  reward {sum(scores) / len(scores):.3f}")
        print(f"{engine.stream.dropped.num_unscored_rollouts} answers were left without a reward")


if __name__ == "__main__":
    main(*sys.argv[1:3])  # type: ignore[arg-type]
