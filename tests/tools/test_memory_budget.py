"""The memory that `inflight doctor --model` prints is the memory that engine and trainer take."""

import math
from types import SimpleNamespace

import pytest
import torch
from family_configs import tiny_config
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2_5_VLConfig

from inflight.core.errors import ModelLoadError
from inflight.engine.cache.classify import classify_layers
from inflight.engine.model.loading import load_model
from inflight.engine.model.shapes import shape_config
from inflight.tools.bench.options import ThroughputOptions
from inflight.tools.bench.peers import make_setup
from inflight.tools.bench.throughput import _mbu
from inflight.tools.memory_budget import BF16_BYTES, GIB, TRAINERS, Budget, budget_of, cached_dims, print_budget
from inflight.weights.tensors import layout_of


@pytest.mark.parametrize("name", ["tiny", "small", "tiny-moe", "tiny-hybrid"])
def test_slots_and_cache_have_the_size_of_the_engines(name):
    budget = budget_of(name, sequences=3, context=10)
    model = load_model(name, dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
    assert budget.weight_bytes == pytest.approx(layout_of(model).total_bytes, rel=0.01)
    layers = classify_layers(model)
    token_bytes = sum(layer.token_dim * layer.dtype.itemsize for layer in layers.attention)
    assert budget.kv_bytes == 3 * 10 * token_bytes
    state_bytes = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for layer in layers.states for tensor in layer)
    assert budget.state_bytes == (2 * 3 + 1) * state_bytes
    assert (budget.state_bytes > 0) == (name == "tiny-hybrid")
    assert budget.engine_bytes(2) - budget.engine_bytes(1) == budget.weight_bytes


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_latent_attention_keeps_latents(name, tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    model.save_pretrained(tmp_path)
    budget = budget_of(str(tmp_path), sequences=3, context=10)
    layers = classify_layers(load_model(str(tmp_path), dtype=None, device=torch.device("cpu"), seed=0)).attention
    assert all(layer.latent for layer in layers)
    assert budget.kv_bytes == 3 * 10 * sum(layer.token_dim for layer in layers) * BF16_BYTES
    assert budget.kv_bytes == 3 * 10 * len(layers) * (16 + 8) * BF16_BYTES


def test_a_slot_has_no_towers(tmp_path):
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"hidden_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(text_config={**text, "intermediate_size": 128, "vocab_size": 500}, vision_config=vision)
    config.save_pretrained(tmp_path)
    budget = budget_of(str(tmp_path), sequences=1, context=1)
    model = AutoModelForImageTextToText.from_config(config)
    in_tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    assert in_tower > 0
    assert budget.weight_bytes == 2 * (budget.num_parameters - in_tower)


@pytest.mark.parametrize(("trainer", "dtype"), [("fp32, AdamW", torch.float32), ("bf16, AdamW", torch.bfloat16)])
def test_a_trainer_has_its_size(trainer, dtype):
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if t.dim()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert num_bytes == TRAINERS[trainer] * budget_of("tiny", sequences=1, context=1).num_parameters


def test_what_fits_is_printed(capsys):
    budget = Budget(1000, 2000, 500, 0)
    assert budget.left_bytes(2 * GIB, "LoRA, base in bf16", 1) == 2 * GIB - budget.engine_bytes(1) - 2000
    print_budget("qwen3-8b", sequences=64, context=1024, gpu_gib=80, console=Console(width=100, no_color=True))
    out = capsys.readouterr().out
    assert "8.19 B parameters, 64 sequences of 1,024 tokens, 80 GiB" in out
    [lora] = [line for line in out.splitlines() if "LoRA" in line]
    assert "23.7 GiB" in lora
    assert "39.0 GiB" in lora
    [fp32] = [line for line in out.splitlines() if "fp32" in line]
    assert fp32.count("lacks") == 2


def test_a_model_that_is_none_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        budget_of(str(tmp_path), sequences=1, context=1)


@pytest.mark.parametrize("name", ["gemma4_text", "mimo_v2_flash", "mamba"])
def test_layers_of_different_sizes_keep_their_own(name, tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    model.save_pretrained(tmp_path)
    layers = classify_layers(load_model(str(tmp_path), dtype=None, device=torch.device("cpu"), seed=0)).attention
    assert sum(cached_dims(model)) == sum(layer.token_dim for layer in layers)
    assert budget_of(str(tmp_path), sequences=3, context=10).kv_bytes == 60 * sum(cached_dims(model))
    if layers:
        setup = make_setup(ThroughputOptions(model=str(tmp_path), device="cpu"), 1, 64, threads=1, directory=None)
        assert setup.kv_bytes_per_token >= sum(layer.token_dim * layer.dtype.itemsize for layer in layers)


@pytest.mark.parametrize(("name", "is_known"), [("tiny", True), ("tiny-moe", False), ("tiny-hybrid", False)])
def test_the_bandwidth_of_a_model_is_given_if_all_of_its_reads_are_counted(name, is_known):
    config = shape_config(name)
    setup = make_setup(ThroughputOptions(model=name, device="cpu"), 1, 64, threads=1, directory=None)
    point = {"decode_step_s": 1.0, "context_tokens": 100}
    hello = SimpleNamespace(copy_gb_s=1e-9)
    read_bytes = _mbu(point, config, setup, hello)  # pyright: ignore[reportArgumentType]
    assert (read_bytes is not None) == is_known
    if is_known:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert read_bytes == 4 * (sum(p.numel() for p in model.parameters()) + 100 * sum(cached_dims(model)))
