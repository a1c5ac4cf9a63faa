"""Kernels without a GPU: the references equal Transformers, the Triton kernels equal the references in the
interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from inflight_kernels import (
    sampling,
    selective_logprobs,
)
from inflight_kernels.rotary import rope_and_cache, rope_and_cache_reference
from inflight_kernels.sampling import draw, draw_reference, uniforms
from inflight_kernels.tokenwise import (
    Norm,
    add_rms_norm,
    add_rms_norm_reference,
    gated_activation,
    gated_activation_reference,
    rms_norm,
    rms_norm_reference,
)
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

PARITY = Path(__file__).parents[1] / "helpers" / "kernel_parity.py"


@pytest.mark.slow
def test_kernels_equal_their_references_in_the_interpreter():
    subprocess.run([sys.executable, PARITY, "cpu"], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def test_every_launch_is_on_the_device_of_its_tensors():
    for path in Path(sampling.__file__).parent.glob("*.py"):
        text = path.read_text()
        guarded = re.findall(r"guarded\(\w+_kernel\[", text)
        if path.name != "_copy_triton.py":  # it has a guard of its own
            assert len(re.findall(r"_kernel\[", text)) == len(guarded), path.name


STRIDED = """
import torch
from inflight_kernels import Norm, _tokenwise_triton, selective_logprob, tokenwise
from inflight_kernels._selective_logprob_triton import SelectiveLogprobs
torch.manual_seed(0)
logits, tokens, temperatures = torch.randn(3, 50), torch.randint(50, (3, 2))[:, 0], torch.rand(3, 2)[:, 0] + 0.5
expected = selective_logprob.selective_logprobs_reference(logits, tokens, temperatures)
torch.testing.assert_close(SelectiveLogprobs.apply(logits, tokens, temperatures), expected)
x, norm = torch.randn(3, 8), Norm(torch.randn(8, 2)[:, 0], 1e-6)
torch.testing.assert_close(_tokenwise_triton.add_rms_norm(x, None, norm)[0], tokenwise.rms_norm_reference(x, norm))
"""


def test_kernels_take_strided_tensors():
    subprocess.run([sys.executable, "-c", STRIDED], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_kernels_equal_their_references_on_the_gpu():
    subprocess.run([sys.executable, PARITY, "cuda"], check=True)


FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@FLOATS
@pytest.mark.parametrize(
    ("module", "rounding"),
    [
        (LlamaRMSNorm, {}),
        (Gemma2RMSNorm, {"offset": 1.0, "cast_first": False}),
        (Gemma3RMSNorm, {"offset": 1.0, "cast_first": False}),
        (Olmo2RMSNorm, {"cast_first": False}),
    ],
)
def test_rms_norm_is_that_of_transformers(module, rounding, dtype):
    torch.manual_seed(0)
    norm = module(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(2, 7, 48, dtype=dtype).unbind()
    with torch.no_grad():
        ours = Norm(norm.weight, 1e-5, **rounding)
        assert torch.equal(rms_norm_reference(x, ours), norm(x))
        y, s = add_rms_norm_reference(x, residual, ours)
        assert torch.equal(s, x + residual)
        assert torch.equal(y, norm(x + residual))


@FLOATS
@pytest.mark.parametrize(("activation", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_gated_activation_is_that_of_transformers(activation, name, dtype):
    torch.manual_seed(0)
    gate, up = (torch.randn(2, 5, 24) * 4).to(dtype)
    result = gated_activation_reference(torch.cat((gate, up), -1), activation)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # PyTorch's own, one value at a time or several
    torch.testing.assert_close(result, ACT2FN[name](gate) * up, atol=tolerance, rtol=tolerance)


def rotate(qkv, table, config, rotated=None, attention=None, **rounding):
    """Ours and Transformers' queries and keys, both [T, heads, D], and the values before and behind the cache."""
    q_heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    tokens, rotated = qkv.shape[0], rotated or head_dim
    cos, sin = (t[0, :, :rotated].contiguous() for t in table)
    positions = torch.randint(0, cos.shape[0], (tokens,))
    slots = torch.randperm(tokens)
    k_cache, v_cache = torch.zeros(2, 2, tokens // 2, kv_heads, head_dim, dtype=qkv.dtype).unbind()
    norms = None
    if attention:
        norms = tuple(Norm(norm.weight, **rounding) for norm in (attention.q_norm, attention.k_norm))
    q = rope_and_cache_reference(qkv, cos, sin, positions, slots, k_cache, v_cache, norms)
    k, v = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
    q_THD, k_THD, v_THD = qkv.view(tokens, -1, head_dim).split((q_heads, kv_heads, kv_heads), 1)
    if attention:
        q_THD, k_THD = attention.q_norm(q_THD), attention.k_norm(k_THD)
    expected = apply_rotary_pos_emb(q_THD, k_THD, *(t[positions].to(qkv.dtype) for t in (cos, sin)))
    return (q, k, v), (*expected, v_THD)


def assert_rotated(results, expected):
    tolerance = 1e-6 if expected[0].dtype == torch.float32 else 2e-2  # Transformers rounds each product and the sum
    for result, other in zip(results[:2], expected[:2], strict=True):
        torch.testing.assert_close(result, other, atol=tolerance, rtol=tolerance)
    assert torch.equal(results[2], expected[2])


@FLOATS
@pytest.mark.parametrize("rotated", [16, 12])
@torch.no_grad()
def test_rotation_is_that_of_transformers(rotated, dtype):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    angles = torch.rand(1, 50, rotated // 2).repeat(1, 1, 2) * 50
    table = (angles.cos(), angles.sin())
    if rotated == config.head_dim:
        table = LlamaRotaryEmbedding(config)(torch.zeros(()), torch.arange(50)[None])
    results, expected = rotate(torch.randn(10, 8 * 16).to(dtype), table, config, rotated)
    assert_rotated(results, expected)
    assert torch.equal(results[0][..., rotated:], expected[0][..., rotated:])


@FLOATS
@pytest.mark.parametrize(
    ("module", "config", "rounding"),
    [(Qwen3Attention, Qwen3Config, {}), (Gemma3Attention, Gemma3TextConfig, {"offset": 1.0, "cast_first": False})],
)
@torch.no_grad()
def test_head_norms_are_those_of_transformers(module, config, rounding, dtype):
    torch.manual_seed(0)
    shape = config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1)
    attention = module(shape, layer_idx=0).to(dtype)
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight)
    hidden = torch.randn(10, 64).to(dtype)
    qkv = torch.cat([p(hidden) for p in (attention.q_proj, attention.k_proj, attention.v_proj)], -1)
    llama = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    table = LlamaRotaryEmbedding(llama)(torch.zeros(()), torch.arange(50)[None])
    assert_rotated(*rotate(qkv, table, shape, attention=attention, eps=shape.rms_norm_eps, **rounding))


