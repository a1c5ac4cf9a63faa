"""Custom training loop with a generator that never stops: the ten lines of the README as a whole program.

    python examples/plain_loop.py [MODEL [LOGGER]]

MODEL is a directory, a Hugging Face hub id or a built-in shape (default: tiny, random weights, trained from scratch
to answer with digits, so that it runs anywhere in half a minute). LOGGER is jsonl, tensorboard, wandb or trackio. It
stores the metrics of every step under runs/plain_loop.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.model.shapes import SHAPES, shape_config
from inflight.observability.loggers import Logger, LoggerName


def reward(rollout: inflight.Rollout) -> float:
    """Return the share of digits in the answer."""
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


def main(name: str = "tiny", logger: LoggerName = "jsonl") -> None:
    with inflight.open_logger(logger, "runs/plain_loop") as log:
        train(name, log)


def train(name: str, log: Logger) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the generator uses the other half of the cores
    torch.manual_seed(0)
    if name in SHAPES:
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = (f"Number {i}: " for i in range(400))
    params = inflight.SamplingParams(n=8, max_tokens=16)

    with inflight.launch(name, threads=torch.get_num_threads()) as engine:
        publisher = engine.publisher(model)
        publisher.publish()  # the engine starts from the trainer's weights
        rewards: list[float] = []
        # Each prompt starts as late as possible, so that its tokens are young when the trainer takes them.
        batches = engine.stream.batches(prompts=prompts, params=params, rollouts=64, score=reward)
        for step, batch in enumerate(batches, 1):
            loss, stats = inflight.policy_loss(model, batch)
            loss.backward()
            inflight.clip_and_step(optimizer)  # no step is taken if the gradient is not finite
            publisher.publish()  # returns at once; the generator never stops
            rewards.append(engine.stream.last_reward)
            log.log(step, {"reward": rewards[-1], **stats.as_dict()})
            if step % 10 == 0:
                print(f"step {step}  reward {engine.stream.last_reward:.3f}  ESS {stats.ess:.3f}")
        print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}")
        for metric, values in engine.staleness.summary().items():
            print(metric, {key: round(value, 2) for key, value in values.items()})


if __name__ == "__main__":
    main(*sys.argv[1:3])  # type: ignore[arg-type]
