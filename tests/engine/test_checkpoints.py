"""Checkpoints that lack tensors of the model, or have them under other names, are refused by name."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, make_model
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoConfig,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from inflight.core.errors import ModelLoadError
from inflight.engine.model import checkpoints
from inflight.engine.model.aliases import aliases_of
from inflight.engine.model.checkpoints import compare_checkpoint, load_checkpoint
from inflight.engine.model.loading import eos_token_ids, load_config, load_model
from inflight.tools.demo.trainer import load_trainer
from inflight.weights.tensors import layout_of

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def changed(model_dir: Callable[[str], str], name: str, path: Path, change: Callable[[Tensors], Tensors]) -> str:
    """A copy of a saved model, the tensors of which are changed."""
    source = Path(model_dir(name))
    path.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(change(tensors), path / "model.safetensors", {"format": "pt"})
    return str(path)


def without(pattern: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}


def renamed(pattern: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(pattern, new, name): tensor for name, tensor in tensors.items()}


def added(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape)}


def load(path: str) -> torch.nn.Module:
    return load_model(path, dtype=None, device=CPU, seed=0)


REFUSED = {
    "a norm": ("qwen3", without(r"layers\.1\.self_attn\.q_norm"), ["lacks 1 tensor (model.layers.1.self_attn.q_norm"]),
    "an MLP": ("llama", without(r"layers\.2\.mlp"), ["lacks 3 tensors", "model.layers.2.mlp.down_proj.weight"]),
    "a key projection": ("llama", without(r"layers\.0\.self_attn\.k_proj"), ["layers.0.self_attn.k_proj.weight"]),
    "an untied head": ("llama", without("lm_head"), ["lacks 1 tensor (lm_head.weight)"]),
    "a layer": ("llama", without(r"layers\.1\."), ["lacks 9 tensors", "and 6 more"]),
    "a bias": ("qwen2", without(r"layers\.1\.self_attn\.q_proj\.bias"), ["model.layers.1.self_attn.q_proj.bias"]),
    "all": ("llama", lambda tensors: {"something": torch.ones(3)}, ["lacks 30 tensors", "no place for 1 tensor"]),
    "one expert": ("qwen3-moe", without(r"layers\.1\.mlp\.experts\.3\."), ["layers.1.mlp.experts"]),
    "part of an expert": ("qwen3-moe", without(r"layers\.1\.mlp\.experts\.3\.up_proj"), ["layers.1.mlp.experts"]),
    "the last expert": ("mixtral", without(r"layers\.0\..*experts\.3\."), ["layers.0.mlp.experts"]),
    "all experts": ("qwen3-moe", without(r"layers\.1\.mlp\.experts"), ["lacks 2 tensors", "layers.1.mlp.experts"]),
    "a router": ("qwen3-moe", without(r"layers\.1\.mlp\.gate\.weight"), ["model.layers.1.mlp.gate.weight"]),
    "sinks": ("gpt-oss", without(r"layers\.1\.self_attn\.sinks"), ["model.layers.1.self_attn.sinks"]),
    "a compiled model": ("qwen3", renamed("^", "_orig_mod."), ["lacks", "_orig_mod.", "torch.compile"]),
    "a compiled body": ("llama", renamed(r"^model\.", "model._orig_mod."), ['contain "_orig_mod."']),
    "compiled layers": ("llama", renamed(r"(layers\.\d)", r"\1._orig_mod"), ['contain "_orig_mod."']),
    "a compiled mixture": ("qwen3-moe", renamed("^", "_orig_mod."), ['contain "_orig_mod."']),
    "DistributedDataParallel": ("qwen3", renamed("^", "module."), ['contain "module."', "DistributedDataParallel"]),
    "FSDP": ("llama", renamed("^", "_fsdp_wrapped_module."), ['contain "_fsdp_wrapped_module."']),
    "the body thrice": ("llama", renamed(r"^model\.", "model.model.model."), ['begin with "model.', "remove this"]),
    "an own prefix": ("llama", renamed("^", "policy.actor."), ['begin with "policy.actor."']),
    "a shape": ("llama", lambda t: t | {"model.norm.weight": torch.ones(65)}, ["norm.weight: [65] instead of [64]"]),
    "a vocabulary": (
        "llama",
        lambda t: t | {"lm_head.weight": torch.ones(211, 64)},
        ["lm_head.weight: [211, 64] instead of [199, 64]"],
    ),
    "a bias that the model lacks": (
        "llama",
        added("model.layers.1.self_attn.q_proj.bias", 64),
        ["would ignore 1 tensor (model.layers.1.self_attn.q_proj.bias)", "config.json"],
    ),
    "a norm that the model lacks": ("llama", added("model.layers.1.self_attn.q_norm.weight", 16), ["would ignore"]),
    "an adapter": (
        "llama",
        added("model.layers.1.self_attn.q_proj.lora_A.default.weight", 4, 64),
        ["would ignore", "Merge the adapters"],
    ),
}


def layer(number: int, prefix: str = "model.") -> Callable[[Tensors], Tensors]:
    """Adds a layer of this number, a copy of the last one."""
    last = "model.layers.2."
    return lambda tensors: (
        tensors
        | {
            f"{prefix}layers.{number}.{name.removeprefix(last)}": tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(last)
        }
    )


REFUSED |= {
    "more layers": ("llama", layer(3), ["would ignore 9 tensors", "model.layers.3.", "num_hidden_layers"]),
    "more layers of a mixture": ("qwen3-moe", layer(3), ["model.layers.3.", "num_hidden_layers"]),
    "more layers without the prefix": (
        "llama",
        lambda tensors: renamed(r"^model\.", "")(layer(3)(tensors)),
        ["layers.3.", "num_hidden_layers"],
    ),
    "more layers than those that predict several tokens": (
        "llama",
        lambda tensors: layer(3)(tensors) | added("model.layers.4.eh_proj.weight", 64, 128)({}),
        ["would ignore 9 tensors (model.layers.3.", "num_hidden_layers"],
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(model_dir, tmp_path, case):
    name, change, expected = REFUSED[case]
    path = changed(model_dir, name, tmp_path / "changed", change)
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    for part in (path, type(make_model(name)).__name__, *expected):
        assert part in str(caught.value)
    assert len(str(caught.value)) < 900
    with pytest.raises(ModelLoadError, match="does not fit"):
        load_trainer(path, CPU)
    with pytest.raises(ModelLoadError, match="does not fit"):
        compare_checkpoint(path, load_config(path), trust=False)


TAKEN = {
    "as it is saved": ("qwen3", lambda tensors: tensors),
    "a tied head that is saved, too": (
        "qwen3",
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
    ),
    "a mixture of experts": ("qwen3-moe", lambda tensors: tensors),
    "without the prefix of the body": ("qwen3", renamed(r"^model\.", "")),
    "with the prefix of the body twice": ("qwen3", renamed(r"^model\.", "model.model.")),
    "old rotary buffers": ("llama", added("model.layers.0.self_attn.rotary_emb.inv_freq", 8)),
    "layers that predict several tokens": ("llama", added("mtp.layers.0.self_attn.q_proj.weight", 64, 64)),
    "a layer beyond the last that predicts several tokens": (
        "llama",
        lambda tensors: layer(3)(tensors) | added("model.layers.3.eh_proj.weight", 64, 128)({}),
    ),
    "a vision tower": ("llama", added("visual.blocks.0.attn.qkv.weight", 8, 8)),
    "a value head": ("llama", added("v_head.summary.weight", 1, 64)),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_checkpoint_with_all_tensors_of_the_model_is_loaded(model_dir, tmp_path, caplog, case):
    name, change = TAKEN[case]
    path = changed(model_dir, name, tmp_path / "changed", change)
    with caplog.at_level(logging.WARNING, logger="inflight.engine"):
        loaded = load(path)
    compare_checkpoint(path, load_config(path), trust=False)
    expected = make_model(name).state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.state_dict().items())
    notes = [r.message for r in caplog.records if "does not use" in r.message]
    assert bool(notes) == (case.startswith(("layers", "a layer", "a vision", "a value")))


def test_layers_for_several_tokens_that_transformers_ignores_are_accepted(tmp_path, caplog):
    """Transformers ignores layer 46 of this family by its name. Layer 2 is one that config.json forgot."""
    config = Glm4MoeConfig(intermediate_size=64, moe_intermediate_size=32, n_routed_experts=4, **SMALL)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {re.sub(r"layers\.1\.", "layers.{}.", name): t for name, t in tensors.items() if "layers.1." in name}
    save_file(tensors | {name.format(46): t.clone() for name, t in more.items()}, file, {"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="inflight.engine"):
        load(str(tmp_path))
    assert not [r for r in caplog.records if "does not use" in r.message]
    save_file(tensors | {name.format(2): t.clone() for name, t in more.items()}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\..*num_hidden_layers"):
        load(str(tmp_path))


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_masks_in_old_checkpoints_are_accepted(tmp_path, prefix):
    gpt2 = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99, n_positions=64)
    neo = GPTNeoConfig(
        num_layers=2, hidden_size=32, num_heads=2, vocab_size=99, attention_types=[[["global", "local"], 1]]
    )
    for config, attention in ((gpt2, "attn"), (neo, "attn.attention")):
        path = tmp_path / config.model_type
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        for number in range(2):
            tensors[f"transformer.h.{number}.{attention}.bias"] = torch.ones(1, 1, 64, 64)
            tensors[f"transformer.h.{number}.{attention}.masked_bias"] = torch.tensor(-1e4)
        tensors = {prefix + name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in model.state_dict().items())
        load_checkpoint(str(path), loaded.config)
        added = {f"{prefix}h.1.{attention}.scale": torch.ones(1)}
        save_file(tensors | added, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelLoadError, match=re.escape(f"h.1.{attention}.scale")):
            load_checkpoint(str(path), loaded.config)


def test_a_missing_shard_is_refused_by_the_name_of_its_file(tmp_path):
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=shards[1].name):
        load(str(tmp_path))


def test_tensors_that_an_index_omits_are_refused_by_name(tmp_path):
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shard = next(s for s in sorted(tmp_path.glob("model-*.safetensors")) if len(load_file(s)) > 1)
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, shard, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=re.escape(lost)):
        load(str(tmp_path))


def test_pickled_checkpoints_are_held_to_the_same(tmp_path):
    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(
        {"module." + name: tensor for name, tensor in model.state_dict().items()}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(ModelLoadError, match=re.escape('contain "module."')):
        load(str(tmp_path))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_loaded_as_it_is_saved(model_dir, name, caplog):
    loaded, expected = load(model_dir(name)), make_model(name).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert not [r for r in caplog.records if r.name == "inflight.engine"]


def test_another_vocabulary_in_the_configuration(tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    config.vocab_size = 256
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=re.escape("[199, 64] instead of [256, 64]")):
        load(str(tmp_path))


def save_quantised(
    path: Path, config: PretrainedConfig, method: dict[str, object], quantise: Callable[[str, torch.Tensor], Tensors]
) -> None:
    """Save a random model in bfloat16, then replace tensors by the results of `quantise`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    quantised = {key: part for name, tensor in tensors.items() for key, part in quantise(name, tensor).items()}
    save_file(quantised, path / "model.safetensors", {"format": "pt"})
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | {"quantization_config": method}))


SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def as_fp8(name: str, tensor: torch.Tensor) -> Tensors:
    if not name.endswith("proj.weight"):
        return {name: tensor}
    rows, columns = tensor.shape
    blocks = [[tensor[i : i + 128, j : j + 128] for j in range(0, columns, 128)] for i in range(0, rows, 128)]
    scales = torch.stack([torch.stack([block.float().abs().max() / 448 for block in row]) for row in blocks])
    of_each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {name: (tensor.float() / of_each).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def as_mxfp4(name: str, tensor: torch.Tensor) -> Tensors:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, width, out = tensor.shape
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full((experts, out, width // 32), 120, dtype=torch.uint8)}


QUANTISED = {
    "fp8": (LlamaConfig(intermediate_size=256, **SMALL), FP8, as_fp8),
    "fp8 of part blocks": (LlamaConfig(intermediate_size=200, **SMALL), FP8, as_fp8),
    "fp8 of blocks that do not divide": (LlamaConfig(intermediate_size=325, **SMALL), FP8, as_fp8),
    "fp8 experts": (
        Qwen3MoeConfig(
            intermediate_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, head_dim=32, **SMALL
        ),
        FP8,
        as_fp8,
    ),
    "mxfp4": (
        GptOssConfig(intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, head_dim=32, **SMALL),
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        as_mxfp4,
    ),
}


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_checkpoint_has_the_layout_of_a_trainer_in_bfloat16(tmp_path, monkeypatch, kind, gpu):
    """On a GPU Transformers finds nothing to keep it from quantised weights."""
    if gpu:
        for quantizer in (FineGrainedFP8HfQuantizer, Mxfp4HfQuantizer):
            monkeypatch.setattr(quantizer, "validate_environment", lambda self, *args, **kwargs: None)
    config, method, quantise = QUANTISED[kind]
    save_quantised(tmp_path, config, method, quantise)
    loaded = load(str(tmp_path))
    trainer = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert layout_of(loaded) == layout_of(trainer)
    assert aliases_of(loaded) == aliases_of(trainer)
    if kind != "mxfp4":  # the values of which are made up
        torch.manual_seed(0)
        expected = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
        for name, tensor in loaded.state_dict().items():
            # Codes have 3 bits after the leading one, and each block has another scale.
            assert ((tensor - expected[name]).abs() <= 0.07 * expected[name].abs() + 1e-4).all()


@pytest.mark.parametrize(
    ("kind", "lost", "named"),
    [
        ("fp8", r"layers\.1\.mlp\.up_proj\.weight_scale_inv", "layers.1.mlp.up_proj.weight"),
        ("fp8", r"layers\.1\.mlp\.up_proj\.", "layers.1.mlp.up_proj.weight"),
        ("fp8 experts", r"layers\.1\.mlp\.experts\.2\.up_proj\.weight_scale_inv", "layers.1.mlp.experts.gate_up_proj"),
        ("mxfp4", r"layers\.1\.mlp\.experts\.down_proj_scales", "layers.1.mlp.experts.down_proj"),
    ],
)
def test_a_quantised_checkpoint_that_lacks_tensors_is_refused_by_name(tmp_path, kind, lost, named):
    save_quantised(tmp_path, *QUANTISED[kind])
    file = tmp_path / "model.safetensors"
    save_file(without(lost)(load_file(file)), file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=re.escape(named)):
        load(str(tmp_path))


def test_scales_that_only_quantised_kernels_read_are_ignored(tmp_path):
    save_quantised(tmp_path, *QUANTISED["fp8"])
    file = tmp_path / "model.safetensors"
    scales = {"self_attn.k_scale", "self_attn.q_proj.input_scale"}
    save_file(load_file(file) | {f"model.layers.0.{s}": torch.ones(1) for s in scales}, file, {"format": "pt"})
    load(str(tmp_path))


def test_tensors_of_several_layers_that_cannot_be_converted_are_named(tmp_path):
    """Transformers lists such layers as one name, `layers.{0, 1}`."""
    save_quantised(tmp_path, *QUANTISED["fp8"])
    file = tmp_path / "model.safetensors"
    scales = {n: t[:0] if "up_proj.weight_scale_inv" in n else t for n, t in load_file(file).items()}
    save_file(scales, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"does not fit LlamaForCausalLM.*up_proj"):
        load(str(tmp_path))


def test_an_adapter_next_to_whole_weights_is_refused(tmp_path):
    """Transformers would add it to weights into which it was merged."""
    model = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"has adapter_config\.json.*If the adapter was merged"):
        load(str(tmp_path))


@pytest.mark.parametrize("ids", ["7", [3, "7"], 2.5])
def test_end_of_sequence_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(ModelLoadError, match="eos_token_id is"):
        eos_token_ids(SimpleNamespace(eos_token_id=ids), tokenizer=None, vocab_size=9)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["modelopt", "quartz"])
def test_a_quantisation_that_transformers_does_not_read_is_refused_by_name(tmp_path, method):
    """Transformers would load the codes as weights."""
    save_quantised(tmp_path, QUANTISED["fp8"][0], {"quant_method": method}, as_fp8)
    with pytest.raises(ModelLoadError, match=f"quantised by '{method}'"):
        load(str(tmp_path))


def test_a_quantisation_in_the_text_config_is_read(tmp_path, monkeypatch):
    """On a GPU Transformers would keep the quantised weights."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    text = LlamaConfig(intermediate_size=256, **SMALL)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=5))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = [as_fp8(n, t) if "language_model" in n else {n: t} for n, t in tensors.items()]
    save_file({n: t for part in parts for n, t in part.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["text_config"]["quantization_config"] = FP8
    (tmp_path / "config.json").write_text(json.dumps(saved))
    loaded, expected = load(str(tmp_path)).state_dict(), model.state_dict()
    name = next(name for name in expected if name.endswith("layers.1.mlp.up_proj.weight"))
    assert (loaded[name] - expected[name]).abs().max() <= 0.07 * expected[name].abs().max()


def test_a_checkpoint_is_compared_without_accelerate(model_dir, tmp_path, monkeypatch):
    """As in an environment of vLLM."""
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    path = changed(model_dir, "llama", tmp_path / "changed", without(r"layers\.0\.self_attn\.k_proj"))
    with pytest.raises(ModelLoadError, match=re.escape("layers.0.self_attn.k_proj.weight")):
        compare_checkpoint(path, load_config(path), trust=False)
    compare_checkpoint(model_dir("llama"), load_config(model_dir("llama")), trust=False)
