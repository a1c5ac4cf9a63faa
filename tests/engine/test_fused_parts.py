"""Parts of fused decoders that differ from Llama, against Transformers; a wrong part is not used."""

from dataclasses import replace

import family_check
import pytest
import torch
from family_configs import all_families
from family_weights import make_model
from tiny_adapters import error, publish_adapters, with_adapters
from tiny_models import marked, run
from transformers import LlamaConfig
from transformers.activations import XIELUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model import delta_net, fused, layer_parts, rotation

PARTS = {
    "starcoder2": "LayerNorm",
    "nemotron": "LayerNorm with 1 + w",
    "phi": "parallel blocks, and other names",
    "cohere": "parallel blocks, a logit scale, neighbouring numbers rotated, each in the tables twice",
    "ernie4_5": "neighbouring numbers rotated",
    "glm4": "norms before and after, a part of neighbouring numbers rotated",
    "granite": "scales of embeddings, residuals and logits",
    "granitemoeshared": "experts and a shared MLP, with scales",
    "ministral3-yarn": "queries scaled by position",
    "exaone4": "layers without positions",
    "cohere2": "layers without positions, told by their window",
    "qwen3_vl": "a decoder inside a multimodal model",
    "qwen3_5_text": "Gated DeltaNet in kernels, and gates next to the queries",
    "qwen3_next": "Gated DeltaNet with its own code, and experts",
    "olmo_hybrid": "layers with a state that have other norms than attention",
    "granitemoehybrid-published": "Mamba-2, and no positions at all",
    "bamba": "Mamba-2, and other names of norms and MLPs",
    "gemma4-published-e2b": "normed values, keys of earlier layers, inputs per layer, a scalar per layer",
    "gemma4-published-31b": "values that are normed keys, with other heads in layers with full attention",
    "kimi_linear": "KDA, and latent attention without positions",
    "lfm2": "short convolutions, and other names of norms and MLPs",
    "lfm2_moe": "another name of the rotation, and experts",
    "apertus": "other names of norms, and an MLP with its own code",
    "nemotron_h-published": "layers of one part: Mamba-2, attention or experts",
    "falcon_h1-published": "Mamba-2 next to attention, with scales",
    "gemma4-published-26b": "experts next to the MLP, with norms of their own",
    "afmoe-published": "gates of heads by a sigmoid, scaled embeddings",
    "laguna-published": "gates of heads by a softplus, other rotations by layer type",
}
QUICK = ["granite", "cohere", "ministral3-yarn"]
MEDIUM = ["glm4", "exaone4", "qwen3_vl", "qwen3_5_text", "gemma4-published-e2b", "lfm2", "afmoe"]
DIFFERENT = "the fused decoder and the Transformers model give different logits"
FAMILIES = {family.name: family for family in all_families()}


@pytest.mark.parametrize("name", marked(PARTS, QUICK, MEDIUM))
def test_a_part_is_computed_as_transformers_computes_it(name: str, tmp_path):
    """With the small weights of an untrained model they agree to 1e-4 nats in fp32. The family check runs first: it has
    large weights, and bf16."""
    assert family_check.check_family(FAMILIES[name]).engine.kind == family_check.FUSED
    model = make_model(FAMILIES[name], large=False)
    model.save_pretrained(tmp_path)
    rollouts, unfused_reason = family_check._generate(str(tmp_path), "float32")
    assert unfused_reason is None
    assert family_check._differences(model, rollouts).max() < 1e-4


ADAPTED = {
    "cohere": "all-linear",
    "glm4": ["q_proj", "v_proj", "o_proj"],
    "granite": "all-linear",
    "afmoe": ["q_proj", "o_proj"],
    "lfm2": ["k_proj", "w1", "w2", "w3"],
    "phi": ["q_proj", "k_proj", "dense"],
    "qwen3_vl": "all-linear",
}


