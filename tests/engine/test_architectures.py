"""Every architecture is computed as Transformers computes it, or refused by name; in every dtype alike."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import REFUSED, RIGHT, VOCABULARY, make_model
from family_configs import Family
from family_weights import make_model as make_family
from made_batches import make_group
from tiny_models import run
from transformers import AutoModelForCausalLM, PreTrainedModel

from inflight.core.errors import UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.training.data.batch import pack
from inflight.training.model.forward import score_tokens

MIXTURES = {"qwen2_moe-sliding", "phimoe-sliding", "flex_olmo", "llama4_text", "llama4_text-full"}
UNFUSED = {"llama4_text", "llama4_text-full", "gemma3n_text", "gpt2", "bert-decoder"}
UNSCORED = {"t5", "emu3"}
"""No causal language model of Transformers."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            config = RIGHT[name]() if name in RIGHT else REFUSED[name][0]()
            (config if name in UNSCORED else make_model(config)).save_pretrained(made[name])
        return made[name]

    return get


def generate(path: Path, **options: object) -> tuple[list[Rollout], str | None]:
    """Ragged prompts in chunks, some joining late, up to the longest context; and why the engine runs unfused."""
    engine = Engine(EngineOptions(model=str(path), device="cpu", max_sequences=6, max_prefill_tokens=9, **options))
    try:
        rng = random.Random(0)
        longest = min(engine.options.max_context, 100) // 2
        prompts = [
            Prompt(
                [rng.randrange(VOCABULARY - 10) for _ in range(length)],
                SamplingParams(max_tokens=longest - 1, seed=index, ignore_eos=True),
            )
            for index, length in enumerate((longest, 1, longest // 2, 7, longest // 3, 3))
        ]
        return run(engine, prompts, arrivals=[0, 0, 3, 5, 20, 31]), engine.runner.unfused_reason
    finally:
        engine.close()


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """Of the drawn tokens, from a forward pass of Transformers over the sequence alone."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
    logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].double(), -1)
    start = len(rollout.prompt_token_ids) - 1
    return logprobs[torch.arange(start, len(ids) - 1), ids[start + 1 :]].numpy()


def load(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@pytest.mark.medium
@pytest.mark.parametrize("name", RIGHT)
def test_recorded_logprobs_are_those_of_transformers_in_every_dtype(saved, name):
    """In bf16 they are as close to fp32 as Transformers' own. What is fused in one dtype is so in the other."""
    exact, rounded = load(saved(name), torch.float32), load(saved(name), torch.bfloat16)
    rollouts, reason = generate(saved(name), dtype="float32")
    assert max(np.abs(plain_logprobs(exact, r) - r.logprobs).max() for r in rollouts) < 2e-4
    assert (reason is None) == (name not in UNFUSED)
    rollouts, reason_in_bf16 = generate(saved(name), dtype="bfloat16")
    assert reason_in_bf16 == reason
    expected = [plain_logprobs(exact, r) for r in rollouts]
    ours = np.mean(np.concatenate([np.abs(e - r.logprobs) for e, r in zip(expected, rollouts, strict=True)]))
    theirs = np.concatenate([np.abs(e - plain_logprobs(rounded, r)) for e, r in zip(expected, rollouts, strict=True)])
    # Rounding sends tokens to other experts: of six mixtures together the ratio is 0.95, of one of them 0.8 to 1.55.
    # Of Llama 4 alone it is 1.55 here, and 1.00 over six sets of prompts.
    assert ours <= (1.6 if name in MIXTURES else 1.2) * np.mean(theirs)


@pytest.mark.medium
@pytest.mark.parametrize("name", RIGHT)
def test_the_trainer_scores_as_transformers_does(name):
    model = make_model(RIGHT[name]())
    rng = np.random.default_rng(0)
    shapes = ((3, 22), (1, 5), (2, 60), (2, 1))
    rollouts = [r for group, shape in enumerate(shapes) for r in make_group(rng, group, *shape)]
    batch = pack(rollouts, [0.0] * len(rollouts))
    batch.temperatures[:] = 1.0
    scores = score_tokens(model, batch, entropy=True)
    expected = np.concatenate([plain_logprobs(model, r) for r in rollouts])
    assert np.abs(scores.logprobs.detach().numpy() - expected).max() < 2e-4
    (scores.logprobs.sum() + scores.entropies.sum()).backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(saved, name, dtype):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][1]):
        generate(saved(name), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_transformers_itself_does_not_run_is_refused_by_name(dtype, tmp_path):
    """Its keys are repeated for groups of heads, although each head has its own."""
    broken = make_family(Family("broken", "glm4_moe_lite", {"num_attention_heads": 8, "num_key_value_heads": 4}))
    broken.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Glm4MoeLiteForCausalLM cannot be run: Transformers itself"):
        generate(tmp_path, dtype=dtype)
    with pytest.raises(UnsupportedModelError, match="Glm4MoeLiteForCausalLM cannot be scored: it does not run on tok"):
        score_tokens(broken, pack(make_group(np.random.default_rng(0), 0, 2, 5), [0.0] * 2))


@pytest.mark.parametrize("name", ["bert", "roberta", "bert-generation", "ernie"])
def test_the_trainer_refuses_what_sees_later_tokens(name):
    rng = np.random.default_rng(0)
    rollouts = make_group(rng, 0, 2, 5)
    with pytest.raises(UnsupportedModelError, match="no causal decoder: its tokens see later ones"):
        score_tokens(make_model(REFUSED[name][0]()), pack(rollouts, [0.0] * 2))


@pytest.mark.medium
@pytest.mark.parametrize("name", sorted(set(REFUSED) - UNSCORED - {"bert", "roberta", "bert-generation", "ernie"}))
def test_the_trainer_scores_decoders_that_the_engine_does_not_run(name):
    model = make_model(REFUSED[name][0]())
    rng = np.random.default_rng(0)
    rollouts = [r for group, shape in enumerate(((3, 22), (2, 1))) for r in make_group(rng, group, *shape)]
    batch = pack(rollouts, [0.0] * len(rollouts))
    batch.temperatures[:] = 1.0
    expected = np.concatenate([plain_logprobs(model, r) for r in rollouts])
    assert np.abs(score_tokens(model, batch).logprobs.detach().numpy() - expected).max() < 2e-4


def test_llama_4_is_run_up_to_the_end_of_its_first_chunk(saved):
    with pytest.raises(UnsupportedModelError, match=r"uses chunked attention, .* up to 96 tokens; max_context is 100"):
        generate(saved("llama4_text"), max_context=100)


def test_dynamic_rope_is_run_up_to_where_sequences_change_each_other(saved):
    with pytest.raises(
        UnsupportedModelError, match=r"dynamic rotary embeddings, .* up to 96 tokens; max_context is 97"
    ):
        generate(saved("llama-dynamic"), max_context=97)
