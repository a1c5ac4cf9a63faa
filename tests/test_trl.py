"""An unmodified TRL GRPOTrainer trains against the engine."""

import itertools
import math
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import inflight
from inflight.engine.shapes import EOS_TOKEN_ID, PAD_TOKEN_ID, byte_tokenizer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", reason="the trl extra is not installed")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from inflight.integrations.trl import EngineRollouts, PublishCallback, behaviour_ratio

TEXT = [f"p{index}" for index in range(8)]
CHAT = [[{"role": "user", "content": text}] for text in TEXT]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("trl-model")
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


@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
def test_each_prompt_gets_its_completions_and_weights_move(path, tmp_path, prompts):
    run = train(path, tmp_path, prompts=prompts)
    assert len(run.calls) == 3
    for asked, output in run.calls:
        assert {len(column) for column in output.values()} == {len(asked)} == {8}
        for prompt, ids in zip(asked, output["prompt_ids"], strict=True):
            text = prompt if isinstance(prompt, str) else f"<user>{prompt[0]['content']}>"
            assert run.trainer.processing_class.decode(ids) == text
        for ids, logprobs, reason in zip(
            output["completion_ids"], output["logprobs"], output["finish_reason"], strict=True
        ):
            assert 1 <= len(ids) == len(logprobs) <= 6
            assert (reason == "stop") == (ids[-1] == EOS_TOKEN_ID)
    assert run.version == 4  # when training began, and after each of 3 steps
    assert len(run.trainer.state.log_history) >= 3
    assert all(math.isfinite(entry["grad_norm"]) for entry in run.trainer.state.log_history if "grad_norm" in entry)
    newest = [max(itertools.chain(*output["weight_versions"])) for _, output in run.calls]
    assert newest[-1] > newest[0]


def test_ahead_keeps_the_next_batch_in_flight_and_wastes_nothing(path, tmp_path):
    run = train(path, tmp_path, ahead=1, trainer_class=behaviour_ratio(GRPOTrainer), max_steps=6)
    assert [asked[::4] for asked, _ in run.calls] == [TEXT[start : start + 2] for start in (0, 2, 4, 6, 0, 2)]
    assert run.outstanding == []


def test_recorded_logprobs_become_the_denominator(path, tmp_path):
    """A recorded log-probability that is s too high makes the ratio, and so the gradient, e^−s as large."""
    drawn = train(path, tmp_path, max_steps=1).calls[0][1]

    def gradient_norm(trainer_class, shift):
        logprobs = [[logprob + shift for logprob in row] for row in drawn["logprobs"]]
        trainer = make_trainer(
            path, tmp_path, lambda prompts, trainer: drawn | {"logprobs": logprobs}, trainer_class, max_steps=1
        )
        trainer.train()
        return trainer.state.log_history[0]["grad_norm"]

    corrected = behaviour_ratio(GRPOTrainer)
    base = gradient_norm(corrected, 0.0)
    assert gradient_norm(corrected, 0.1) == pytest.approx(base * math.exp(-0.1), rel=1e-3)
    assert gradient_norm(GRPOTrainer, 0.1) == pytest.approx(base, rel=1e-3)  # TRL by itself
