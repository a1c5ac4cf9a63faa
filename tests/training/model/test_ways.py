"""Models whose loss cannot go straight from hidden states to log-probabilities, or that cannot be fed packed sequences,
are scored all the same."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_batches import make_group
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_models import VOCABULARY
from tiny_models import make_model as tiny_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    Lfm2Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

import inflight
from inflight.core.errors import UnsupportedModelError
from inflight.core.rollout import Rollout, SamplingMask
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model import forward_mode
from inflight.training.model.forward import TokenScores, score_tokens
from inflight.training.model.head import PlainHead, plain_head
from inflight.training.model.packing import is_packable
from inflight.training.model.values import token_values

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
SCALED_LOGITS: dict[str, Callable[[], PretrainedConfig]] = {
    "granite": lambda: GraniteConfig(logits_scaling=3.0, **SHAPE),
    "granite-with-small-logits": lambda: GraniteConfig(logits_scaling=3.0, **(SHAPE | {"initializer_range": 1e-3})),
    "cohere": lambda: CohereConfig(logit_scale=0.25, **SHAPE),
}
SCALED_LOGITS_FACTORS = {"granite": 1 / 3, "granite-with-small-logits": 1 / 3, "cohere": 0.25}
HYBRIDS: dict[str, Callable[[], PretrainedConfig]] = {
    "lfm2": lambda: Lfm2Config(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, **SHAPE),
    "qwen3-next": lambda: Qwen3NextConfig(
        layer_types=["linear_attention", "full_attention"],
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **SHAPE,
    ),
}


def make_model(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_rollouts(*, masked: bool) -> list[Rollout]:
    """`masked`: two tokens out of three have a sampling mask of 2 to 30 tokens, those of the last rollout were not."""
    rng = np.random.default_rng(0)
    rollouts = [r for group, shape in enumerate([(3, 12), (1, 5), (2, 1)]) for r in make_group(rng, group, *shape)]
    for rollout in rollouts[:-1] if masked else []:
        sets = [np.array([], np.int32) for _ in rollout.token_ids]
        for t, token in enumerate(rollout.token_ids):
            if t % 3:
                others = rng.permutation(VOCABULARY)[: rng.integers(2, 30)]
                sets[t] = np.append(others[others != token], token).astype(np.int32)
        rollout.sampling_mask = SamplingMask.join(sets)
    return rollouts


def make_batch(rollouts: list[Rollout]) -> PackedBatch:
    return pack(rollouts, [0.0] * len(rollouts))


def one_by_one(model: torch.nn.Module, rollouts: list[Rollout]) -> TokenScores:
    """Each rollout in a forward pass of its own, and each drawn token over its sampling mask only."""
    logprobs, entropies = [], []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(rollout.prompt_token_ids) - 1 :]
        for t, token in enumerate(rollout.token_ids.tolist()):
            choices = np.arange(VOCABULARY)
            if rollout.sampling_mask is not None and len(left := rollout.sampling_mask.split()[t]):
                choices = left
            log = torch.log_softmax(logits[t, choices] / rollout.params.temperature, -1)
            logprobs.append(log[choices.tolist().index(token)])
            entropies.append(-(log.exp() * log).sum())
    return TokenScores(torch.stack(logprobs), torch.stack(entropies))


def assert_scored_as_one_by_one(model: torch.nn.Module, rollouts: list[Rollout]) -> TokenScores:
    """Values and gradients of both kinds; scores without entropies are the same log-probabilities."""
    batch = make_batch(rollouts)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    upstream = torch.randn(2, batch.num_drawn, generator=torch.Generator().manual_seed(0))
    results = []
    for scores in (score_tokens(model, batch, entropy=True), one_by_one(model, rollouts)):
        loss = scores.logprobs @ upstream[0] + scores.entropies @ upstream[1]
        results.append((scores, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)))
    (scores, grads), (expected, expected_grads) = results
    torch.testing.assert_close(scores.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropies, expected.entropies, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()
    without = score_tokens(model, batch)
    assert without.entropies is None
    torch.testing.assert_close(without.logprobs, scores.logprobs, atol=1e-6, rtol=1e-6)
    return scores


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SCALED_LOGITS)
def test_a_factor_of_the_logits_is_folded_into_the_temperature(name, masked, caplog):
    model = make_model(SCALED_LOGITS[name]())
    assert is_packable(model)
    assert plain_head(model) == PlainHead(pytest.approx(SCALED_LOGITS_FACTORS[name]), None)
    assert_scored_as_one_by_one(model, make_rollouts(masked=masked))
    assert "materialises its logits" not in caplog.text


def test_logits_that_are_not_the_heads_are_materialised(caplog):
    """A head that is no linear layer."""
    model = make_model(Qwen3Config(head_dim=8, **SHAPE))
    head = model.lm_head
    model.lm_head = torch.nn.Sequential(head)
    model.lm_head.weight, model.lm_head.bias = head.weight, head.bias
    assert_scored_as_one_by_one(model, make_rollouts(masked=True))
    assert "materialises its logits" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_plain_head_is_found_under_another_default_dtype(dtype):
    model, default = make_model(Qwen3Config(head_dim=8, **SHAPE)), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert plain_head(model) == PlainHead(1.0, None)
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_models_with_other_mixing_than_attention_are_packed(name, masked):
    model = make_model(HYBRIDS[name]())
    assert is_packable(model)
    assert_scored_as_one_by_one(model, make_rollouts(masked=masked))


def test_routing_is_not_replayed_in_padded_rows(monkeypatch):
    monkeypatch.setattr(forward_mode, "is_packable", lambda model: False)
    model, batch = make_model(HYBRIDS["qwen3-next"]()), make_batch(make_rollouts(masked=False))
    model.config.rms_norm_eps = 2e-6  # so that its twin is not the one of other tests
    batch.routed_experts = torch.zeros(len(batch.input_ids), 2, 2, dtype=torch.int16)
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM cannot be fed packed sequences"):
        score_tokens(model, batch)


@pytest.mark.parametrize("scored_before", [False, True])
@pytest.mark.parametrize("head", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_of_the_head_counts(head, scored_before):
    model, rollouts = make_model(Qwen3Config(head_dim=8, **SHAPE)), make_rollouts(masked=True)
    if scored_before:
        base = assert_scored_as_one_by_one(model, rollouts)
    else:
        with torch.no_grad():
            base = one_by_one(model, rollouts)
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **({"target_modules": ["q_proj"]} | head)))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    scores = assert_scored_as_one_by_one(adapted, rollouts)
    assert (scores.logprobs - base.logprobs).abs().max() > 0.1
    with adapted.disable_adapter():
        disabled = score_tokens(adapted, make_batch(rollouts)).logprobs
    torch.testing.assert_close(disabled, base.logprobs, atol=1e-4, rtol=1e-4)


def test_a_module_that_only_takes_tokens_and_gives_logits_is_scored_in_rows():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=self.table(input_ids))

    rollouts = make_rollouts(masked=False)
    model, batch = Bare(), pack(rollouts, [0.0] * len(rollouts))
    logits = model.table(batch.input_ids[batch.drawn - 1]) / batch.temperatures[batch.drawn, None]
    expected = torch.log_softmax(logits, -1)
    torch.testing.assert_close(
        score_tokens(model, batch).logprobs, expected.gather(1, batch.input_ids[batch.drawn][:, None])[:, 0]
    )


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PREFIX_TUNING"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PROMPT_TUNING"),
        (LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6]), "aLoRA"),
    ],
)
def test_adapters_that_depend_on_the_row_are_refused(config, method):
    model = get_peft_model(tiny_model("llama"), config)
    batch = make_batch(make_rollouts(masked=False))
    for score in (inflight.token_logprobs, token_values):
        with pytest.raises(UnsupportedModelError, match=f"a model with {method} cannot be scored"):
            score(model, batch)
    if method == "aLoRA":
        model.add_adapter("plain", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        model.set_adapter("plain")
        inflight.token_logprobs(model, batch)
