"""A twin is like its model in all that decides how it computes, and what is wrong shows on it."""

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from architectures import REFUSED, RIGHT, make_model
from made_batches import make_batch, one_by_one
from tiny_models import CONFIGS
from tiny_models import make_model as make_known
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    Step3p7TextConfig,
)

import inflight.engine.model.fused as fused
import inflight.training.model.packing as packing
from inflight.core.errors import UnsupportedModelError
from inflight.core.options import EngineOptions
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.loop.engine import Engine
from inflight.engine.model.agreement import check_model
from inflight.engine.model.attention import hook
from inflight.engine.model.checkpoints import auto_class
from inflight.model_checks import masks, twin
from inflight.model_checks.shrink import shrink
from inflight.model_checks.twin import NoTwinError, twin_of
from inflight.training.model import forward
from inflight.training.model import forward_mode as ways
from inflight.training.model.forward import score_tokens
from inflight.training.model.head import plain_head

PUBLISHED: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    ),
    "qwen2.5-7b": lambda: LlamaConfig(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944
    ),
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "phi-3-mini-128k": lambda: Phi3Config(
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        sliding_window=262144,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": np.linspace(1, 3, 48).tolist(),
            "long_factor": np.linspace(1, 60, 48).tolist(),
            "original_max_position_embeddings": 4096,
        },
    ),
    "deepseek-v3": lambda: DeepseekV3Config(),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8, head_dim=128),
    "qwen2-moe": lambda: Qwen2MoeConfig(use_sliding_window=True, sliding_window=4096, max_window_layers=12),
    "gemma-2-9b": lambda: Gemma2Config(),
    "gemma-3-1b": lambda: Gemma3TextConfig(
        hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256
    ),
    "gpt-oss-20b": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "olmo-3-7b": lambda: Olmo3Config(),
    "smollm3-3b": lambda: SmolLM3Config(),
    "glm-4.5": lambda: Glm4MoeConfig(head_dim=128),
    "llama-4-scout": lambda: Llama4TextConfig(),
    "qwen3-next-80b": lambda: Qwen3NextConfig(),
    "nemotron-h-8b": lambda: NemotronHConfig(
        layers_block_type=[{"M": "mamba", "*": "attention", "-": "mlp"}[kind] for kind in "M-M-M-M*-" * 5 + "M-"],
        hidden_size=4096, head_dim=128, num_attention_heads=32, num_key_value_heads=8, mamba_num_heads=128,
        mamba_head_dim=64,
    ),
    "phi-3b": lambda: PhiConfig(
        hidden_size=3072,
        num_hidden_layers=32,
        num_attention_heads=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_as_published_has_a_small_twin(name):
    config = PUBLISHED[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = twin_of(model)
    assert found.is_causal
    assert sum(parameter.numel() for parameter in found.plain.parameters()) < 3_000_000
    small = found.plain.config
    assert type(found.plain) is type(model)
    heads = config.num_attention_heads / config.num_key_value_heads
    assert small.num_attention_heads / small.num_key_value_heads == heads
    types = getattr(config, "layer_types", None)
    assert types is None or set(small.layer_types) == set(types)
    window = getattr(small, "sliding_window", None)
    assert window is None or window < len(found.sequences[0])


@pytest.mark.medium
@pytest.mark.parametrize("name", RIGHT)
def test_no_part_of_a_twin_is_at_rest(name):
    """Each parameter that a forward pass uses changes the logits."""
    found = twin_of(make_model(RIGHT[name]()))
    model = found.plain.requires_grad_()
    model(input_ids=found.sequences[0][None], use_cache=False).logits.square().sum().backward()
    used = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert used
    assert [name for name, grad in used.items() if not grad.abs().max() > 0] == []
    model.requires_grad_(False)
    model.zero_grad()


def test_a_twin_is_made_once_and_leaves_the_random_state_alone(monkeypatch):
    monkeypatch.setattr(twin, "_twins", type(twin._twins)())
    model, other = make_model(RIGHT["olmo3"]()), make_model(RIGHT["olmo3"](), seed=1)
    state = torch.get_rng_state()
    assert twin_of(model) is twin_of(other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["olmo3", "granite"])
def test_a_twin_with_other_attention_leaves_the_first_as_it_was(name):
    """The engine asks for one; the loss of the same process tries the first."""
    found = twin_of(make_model(RIGHT[name]()))
    before = snapshot(found.plain)
    found.with_attention(hook.ATTENTION_NAME)
    assert snapshot(found.plain) == before
    assert found.plain.config._attn_implementation == "eager"


def test_a_model_without_a_twin_is_let_go(monkeypatch):
    monkeypatch.setattr(twin, "_twins", type(twin._twins)())
    model = nn.Linear(1, 1)
    model.config = Qwen3Config()  # pyright: ignore
    for _ in range(2):
        with pytest.raises(NoTwinError, match="a small Linear cannot be built from its configuration"):
            twin_of(model)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


# ---- mistakes, planted ----------------------------------------------------------------------------------------------


def serve(tmp_path, config: PretrainedConfig, dtype: str) -> str | None:
    """Why an engine over a model of this configuration runs it unfused. Raises what the engine raises."""
    make_model(config).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    engine = Engine(EngineOptions(model=str(tmp_path), device="cpu", max_context=64))
    engine.close()
    return engine.runner.unfused_reason


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mistake", ["pairs rotated otherwise", "positions off by one", "first of the norms forgotten"])
def test_a_fused_decoder_with_a_mistake_is_not_used(tmp_path, monkeypatch, mistake, dtype):
    config = CONFIGS["qwen3"]()
    assert serve(tmp_path, config, dtype) is None
    if mistake == "first of the norms forgotten":
        own = fused._attention
        monkeypatch.setattr(fused, "_attention", lambda *parts: dataclasses.replace(own(*parts), head_norms=None))
    else:
        own_rope = fused.rope_and_cache
        shift = (lambda table: table.roll(1, 0)) if "off by one" in mistake else (lambda table: table.flip(1))
        monkeypatch.setattr(
            fused, "rope_and_cache", lambda qkv, cos, sin, *rest, **options: own_rope(
                qkv, shift(cos).contiguous(), shift(sin).contiguous(), *rest, **options
            )
        )  # fmt: skip
    assert serve(tmp_path, config, dtype) == "the fused decoder and the Transformers model give different logits"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fused_decoder_that_raises_is_not_used(tmp_path, monkeypatch, dtype):
    def fail(*_, **__):
        raise TypeError("forward() missing 1 required positional argument")

    monkeypatch.setattr(fused.Rotations, "of", fail)
    reason = "fusing it failed (TypeError: forward() missing 1 required positional argument)"
    assert serve(tmp_path, CONFIGS["qwen3"](), dtype) == reason


def test_a_model_that_clips_queries_is_not_fused(tmp_path):
    """Small weights of an untrained model never reach the bound."""
    config = OlmoConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
        eos_token_id=1, clip_qkv=8.0,
    )  # fmt: skip
    assert serve(tmp_path, config, "float32") == "OlmoAttention clips queries, keys and values (clip_qkv)"
    config.clip_qkv = None
    assert serve(tmp_path, config, "float32") is None


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (OlmoConfig(clip_qkv=8.0), "clip_qkv", 2.0),
        (GptOssConfig(), "swiglu_limit", 2.0),
        (Step3p7TextConfig(num_hidden_layers=4, swiglu_limits=[0.0, 0.0, 7.0, 7.0]), "swiglu_limits", 2.0),
        (Gemma2Config(attn_logit_softcapping=50.0), "attn_logit_softcapping", 2.0),
    ],
    ids=["clip", "limit", "limits", "cap"],
)
def test_values_of_a_twin_exceed_the_bounds(config, name, expected):
    bounds = getattr(shrink(config), name)
    assert (max(bounds) if isinstance(bounds, list) else bounds) == expected


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mistral-sliding", "gemma2", "gpt-oss"])
def test_attention_that_ignores_the_window_is_refused(tmp_path, monkeypatch, name, dtype):
    def blind(*args, **kwargs):
        return LayerShape(*args, **(kwargs | {"window": None}))

    monkeypatch.setattr(hook, "LayerShape", blind)
    with pytest.raises(UnsupportedModelError, match=r"cannot be run: with the engine's attention .* logits are off by"):
        serve(tmp_path, CONFIGS[name](), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_that_ignores_a_softcap_is_refused(tmp_path, monkeypatch, dtype):
    def blind(*args, **kwargs):
        return LayerShape(*args, **(kwargs | {"softcap": None}))

    monkeypatch.setattr(hook, "LayerShape", blind)
    with pytest.raises(UnsupportedModelError, match="cannot be run: with the engine's attention"):
        serve(tmp_path, CONFIGS["gemma2"](), dtype)


def test_packed_training_that_ignores_the_window_is_not_used(monkeypatch, caplog):
    """The mask tells the window of this family, and nothing else does."""
    model, batch = make_model(RIGHT["phimoe-sliding"]()), make_batch()
    expected = score_tokens(model, batch).logprobs
    monkeypatch.setattr(packing, "_make_mask", lambda *_, **__: None)
    monkeypatch.setitem(packing.AttentionMaskInterface._global_mapping, packing.ATTENTION_NAME, lambda **_: None)
    monkeypatch.setattr(twin, "_twins", type(twin._twins)())
    model = make_model(RIGHT["phimoe-sliding"]())
    scores = score_tokens(model, batch)
    assert "PhimoeForCausalLM feeds its sequences in padded rows: packed, with logits, results" in caplog.text
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-4, rtol=1e-4)


