"""Models that can be neither run nor scored are refused by name, and stay as they were."""

import json
import re

import pytest
import torch
from family_check import long_rollouts
from tiny_models import make_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
)

from inflight.core.errors import ModelLoadError, UnsupportedModelError
from inflight.core.options import EngineOptions
from inflight.engine.cache.classify import classify_layers
from inflight.engine.loop.engine import Engine
from inflight.engine.model import agreement
from inflight.engine.model.agreement import agrees_with
from inflight.engine.model.attention.hook import ATTENTION_NAME
from inflight.engine.model.checkpoints import auto_class
from inflight.engine.model.loading import context_limit, read_config, refuse_other_models
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs


def test_an_encoder_decoder_cannot_be_scored():
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, vocab_size=199)
    model = T5ForConditionalGeneration(config).train()
    rollouts = long_rollouts()
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration cannot be scored"):
        token_logprobs(model, pack(rollouts, [0.0] * len(rollouts)))
    assert model.training


def test_a_model_with_two_language_models_in_one_is_refused(tmp_path):
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}
    parts = {name: AutoConfig.for_model(kind).to_dict() for name, kind in parts.items()}
    AutoConfig.for_model("musicgen", **parts).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="musicgen is not made for text alone"):
        Engine(EngineOptions(model=str(tmp_path), device="cpu"))


def test_each_multimodal_config_is_loaded_by_a_class_or_refused_by_name():
    loaded = 0
    for config_class in CONFIG_MAPPING.values():
        if "text_config" not in (config_class.sub_configs or {}):
            continue
        config = config_class.__new__(config_class)  # some cannot be made by default
        config.__dict__["text_config"] = PretrainedConfig()
        if auto_class(config) is not None and not config.is_encoder_decoder:
            refuse_other_models(config)
            loaded += 1
            continue
        with pytest.raises(UnsupportedModelError, match=rf"{config.model_type} is (multimodal|an encoder)") as caught:
            refuse_other_models(config)
        assert config_class.__name__ in str(caught.value) or config.is_encoder_decoder
    assert loaded > 90


def test_an_error_while_loading_names_the_family(tmp_path):
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM"):
        Engine(EngineOptions(model=str(tmp_path), device="cpu"))


def test_rounding_is_judged_by_the_dtype_of_the_weights():
    """Some models cast their logits to fp32, which makes what was rounded no more exact."""
    exact = torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    rounded = exact.bfloat16().float()
    assert agrees_with(rounded, exact, torch.bfloat16)
    assert not agrees_with(rounded, exact, torch.float32)
    assert not agrees_with(exact.flip(-1), exact, torch.bfloat16)


SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            RecurrentGemmaConfig(lru_width=32, num_attention_heads=2, intermediate_size=64, **SMALL),
            r"layers that the engine cannot run: model.layers.0 \(RecurrentGemmaRecurrentBlock\), model.layers.1",
        ),
        (MambaConfig(state_size=4, **SMALL), "go on from cached keys, values and states .* its logits are off by"),
    ],
    ids=["recurrent_gemma", "mamba"],
)
def test_layers_that_cannot_run_are_named(tmp_path, config, message):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(EngineOptions(model=str(tmp_path)))


class RunningMean(torch.nn.Module):
    """Mixes tokens without attention, and says so nowhere."""

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states.cumsum(1), None


def test_layers_that_do_not_announce_themselves_are_found_by_a_probe(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), attn_implementation=ATTENTION_NAME)
    model.model.layers[1].self_attn = RunningMean()
    with pytest.raises(UnsupportedModelError, match=r"cannot run: model\.layers\.1 \(RunningMean\)"):
        classify_layers(model)


def test_longrope_is_refused_beyond_where_sequences_would_change_each_other():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 1e4}
    config = LlamaConfig(max_position_embeddings=512)
    config.rope_parameters = rope
    assert context_limit(config, 0) == 64
    assert context_limit(config, 40) == 40
    with pytest.raises(UnsupportedModelError, match="uses longrope, which the engine can run up to 64 tokens"):
        context_limit(config, 65)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": "96"}, "'vocab_size': TypeError: Field 'vocab_size' expected int, got str (value: '96')"),
        ({"rope_scaling": "linear"}, "Field 'rope_parameters' with value 'linear' doesn't match any type"),
        ({"dtype": "bf16"}, "module 'torch' has no attribute 'bf16'"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
        ({"auto_map": {"AutoConfig": "own.OwnConfig"}, "model_type": "own"}, "a_package_that_nobody_has"),
    ],
    ids=["vocabulary", "rope", "dtype", "layers", "repository"],
)
def test_a_malformed_config_is_named(tmp_path, change, reason):
    config = LlamaConfig(num_hidden_layers=2).to_dict() | {"architectures": ["LlamaForCausalLM"]} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("import a_package_that_nobody_has\n")
    with pytest.raises(ModelLoadError, match=re.escape(f"cannot load model {str(tmp_path)!r}: ")) as caught:
        read_config(str(tmp_path), trust=True)
    assert reason in str(caught.value)


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_weights_that_are_nan_are_named(model_dir, monkeypatch, tmp_path, small):
    if not small:
        monkeypatch.setattr(agreement, "_SMALL", 0)
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"))
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM gives NaN or infinite logits, also in Transf"):
        Engine(EngineOptions(model=str(tmp_path), device="cpu", max_context=64))


@pytest.mark.parametrize(
    ("config", "limit"),
    [(LlamaConfig(max_position_embeddings=100), 100), (MptConfig(max_seq_len=90), 90), (WhisperConfig(), 448)],
    ids=["llama", "mpt", "whisper"],
)
def test_a_context_beyond_the_models_own_is_lowered_with_a_warning(caplog, config, limit):
    assert context_limit(config, 0) == context_limit(config, limit) == limit
    assert not caplog.records
    assert context_limit(config, 500) == limit
    assert f"max_context=500 is lowered to {limit}, the model's context in config.json" in caplog.text


def test_a_kv_cache_too_small_for_one_sequence_is_raised_with_a_warning(tmp_path, caplog):
    make_model("qwen3").save_pretrained(tmp_path)
    for asked, is_told in ((0, False), (64, False), (8, True)):
        caplog.clear()
        options = EngineOptions(model=str(tmp_path), device="cpu", max_context=64, kv_cache_tokens=asked)
        with Engine(options) as engine:
            assert engine.execution.kv_cache_tokens >= 64
        assert ("kv_cache_tokens=8 is raised to 64" in caplog.text) == is_told
