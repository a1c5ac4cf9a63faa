"""TRL's trainer over a tiny model, and prompts for it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import inflight
from inflight.engine.shapes import EOS_TOKEN_ID, PAD_TOKEN_ID, byte_tokenizer
from inflight.integrations.trl import EngineRollouts, PublishCallback

TEXT = [f"p{index}" for index in range(8)]


CHAT = [[{"role": "user", "content": text}] for text in TEXT]


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def save_chat_model(directory: Path) -> str:
    """A tiny model with a tokenizer of bytes and a chat template; returns its directory."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=258,
        max_position_embeddings=128,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def make_trainer(
    path, tmp_path, rollout_func, trainer_class=GRPOTrainer, prompts=TEXT, peft_config=None, **config
) -> GRPOTrainer:
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "shuffle_dataset": False,
        "temperature": 0.9,
    }
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        **(defaults | config),
    )

    def reward(completion_ids, weight_versions, finish_reason, **_):
        assert all(len(ids) == len(versions) for ids, versions in zip(completion_ids, weight_versions, strict=True))
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(path),
        rollout_func=rollout_func,
        peft_config=peft_config,
    )


def train(path, tmp_path, *, ahead=0, engine=None, **options) -> SimpleNamespace:
    """Train against an engine; what the trainer asked for and got, and what the engine held at the end."""
    calls = []
    with inflight.launch(path, threads=1, max_context=64) if engine is None else nullcontext(engine) as engine:
        rollouts = EngineRollouts(engine, ahead=ahead)

        def recorded(prompts, trainer):
            calls.append((prompts, rollouts(prompts, trainer)))
            return calls[-1][1]

        trainer = make_trainer(path, tmp_path, recorded, **options)
        with engine.publisher(trainer.model) as publisher:
            trainer.add_callback(PublishCallback(publisher))
            trainer.train()
            engine.wait_for_version(publisher.version)
            outstanding, version = list(engine.stream.outstanding), publisher.version
    return SimpleNamespace(trainer=trainer, calls=calls, outstanding=outstanding, version=version)