@pytest.mark.parametrize("name", marked(ADAPTED, QUICK, MEDIUM))
def test_adapters_of_fused_parts_are_those_of_peft(name: str, tmp_path):
    make_model(FAMILIES[name]).save_pretrained(tmp_path)
    adapted = with_adapters(name, "a", targets=ADAPTED[name], base=lambda name: make_model(FAMILIES[name]))
    params = SamplingParams(max_tokens=16, n=2, seed=1, ignore_eos=True)
    with Engine(EngineOptions(model=str(tmp_path), device="cpu", lora_rank=4, adapters=("a",))) as engine:
        assert engine.runner.unfused_reason is None
        publish_adapters(engine, adapted)
        adapters = ["a", None, "a"]
        prompts = [Prompt(list(range(20, 21 + 9 * i)), params, adapter=each) for i, each in enumerate(adapters)]
        for rollout in run(engine, prompts):
            assert error(adapted, rollout, adapters[rollout.group_id]) < 5e-4


def wrong_order(*sizes: int):
    order = rotation_order(*sizes)
    return order.flip(0)


def swapped_gates(a, b, *parameters):
    return delta_gates(b, a, *parameters)


def shifted_inputs(*given):
    inputs = layer_inputs(*given)
    return None if inputs is None else inputs.roll(1, 1)


def without_scalar(end, x, own):
    return layer_end(end, x, own) / end.scalar


def without_key_scale(*given):
    return replace(attention(*given), key_scale=1.0)


attention, wrong_scales = fused._attention, fused._SideBySide.SCALES[::-1]
layer_inputs, layer_end = fused.inputs_per_layer, layer_parts.LayerEnd.__call__
rotation_order, delta_gates = rotation._halves_first, delta_net.delta_gates
MISTAKES = {
    "logit scale": ("granite", fused, "_logit_scale", lambda model: 1.0),
    "rotation of halves": ("ernie4_5", rotation, "_rotates_neighbours", lambda attention: False),
    "order": ("glm4", rotation, "_halves_first", wrong_order),
    "positions in all layers": ("exaone4", rotation, "_rotates", lambda attention: True),
    "no query scale": ("ministral3-yarn", rotation, "_query_scale", lambda attention: None),
    "decays for betas": ("qwen3_5_text", delta_net, "delta_gates", swapped_gates),
    "no norm of values": ("gemma4-published-e2b", fused, "value_norm", lambda module, head_dim: None),
    "inputs of other layers": ("gemma4-published-e2b", fused, "inputs_per_layer", shifted_inputs),
    "no scalar": ("gemma4-published-e2b", layer_parts.LayerEnd, "__call__", without_scalar),
    "no gates": ("afmoe", fused, "gate_of", lambda module, heads: None),
    "no experts": ("gemma4-published-26b", fused, "mlp_and_experts", lambda layer, mlp: mlp),
    "no norms of heads": ("lfm2", fused, "HEAD_NORMS", ()),
    "no rotation": ("lfm2_moe", fused, "ROTATIONS", ()),
    "no scale of keys": ("falcon_h1-published", fused, "_attention", without_key_scale),
    "scales of the wrong parts": ("falcon_h1-published", fused._SideBySide, "SCALES", wrong_scales),
    "a missing MLP": ("granitemoeshared", fused, "MLPS", ("block_sparse_moe",)),
}


@pytest.mark.parametrize(("name", "module", "part", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_part_is_noticed_at_load(name, module, part, mistake, tmp_path, monkeypatch):
    make_model(FAMILIES[name]).save_pretrained(tmp_path)
    monkeypatch.setattr(module, part, mistake)
    with Engine(EngineOptions(model=str(tmp_path), device="cpu")) as engine:
        assert engine.runner.unfused_reason == DIFFERENT


def test_a_gated_mlp_that_computes_more_runs_with_its_own_code():
    class Clamped(LlamaMLP):
        def forward(self, x):
            gate = self.act_fn(self.gate_proj(x)).clamp(max=1.0)
            return self.down_proj(gate * self.up_proj(x))

    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2)
    whole = torch.randn(64, 16)  # Gate and up are adjacent, as in a slot.
    for kind, is_fused in ((LlamaMLP, True), (Clamped, False)):
        mlp = kind(config).requires_grad_(False)
        mlp.gate_proj.weight.data, mlp.up_proj.weight.data = whole[:32], whole[32:]
        x = torch.randn(5, 16)
        expected = mlp(x)
        computed = fused._mlp(mlp)
        assert isinstance(computed, fused._Mlp) == is_fused
        assert torch.allclose(computed(x), expected, atol=1e-5)


def test_an_activation_with_weights_is_not_known_on_any_device():
    assert fused._activation(torch.nn.SiLU()) == "silu"
    assert fused._activation(XIELUActivation().to("meta")) is None