class Scaled(nn.Module):
    """A product of what is scaled by numbers that are stored small and multiplied on use, as those of nGPT."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.scale = nn.Parameter(torch.full((linear.in_features,), 0.002))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sin(hidden * (self.scale / 0.002).square()))


class ScaledLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.down_proj = Scaled(layer.mlp.down_proj)

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, Scaled):
            super()._init_weights(module)


def test_a_twin_is_one_that_rounding_does_not_decide_about(monkeypatch):
    """With scales as far from where they begin as other vectors are, a rounding error would grow 20,000 times."""
    model = ScaledLlama(CONFIGS["llama"]())
    found = twin_of(model)
    assert found.is_causal
    assert not twin._is_chaotic(found)
    scale = found.plain.model.layers[0].mlp.down_proj.scale
    assert 0.001 < scale.mean() < 0.003
    assert scale.std() > 0.0002
    norm = found.plain.model.norm.weight
    assert norm.std() > 0.1
    check_model(model, fused=False)
    lengths, right = [len(ids) for ids in found.sequences], Scaled.forward
    monkeypatch.setattr(Scaled, "forward", lambda self, x: right(self, x) * (1 if x.shape[1] in lengths else 1.01))
    with pytest.raises(UnsupportedModelError, match=r"where sequences share a pass .* off by \d"):
        check_model(model, fused=False)


def test_a_model_that_runs_in_one_dtype_alone_has_a_twin(monkeypatch):
    model = make_known("llama")
    plain = type(model).forward

    def forward(self, *args, **kwargs):
        assert self.dtype == torch.float32
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    monkeypatch.setattr(twin, "_twins", {})  # one of an earlier test would tell nothing
    assert twin_of(model).is_causal


def test_layers_that_are_counted_by_parts_are_kept_of_each_part():
    """A decoder whose middle runs in a loop, with layers of two kinds in each part."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 12
    sections = {"n_input_layers": 9, "n_recurrent_layers": 18, "n_output_layers": 9}
    small = shrink(LlamaConfig(num_hidden_layers=36, layer_types=kinds, num_dense_layers=2, **sections))
    assert small.num_hidden_layers == len(small.layer_types) == sum(getattr(small, name) for name in sections) <= 16
    end = 0
    for name in sections:
        begin, end = end, end + getattr(small, name)
        assert set(small.layer_types[begin:end]) == set(kinds), name
    small = shrink(LlamaConfig(num_hidden_layers=36, n_input_layers=9, n_output_layers=9))
    assert small.num_hidden_layers == 3, "these count no parts"


