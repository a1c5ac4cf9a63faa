"""Sparse attention is exact up to `index_topk` tokens: the engine's context ends there, and packing as well."""

import numpy as np
import pytest
import torch
from family_configs import Family
from family_overrides import VARIANTS
from full_forward import full_forward_logprobs, worst_error
from hybrids import model_of
from made_batches import make_group, one_by_one
from tiny_models import run
from transformers import DeepseekV32Config

from inflight.core.errors import UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model import loading
from inflight.engine.model.loading import context_limit
from inflight.model_checks.indexers import indexers
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model import forward_mode
from inflight.training.model.forward import score_tokens, try_way
from inflight.training.model.forward_mode import scoring_way

TOLERANCE = 1e-4
SPARSE = Family("glm_moe_dsa-24", "glm_moe_dsa", {**VARIANTS["glm_moe_dsa"]["shared"], "index_topk": 24})
PARAMS = SamplingParams(max_tokens=64, seed=1, ignore_eos=True, n=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp(SPARSE.name))
    model_of(SPARSE).save_pretrained(made)
    return made


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt([(7 * i + length) % 190 + 5 for i in range(length)], PARAMS) for length in lengths]


def forbid_indexers(model: torch.nn.Module) -> None:
    """Let a pass through an indexer raise ZeroDivisionError."""
    for indexer in indexers(model):
        indexer.get_submodule("wk").register_forward_hook(lambda *_: 1 / 0)


# ---- engine -------------------------------------------------------------------------------------------------------


def test_the_context_ends_where_an_indexer_leaves_keys_out(make_engine, directory):
    assert make_engine(directory, max_context=0).options.max_context == 24
    refusal = r"glm_moe_dsa uses sparse attention \(index_topk=24\).* up to 24 tokens; .* is 25; set max_context=24 or"
    with pytest.raises(UnsupportedModelError, match=refusal):
        Engine(EngineOptions(model=directory, device="cpu", max_context=25))
    config = DeepseekV32Config()
    assert context_limit(config, 0) == 2048
    assert context_limit(config, 0, sparse=True) == 4096, "vLLM computes the choice"


def test_an_indexer_that_the_configuration_does_not_name_is_refused(tmp_path):
    model = model_of(SPARSE)
    model.config.layer_types = ["full_attention"] * 4
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GlmMoeDsaForCausalLM cannot run"):
        Engine(EngineOptions(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_a_sequence_of_the_longest_length_is_exact(make_engine, directory, fuse):
    engine = make_engine(directory, max_context=24, max_prefill_tokens=7, fused=fuse)
    assert (engine.runner.unfused_reason is None) == fuse
    for module in engine.runner._modules:
        forbid_indexers(module)
    rollouts = run(engine, prompts(1, 10, 23))
    assert [len(rollout.prompt_token_ids) + len(rollout.token_ids) for rollout in rollouts] == [24] * 6
    assert worst_error(model_of(SPARSE), rollouts) < TOLERANCE


def test_longer_sequences_would_be_wrong(make_engine, directory, monkeypatch):
    monkeypatch.setattr(loading, "length_limit", lambda *_, **__: None)
    rollouts = run(make_engine(directory, max_context=48), prompts(20))
    errors = np.abs(full_forward_logprobs(model_of(SPARSE), rollouts[0]) - rollouts[0].logprobs)
    assert errors[:4].max() < TOLERANCE
    assert errors[5:].max() > 0.01


# ---- trainer ------------------------------------------------------------------------------------------------------


def batch_up_to(length: int) -> PackedBatch:
    """Two prompts with three samples each. The longest sequence has this length."""
    rng = np.random.default_rng(0)
    rollouts = [rollout for group in range(2) for rollout in make_group(rng, group, samples=3, prompt=6)]
    for rollout in rollouts:
        for name in ("token_ids", "logprobs", "weight_versions", "sampled_at_ns"):
            setattr(rollout, name, np.resize(getattr(rollout, name), length - 6))
    return pack(rollouts, [1.0] * len(rollouts))


@pytest.mark.parametrize(("length", "way"), [(24, "fused"), (25, "alone")])
def test_only_sequences_whose_keys_are_all_chosen_are_packed(length, way):
    model, batch = model_of(SPARSE), batch_up_to(length)
    assert scoring_way(model, batch, try_way) == way
    scores = score_tokens(model, batch).logprobs
    expected, _ = one_by_one(model_of(SPARSE), batch)
    torch.testing.assert_close(scores, expected, atol=TOLERANCE, rtol=TOLERANCE)
    if way == "fused":
        forbid_indexers(model)
        assert torch.equal(score_tokens(model, batch).logprobs, scores)


def test_packing_longer_sequences_would_be_wrong(monkeypatch):
    monkeypatch.setattr(forward_mode, "length_limit", lambda *_, **__: None)
    batch = batch_up_to(40)
    error = (score_tokens(model_of(SPARSE), batch).logprobs - one_by_one(model_of(SPARSE), batch)[0]).abs().max()
    assert error > 0.01
