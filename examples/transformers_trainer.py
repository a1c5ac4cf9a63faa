"""Training with Transformers' Trainer. It reads batches from an engine's stream.

A callback publishes after each step.

    python examples/transformers_trainer.py [--max_steps 40]
    torchrun --nproc-per-node 2 examples/transformers_trainer.py      # DDP: each rank trains on its share

All TrainingArguments are options, including `--deepspeed CONFIG.json`. The program runs on CPUs: a tiny model with
random weights learns to answer with digits.
"""

import tempfile
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

import inflight
from inflight.engine.model.shapes import shape_config
from inflight.integrations.transformers import PublishCallback


def reward(rollout: inflight.Rollout) -> float:
    """Return the share of digits in the answer."""
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


class PolicyTrainer(Trainer):
    """Trainer that trains on rollouts of the engine."""

    engine: inflight.Engine

    def get_train_dataloader(self) -> Any:
        rank, size = self.args.process_index, self.args.world_size
        prompts = iter([f"Number {i}: " for i in range(8 * self.args.max_steps)][rank::size])

        def batches() -> Iterator[dict[str, inflight.PackedBatch]]:
            params = inflight.SamplingParams(n=8, max_tokens=16)
            self.engine.submit(islice(prompts, 16 // size), params)
            for batch in self.engine.stream.batches(rollouts=64, score=reward):
                self.engine.submit(islice(prompts, 8 // size), params)
                yield {"batch": batch.to(self.args.device)}

        return batches()

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        return inflight.policy_loss(model, inputs["batch"])[0]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs | {"reward": self.engine.stream.last_reward}, start_time)


def main(args: TrainingArguments) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    with inflight.launch("tiny", threads=1) as engine:  # after TrainingArguments: they make the process group
        trainer = PolicyTrainer(model=model, args=args, callbacks=[PublishCallback(engine.publisher)])
        trainer.engine = engine
        trainer.train()
        if args.process_index == 0:
            rewards = [entry["reward"] for entry in trainer.state.log_history]
            print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}", flush=True)


if __name__ == "__main__":
    parser = HfArgumentParser(TrainingArguments)  # pyright: ignore[reportArgumentType]
    parser.set_defaults(max_steps=40, learning_rate=1e-3, lr_scheduler_type="constant")
    parser.set_defaults(logging_steps=10, logging_first_step=True, save_strategy="no")
    parser.set_defaults(output_dir=tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available())
    [args] = parser.parse_args_into_dataclasses()
    main(args)