@pytest.mark.medium
def test_a_model_without_a_twin_is_tried_itself(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise NoTwinError("it is one of a kind")

    monkeypatch.setattr("inflight.engine.model.agreement.twin_of", fail)
    monkeypatch.setattr(ways, "twin_of", fail)
    assert serve(tmp_path, CONFIGS["qwen3"](), "bfloat16") is None
    with pytest.raises(UnsupportedModelError, match="no causal decoder"):
        serve(tmp_path, REFUSED["bert"][0](), "bfloat16")
    model = make_known("qwen3")
    expected = make_known("qwen3")
    batch = make_batch()
    alone = score_tokens(model, batch).logprobs
    assert "Qwen3ForCausalLM is fed one sequence at a time" in caplog.text
    monkeypatch.undo()
    torch.testing.assert_close(alone, score_tokens(expected, batch).logprobs, atol=1e-4, rtol=1e-4)


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_a_note_of_a_mask_is_told_from_a_mask():
    note = masks.mask_note(
        mask_function=lambda b, h, q, k: k <= q, batch_size=2, q_length=5, kv_length=9, local_size=4, dtype=None
    )
    assert note.shape == (2, 1, 5, 9)
    assert masks.noted(note[:, :, :, :3], "X") == 4
    assert masks.noted(None, "X") is None
    with pytest.raises(UnsupportedModelError, match="X hands a mask of its own"):
        masks.noted(torch.zeros(1, 1, 5, 5), "X")


def test_a_note_tells_of_later_tokens():
    note = masks.mask_note(mask_function=lambda b, h, q, k: k > -1, batch_size=1, q_length=5, kv_length=5)
    assert masks.noted(note, "X") == masks.BOTH_SIDES


# ---- the trainer's model --------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> tuple:
    return (
        model.config.to_json_string(),
        model.config._attn_implementation,
        {name: "forward" in vars(part) for name, part in model.named_modules()},
        sum(len(part._forward_hooks) for part in model.modules()),
    )


@pytest.mark.parametrize("name", ["gemma3n_text", "llama4_text", "nemotron"])
def test_scoring_that_raises_leaves_the_model_as_it_was(name, monkeypatch):
    model = make_model(RIGHT[name]())
    with torch.no_grad():
        score_tokens(model, make_batch())
        before = snapshot(model)

        def fail(*_, **__):
            raise RuntimeError("out of memory")

        for place, part in ((forward, "selective_logprobs"), (type(model.model), "forward")):
            monkeypatch.setattr(place, part, fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            score_tokens(model, make_batch())
    assert snapshot(model) == before


def test_a_softcap_that_a_configuration_types_is_off_for_the_pass_alone():
    model = make_model(RIGHT["gemma3n_text"]())
    assert model.config.final_logit_softcapping == 30.0
    assert plain_head(model).softcap == 30.0
    score_tokens(model, make_batch())
    assert model.config.final_logit_softcapping == 30.0


@pytest.mark.parametrize("name", ["llama-dynamic", "llama4_text"])
def test_sequences_past_a_threshold_are_scored_alone(name):
    """Beyond it they would change each other."""
    model, batch = make_model(RIGHT[name]()), make_batch(shape=((2, 120), (2, 12)))
    scores = score_tokens(model, batch)
    torch.testing.assert_close(scores.logprobs, one_by_one(model, batch)[0], atol=2e-4, rtol=1e-4)


def test_a_row_has_no_more_tokens_than_a_model_takes():
    """Llama 4 scales queries by their place in the row, here from the 120th on; each sequence alone is shorter."""
    model, batch = make_model(RIGHT["llama4_text"]()), make_batch(shape=((1, 60), (1, 62), (1, 64)))
    assert ways.scoring_way(model, batch.select([0]), forward.try_way) == "fused"
    assert ways.scoring_way(model, batch, forward.try_way) == "rows"
    scores = score_tokens(model, batch)
    torch.testing.assert_close(scores.logprobs, one_by_one(model, batch)[0], atol=2e-4, rtol=1e-4)


def test_a_token_outside_of_the_vocabulary_is_named():
    batch = make_batch()
    batch.input_ids[5] = 4321
    with pytest.raises(ValueError, match="token 4321 is not in the vocabulary of Qwen3ForCausalLM, which has 199"):
        score_tokens(make_known("qwen3"), batch)


def test_dropout_in_train_mode_is_named_once(caplog):
    model = make_model(RIGHT["gpt2"]()).train()
    for _ in range(2):
        score_tokens(model, make_batch())
    assert caplog.text.count("GPT2LMHeadModel is in train mode and has dropout (transformer.drop: 0.1, and ") == 1


def test_a_shrunken_configuration_is_one_of_its_class():
    for name, make in PUBLISHED.items():
        config = make()
        before = config.to_json_string()
        small = shrink(config)
        assert type(small) is type(config), name
        json.loads(small.to_json_string())
        assert config.to_json_string() == before


@pytest.mark.parametrize(
    "name",
    [
        "minimax_m3_vl",  # projectors that are as wide as the text
        "granite_speech",
        pytest.param("janus", marks=pytest.mark.medium),  # 118 million parameters, nearly all in towers
    ],
)
def test_twins_of_published_sizes_lose_their_towers(name):
    config = CONFIG_MAPPING[name]()
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    twin = twin_of(model)
    assert twin.is_causal
    assert not twin.has_towers
    assert sum(parameter.numel() for parameter in twin.plain.parameters()) < 1_000_000
    again = twin.with_attention("eager")
    with torch.no_grad():
        assert torch.equal(again(input_ids=twin.sequences[0][None], use_cache=False).logits[0], twin.logits[0])


def test_a_twin_keeps_what_looks_like_a_tower_if_text_needs_it():
    config = CONFIG_MAPPING["inkling2"]()
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    assert twin_of(model).has_towers
