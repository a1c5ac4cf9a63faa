"""TRL's trainer over a tiny model, and prompts for it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_on_cpu import run_on_cpu

import inflight
from inflight.engine.model.shapes import EOS_TOKEN_ID, PAD_TOKEN_ID, byte_tokenizer
from inflight.integrations.transformers import PublishCallback
from inflight.integrations.trl import EngineRollouts

TEXT = [f"p{index}" for index in range(8)]


CHAT = [[{"role": "user", "content": text}] for text in TEXT]


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


ANSWER = {"defaults": {"role": "assistant"}, "start_anchor": ">", "fields": {"content": {"content": "text"}}}
"""How an answer is read: all of it is text."""

ON_CPU = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}


def odd_tokens(completion_ids, **_):
    """A reward function of TRL: the share of odd token ids."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def logged(trainer, name) -> list[float]:
    """What a trainer has logged under a name, step by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


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
    path,
    tmp_path,
    rollout_func=None,
    trainer_class=GRPOTrainer,
    prompts=TEXT,
    peft_config=None,
    reward_funcs=None,
    eval_prompts=None,
    callbacks=(),
    **config,
) -> GRPOTrainer:
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "shuffle_dataset": False,
        "temperature": 0.9,
        "output_dir": str(tmp_path / "out"),
    }
    args = GRPOConfig(**(ON_CPU | defaults | config))

    def reward(completion_ids, weight_versions, finish_reason, **_):
        assert all(len(ids) == len(versions) for ids, versions in zip(completion_ids, weight_versions, strict=True))
        return odd_tokens(completion_ids)

    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=reward_funcs or reward,
        args=args,
        callbacks=list(callbacks),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=None if eval_prompts is None else Dataset.from_dict({"prompt": eval_prompts}),
        processing_class=AutoTokenizer.from_pretrained(path),
        rollout_func=rollout_func,
        peft_config=peft_config,
    )


def train(path, tmp_path, *, ahead=0, engine=None, resume=None, **options) -> SimpleNamespace:
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
            trainer.train(resume_from_checkpoint=resume)
            engine.wait_for_version(publisher.version)
            outstanding, version = list(engine.stream.outstanding), publisher.version
    return SimpleNamespace(trainer=trainer, calls=calls, outstanding=outstanding, version=version)


def async_config(tmp_path, **config) -> AsyncGRPOConfig:
    """Steps of 16 samples in groups of 4."""
    defaults = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "temperature": 0.9,
        "dtype": "float32",
        "token_budget": 0,
        "max_staleness": 0,
        "heartbeat_stale_after_s": 60.0,
    }
    return AsyncGRPOConfig(**(ON_CPU | defaults | config))


def make_async_trainer(path, args, *, prompts=CHAT, **options) -> AsyncGRPOTrainer:
    """An AsyncGRPOTrainer on a CPU. options: its `rollout_worker`, `weight_transfer`, `peft_config`, …"""
    run_on_cpu()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.response_template = ANSWER  # which TRL's own worker knows for known chat templates alone
    return AsyncGRPOTrainer(
        model=path,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        reward_funcs=options.pop("reward_funcs", [odd_tokens]),
        **options,
    )


class Witness(TrainerCallback):
    """Keeps the weights of each version that an AsyncGRPOTrainer publishes, and the samples of the newest version that
    it takes. It is made before training."""

    def __init__(self, trainer: AsyncGRPOTrainer):
        self._trainer, self._queue = trainer, trainer.rollout_queue
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        self._fresh: list[RolloutSample] = []
        trainer.rollout_queue = SimpleNamespace(get=self._get, qsize=self._queue.qsize)
        trainer.add_callback(self)  # behind those that publish

    def on_train_begin(self, *_: object, **__: object) -> None:
        state = self._trainer.model.state_dict()
        self._weights[self._trainer.model_version] = {name: weight.clone() for name, weight in state.items()}

    on_step_end = on_train_begin

    def _get(self, **options: float) -> RolloutSample:
        sample = self._queue.get(**options)
        if sample.model_version == self._trainer.model_version:
            self._fresh.append(sample)
        return sample

    @torch.no_grad()
    def ratios(self, path: str, peft_config: LoraConfig | None = None) -> torch.Tensor:
        """Importance ratios of all tokens of these samples, under the weights of the version that they name."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = (model if peft_config is None else get_peft_model(model, peft_config)).eval()
        found = []
        for version, weights in self._weights.items():
            model.load_state_dict(weights)
            for sample in self._fresh:
                if sample.model_version == version:
                    ids, drawn = torch.tensor(sample.input_ids), sample.completion_mask[1:] == 1
                    logits = model(ids[None]).logits[0, :-1] / self._trainer.temperature
                    logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                    found.append((logprobs - torch.tensor(sample.old_log_probs[1:]))[drawn].exp())
        return torch.cat(found)
