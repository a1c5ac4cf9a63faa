"""Training with TRL's GRPOTrainer and generation with inflight.

    python examples/trl_grpo.py [MODEL_DIRECTORY]

Without a model the program makes a tiny one with random weights, and runs 20 steps on a CPU in about half a minute.
"""

import os
import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config
from inflight.integrations.transformers import PublishCallback
from inflight.integrations.trl import EngineRollouts

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental in TRL


def reward(completions: list[str], **_: object) -> list[float | None]:
    """Return the share of digits in each completion."""
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in completions]


def make_tiny_model(directory: str) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape_config("tiny")).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def main(path: str, steps: int = 20) -> list[dict]:
    cuda = torch.cuda.is_available()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    with inflight.launch(path, threads=torch.get_num_threads()) as engine:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                max_steps=steps,
                learning_rate=1e-3,
                per_device_train_batch_size=64,
                num_generations=8,
                max_completion_length=16,
                logging_steps=5,
                use_cpu=not cuda,
                bf16=cuda,
                gradient_checkpointing=cuda,
                report_to="none",
                save_strategy="no",
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"Number {i}: " for i in range(256)]}),
            processing_class=engine.tokenizer,
            rollout_func=EngineRollouts(engine, ahead=1),  # the generator draws the next batch during a step
        )
        with engine.publisher(model) as publisher:  # after the trainer: it can move the model
            trainer.add_callback(PublishCallback(publisher))
            trainer.train()
        print("swaps:", engine.status().num_swaps)
        return trainer.state.log_history


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else make_tiny_model(scratch))
