"""Which decoders run fused, and what it takes to add one."""

import pytest
import torch
from tiny_models import VOCABULARY, run
from transformers import AutoModelForCausalLM, PretrainedConfig, VaultGemmaConfig

from inflight.core.decoder import LAYER_NORMS, LayerNorms
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
UNKNOWN = {
    "vault-gemma": (
        VaultGemmaConfig(**SIZES),
        "VaultGemmaDecoderLayer has pre_feedforward_layernorm",
        LayerNorms("input_layernorm", None, "pre_feedforward_layernorm", None),
    ),
}


@pytest.mark.parametrize(("config", "reason", "norms"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_decoder_whose_norms_have_other_names_is_fused_with_one_entry_more(
    config: PretrainedConfig, reason: str, norms: LayerNorms, tmp_path, monkeypatch
):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    options = EngineOptions(model=str(tmp_path), device="cpu")
    prompts = [Prompt([5, 7, 9], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))]
    with Engine(options) as engine:
        assert engine.runner.unfused_reason == reason
        unfused = run(engine, prompts)
    monkeypatch.setattr("inflight.engine.model.fused.LAYER_NORMS", (norms, *LAYER_NORMS))
    with Engine(options) as engine:
        assert engine.runner.unfused_reason is None
        assert run(engine, prompts)[0].token_ids.tolist() == unfused[0].token_ids.tolist()