def test_a_negative_cache_index_writes_nothing():
    caches = torch.zeros(2, 2, 4, 1, 8)
    rope_and_cache(
        torch.ones(2, 24),
        torch.ones(4, 8),
        torch.zeros(4, 8),
        torch.tensor([0, 1]),
        torch.tensor([-1, 6]),
        *caches,
    )
    assert caches.flatten(1, 2).any(-1)[..., 0].nonzero().tolist() == [[0, 6], [1, 6]]


def mix64(x):
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def test_uniforms_have_the_bits_of_splitmix64():
    assert int(mix64(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # the first number of Vigna's splitmix64.c
    torch.manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (100_000,))
    seeds[:3] = torch.tensor([0, -1, -(2**63)])
    positions = torch.randint(0, 2**31, seeds.shape)
    bits = mix64(seeds.numpy().view(np.uint64) ^ mix64(positions.numpy().view(np.uint64))) >> np.uint64(40)
    assert np.array_equal(uniforms(seeds, positions).numpy(), (bits / 2**24).astype(np.float32))


def draws(logits, temperature, count):
    rows = torch.arange(count)
    return draw_reference(logits.expand(count, -1), torch.full((count,), temperature), rows * 7919, rows % 100)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_softmax(temperature, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 16)
    torch.manual_seed(0)
    logits = torch.randn(50)
    logits[20] = -torch.inf
    tokens, logprobs, _ = draws(logits, temperature, 100_000)
    probs = torch.softmax(logits.double() / temperature, -1)
    torch.testing.assert_close(logprobs, probs.log()[tokens].float(), atol=1e-5, rtol=1e-5)
    counts = tokens.bincount(minlength=50)
    assert counts[20] == 0
    kept = probs > 0
    expected = probs[kept] * 100_000
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc((kept.sum() - 1) / 2, chi_square / 2)
    assert 0.001 < p_value < 0.999


@pytest.mark.parametrize("draw", [draw, draw_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("vocabulary", [7, 1024, 2500])
def test_draws_invert_the_cumulative_distribution(draw, vocabulary):
    torch.manual_seed(vocabulary)
    logits = torch.randn(200, vocabulary) * 3
    temperatures = torch.empty(200).uniform_(0.3, 2)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (200,)), torch.arange(200)
    tokens, logprobs, entropies = draw(logits, temperatures, seeds, positions, entropy=True)
    probs = torch.softmax(logits.double() / temperatures[:, None], -1)
    cdf, uniform = probs.cumsum(-1), uniforms(seeds, positions)
    index = tokens[:, None]
    assert (cdf.gather(1, index)[:, 0] > uniform - 1e-6).all()
    assert ((cdf - probs).gather(1, index)[:, 0] < uniform + 1e-6).all()
    torch.testing.assert_close(logprobs, probs.gather(1, index)[:, 0].log().float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, torch.special.entr(probs).sum(-1).float(), atol=1e-5, rtol=1e-5)
    alone = draw(logits[9:10], temperatures[9:10], seeds[9:10], positions[9:10])
    assert (alone[0][0], alone[1][0]) == (tokens[9], logprobs[9])


@pytest.mark.parametrize("draw", [draw, draw_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_a_token_of_weight_zero_is_never_drawn(draw, uniform, monkeypatch):
    monkeypatch.setattr(sampling, "uniforms", lambda seeds, positions: torch.full(seeds.shape, uniform))
    torch.manual_seed(0)
    logits = torch.full((3, 3000), -torch.inf)
    logits[0, 1500] = 0.0
    logits[1, 100:2900] = torch.randn(2800)
    logits[2, [5, 2999]] = 0.0
    zeros = torch.zeros(3, dtype=torch.int64)
    tokens = draw(logits, torch.ones(3), zeros, zeros)[0]
    assert tokens[0] == 1500
    assert 100 <= tokens[1] < 2900
    assert tokens[2] == (5 if uniform == 0 else 2999)


def test_temperatures_may_be_strided_or_of_another_dtype():
    torch.manual_seed(0)
    logits, temperatures = torch.randn(6, 300) * 3, torch.linspace(0.3, 2, 6)
    seeds = positions = torch.arange(6)
    expected = draw(logits, temperatures, seeds, positions)
    for other in (temperatures.double(), torch.stack((temperatures, -temperatures), 1)[:, 0]):
        tokens, logprobs, _ = draw(logits, other, seeds, positions)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(logprobs, expected[1])


@pytest.mark.parametrize("draw", [draw, draw_reference], ids=["kernel", "reference"])
def test_temperature_zero_takes_the_first_of_the_largest(draw):
    logits = torch.tensor([[0.0, 3.0, 3.0, -torch.inf], [1.0, 0.0, 0.5, 0.0]])
    zeros = torch.zeros(2, dtype=torch.int64)
    tokens, logprobs, entropies = draw(logits, torch.zeros(2), zeros, zeros, entropy=True)
    probs = torch.softmax(logits, -1)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, probs.log()[[0, 1], [1, 0]])
    torch.testing.assert_close(entropies, torch.special.entr(probs).sum(-1))


@pytest.mark.parametrize("draw", [draw, draw_reference], ids=["kernel", "reference"])
def test_a_tiny_temperature_does_not_overflow(draw):
    logits = torch.tensor([[1e30, 5.0, -1e30], [2.0, 2.0 - 1e-3, -torch.inf]])
    zeros = torch.zeros(2, dtype=torch.int64)
    tokens, logprobs, entropies = draw(logits, torch.full((2,), 1e-6), zeros, zeros, entropy=True)
    assert (tokens.tolist(), logprobs.tolist(), entropies.tolist()) == ([0, 0], [0.0, 0.0], [0.0, 0.0])


@pytest.mark.parametrize("draw", [draw, draw_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocabulary", [3, 3000])
def test_a_row_without_a_distribution_has_logprob_nan(draw, vocabulary, temperature):
    logits = torch.zeros(4, vocabulary)
    logits[0, 1] = torch.nan
    logits[1] = -torch.inf
    logits[2, 2] = torch.inf
    zeros = torch.zeros(4, dtype=torch.int64)
    tokens, logprobs, _ = draw(logits, torch.full((4,), temperature), zeros, zeros)
    assert logprobs.isnan().tolist() == [True, True, True, False]
    assert ((tokens >= 0) & (tokens < vocabulary)).all()


def test_shapes_that_do_not_fit_are_named():
    zeros, i64 = torch.zeros, torch.int64
    with pytest.raises(ValueError, match=r"expected logits \[N, V\].* got \[2, 3\], \[3\] and \[2\]"):
        selective_logprobs(zeros(2, 3), zeros(3, dtype=i64), torch.ones(2))
    with pytest.raises(ValueError, match=r"expected x \[T, D\] and weight \[D\], got \[2, 3\] and \[4\]"):
        rms_norm(zeros(2, 3), Norm(zeros(4), 1e-6))
    with pytest.raises(ValueError, match=r"expected a residual like x, torch.float32 \[2, 3\], got .* \[2, 1\]"):
        add_rms_norm(zeros(2, 3), zeros(2, 1), Norm(zeros(3), 1e-6))
    with pytest.raises(ValueError, match=r"expected gate_up \[T, 2·I\], got \[2, 3\]"):
        gated_activation(zeros(2, 3), "silu")
    with pytest.raises(ValueError, match="expected activation 'silu' or 'gelu_tanh', got 'relu'"):
        gated_activation(zeros(2, 4), "relu")
    with pytest.raises(ValueError, match=r"expected logits \[M, V > 0\].* got \[2, 3\], \[2\], \[1\] and \[2\]"):
        draw(zeros(2, 3), zeros(2), zeros(1, dtype=i64), zeros(2, dtype=i64))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"qkv": (2, 60)}, r"expected qkv \[T, \(Hq \+ 2·2\)·8\].* got \[2, 60\]"),
        ({"qkv": (2, 32)}, r"expected qkv \[T, \(Hq \+ 2·2\)·8\].* got \[2, 32\]"),
        ({"cos": (5, 10), "sin": (5, 10)}, r"expected cos and sin \[P, R\] with R even and at most 8, got \[5, 10\]"),
        ({"cache_index": (3,)}, r"expected positions and cache_index \[2\], got \[2\] and \[3\]"),
        ({"v_cache": (3, 4, 1, 8)}, r"expected k_cache and v_cache .* got \[3, 4, 2, 8\] and \[3, 4, 1, 8\]"),
        ({"k_norm": (7,)}, r"expected q_norm and k_norm \[8\], got \[7\]"),
    ],
)
def test_shapes_that_do_not_fit_a_rotation_are_named(wrong, message):
    shapes = {"qkv": (2, 64), "cos": (5, 8), "sin": (5, 8), "positions": (2,), "cache_index": (2,)}
    shapes |= {"k_cache": (3, 4, 2, 8), "v_cache": (3, 4, 2, 8), "k_norm": (8,)} | wrong
    arguments = {name: torch.zeros(shape) for name, shape in shapes.items()}
    norms = Norm(torch.zeros(8), 1e-6), Norm(arguments.pop("k_norm"), 1e-6)
    with pytest.raises(ValueError, match=message):
        rope_and_cache(**arguments, norms=norms)
