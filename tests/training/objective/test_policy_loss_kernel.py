"""The fused policy loss: the reference equals autograd of `inflight.training`, and the kernel equals the reference."""

import os
import subprocess
import sys
from functools import partial
from math import exp, inf
from pathlib import Path

import pytest
import torch
import triton
from inflight_kernels import _policy_loss_triton, policy_loss_terms, policy_loss_terms_reference
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inflight.training.objective.corrections import token_mask, token_truncate, uncorrected
from inflight.training.objective.surrogates import cispo, ppo_clip, reinforce
from inflight.training.objective.tokens import DrawnTokens

torch.set_num_threads(1)

# Halves and quarters, so that differences are exact; e**0.5 and e**-0.25 are bounds below, met to the bit.
LOG_RATIOS = (-100.0, -20.25, -20.0, -1.5, -0.25, -(2.0**-20), 0.0, 2.0**-20, 0.5, 1.5, 20.0, 20.25, 100.0)
ADVANTAGES = (-2.5, -1.0, 0.0, 0.7)
LOW, HIGH = exp(-0.25), exp(0.5)
CORRECTIONS = {
    "none": (uncorrected, uncorrected, {}),
    "truncate": (partial(token_truncate, floor=LOW, cap=HIGH), partial(token_truncate, cap=inf), {}),
    "mask": (partial(token_mask, low=LOW, high=HIGH), partial(token_mask, low=0.0, high=inf), {}),
}
OPEN_PPO = partial(ppo_clip, low=inf, high=inf)
OPEN_CISPO = partial(cispo, cap=inf)


def ppo_case(**bounds):
    options = {f"clip_{side}": bounds[side] for side in ("low", "high") if side in bounds}
    options |= {"dual": bounds["dual"]} if "dual" in bounds else {}
    return "ppo_clip", partial(OPEN_PPO, **bounds), OPEN_PPO, options


SURROGATES = {
    "reinforce": ("reinforce", reinforce, reinforce, {}),
    "open ppo": ppo_case(),
    "ppo": ppo_case(low=1 - LOW, high=HIGH - 1),
    "ppo without room": ppo_case(low=0.0, high=0.0),
    "ppo above 1": ppo_case(low=-0.125, high=0.5),
    "dual ppo": ppo_case(low=1 - LOW, high=HIGH - 1, dual=exp(1.5)),
    "open dual ppo": ppo_case(dual=HIGH),
    "cispo": ("cispo", partial(cispo, floor=LOW, cap=HIGH), OPEN_CISPO, {"clip_low": LOW, "clip_high": HIGH}),
    "open cispo": ("cispo", OPEN_CISPO, OPEN_CISPO, {"clip_low": 0.0}),
}


@pytest.fixture(scope="module")
def columns():
    """f64: every log w with every log u and advantage. logprobs, behavior, proximal, advantages, weights, classes."""
    generator = torch.Generator().manual_seed(0)
    log_w, log_u, advantages = torch.cartesian_prod(
        *(torch.tensor(values, dtype=torch.float64) for values in (LOG_RATIOS, LOG_RATIOS, ADVANTAGES))
    ).T
    proximal = torch.randint(-40, 0, log_w.shape, generator=generator) / 4 - torch.zeros_like(log_w)
    weights = torch.randn(log_w.shape, generator=generator, dtype=torch.float64)
    weights[::6] = 0.0
    classes = torch.randint(3, log_w.shape, generator=generator)
    return proximal + log_u, proximal - log_w, proximal, advantages, weights, classes


def gradient_of(correction, surrogate, columns, weights):
    """(loss, gradient) by autograd."""
    leaf = columns[0].clone().requires_grad_()
    sequences = torch.zeros_like(columns[5])
    tokens = DrawnTokens(
        logprobs=leaf,
        behavior=columns[1],
        proximal=columns[2],
        advantages=columns[3],
        sequences=sequences,
        num_sequences=1,
    )
    loss = (weights * (correction(tokens) * surrogate(tokens))).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_loss_gradient_and_sums_are_those_of_autograd(correction, surrogate, columns):
    bounded_correction, open_correction, _ = CORRECTIONS[correction]
    name, bounded_surrogate, open_surrogate, bounds = SURROGATES[surrogate]
    result = policy_loss_terms(*columns, correction=correction, low=LOW, high=HIGH, surrogate=name, **bounds)

    loss, gradient = gradient_of(bounded_correction, bounded_surrogate, columns, columns[4])
    torch.testing.assert_close(result.loss, loss, atol=0, rtol=1e-9)
    torch.testing.assert_close(result.gradient, gradient, atol=0, rtol=1e-12)

    ones = torch.ones_like(columns[4])
    _, bounded = gradient_of(bounded_correction, bounded_surrogate, columns, ones)
    _, unbounded = gradient_of(open_correction, open_surrogate, columns, ones)
    clipped = (bounded - unbounded).abs() > 1e-4 * unbounded.abs()
    assert not clipped[columns[3] == 0].any()
    for of_class in range(3):
        here = columns[5] == of_class
        log = (columns[0] - columns[1])[here]
        rho = log.exp()
        expected = [here.sum(), rho.sum(), (rho * rho).sum(), rho.min(), rho.max()]
        expected += [(rho - 1 - log).sum(), log.abs().sum(), clipped[here].sum()]
        torch.testing.assert_close(
            result.sums[of_class], torch.stack([e.double() for e in expected]), atol=0, rtol=1e-9
        )


def test_ties_have_half_the_gradient_where_autograd_gives_half(columns):
    """Without them the test above would not see ties."""
    options = {"surrogate": "ppo_clip", "clip_low": 1 - LOW, "clip_high": HIGH - 1, "dual": exp(1.5)}
    weights = torch.ones_like(columns[4])
    gradient = policy_loss_terms(*columns[:4], weights, columns[5], **options).gradient
    log_u, advantages = columns[0] - columns[2], columns[3]
    at_dual, at_cap = (log_u == 1.5) & (advantages < 0), (log_u == 0.5) & (advantages > 0)
    torch.testing.assert_close(gradient[at_dual], -advantages[at_dual] * exp(1.5) / 2, atol=0, rtol=1e-12)
    torch.testing.assert_close(gradient[at_cap], -advantages[at_cap] * HIGH, atol=0, rtol=1e-12)


@pytest.mark.parametrize("room", [0.0, 0.2, inf])
def test_a_ratio_of_exactly_one_keeps_its_gradient(room):
    zeros, advantages = torch.full((2,), -1.5), torch.tensor([3.0, -3.0])
    result = policy_loss_terms(
        *(zeros, zeros, zeros, advantages, torch.ones(2), torch.ones(2, dtype=torch.int64)),
        surrogate="ppo_clip",
        clip_low=room,
        clip_high=room,
    )
    assert torch.equal(result.gradient, -advantages)
    assert result.loss == 0
    assert result.sums[1].tolist() == [2, 2, 2, 1, 1, 0, 0, 0]
    assert result.sums[0].tolist() == [0, 0, 0, inf, -inf, 0, 0, 0]


def test_no_tokens_have_no_loss():
    empty = torch.zeros(0)
    loss, gradient, sums = policy_loss_terms(*[empty] * 5, empty.long())
    assert (loss.item(), gradient.shape) == (0, (0,))
    assert sums.tolist() == [[0, 0, 0, inf, -inf, 0, 0, 0]] * 3


def test_strided_float32_has_the_reference_dtype_and_no_graph(columns):
    floats = torch.stack(columns[:5], 1).float().unbind(1)
    leaf = floats[0].detach().requires_grad_()
    result = policy_loss_terms(leaf, *floats[1:], columns[5], correction="truncate", high=2.0)
    expected = policy_loss_terms_reference(*columns, correction="truncate", high=2.0)
    assert [each.dtype for each in result] == [torch.float32, torch.float32, torch.float64]
    assert not any(each.requires_grad for each in result)
    torch.testing.assert_close(result.gradient.double(), expected.gradient, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(result.sums, expected.sums)


@pytest.mark.parametrize("surrogate", ["reinforce", "ppo_clip", "cispo"])
def test_a_log_probability_that_is_nan_makes_the_loss_nan(surrogate):
    ones = torch.ones(3)
    logprobs = torch.tensor([-1.0, torch.nan, -2.0])
    result = policy_loss_terms(logprobs, -ones, -ones, ones, ones, ones.long(), surrogate=surrogate, clip_low=0.0)
    assert result.loss.isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual": 1.0}, "dual must be greater than 1, got 1.0"),
        ({"dual": float("nan")}, "dual must be greater than 1, got nan"),
        ({"correction": "mask", "low": 2.0, "high": 1.0}, "expected low ≤ high, low finite, got low 2.0 and high 1.0"),
        ({"low": inf}, "expected low ≤ high, low finite, got low inf"),
        ({"surrogate": "ppo_clip", "clip_low": -0.5, "clip_high": 0.2}, "would bound u by 1.5 from below and 1.2"),
        ({"surrogate": "cispo", "clip_low": 3.0, "clip_high": 2.0}, "would bound u by 3.0 from below and 2.0"),
        ({"surrogate": "cispo", "clip_high": 5.0}, "for cispo clip_low is the floor of u, 0 for none"),
        ({"surrogate": "cispo"}, "for cispo clip_low is the floor of u, 0 for none"),
        ({"correction": "clamp"}, "expected correction 'none', 'truncate' or 'mask', got 'clamp'"),
        ({"surrogate": "gspo"}, "expected surrogate 'reinforce', 'ppo_clip' or 'cispo', got 'gspo'"),
    ],
)
def test_options_that_make_no_sense_are_named(options, message):
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        policy_loss_terms(*[zeros] * 5, zeros.long(), **options)


def test_shapes_that_do_not_fit_are_named():
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=r"each \[n\], got \[2\], \[2\], \[3\], \[2\], \[2\], \[2\]"):
        policy_loss_terms(zeros, zeros, torch.zeros(3), zeros, zeros, zeros.long())
    with pytest.raises(ValueError, match=r"each \[n\], got \[1, 2\]"):
        policy_loss_terms(*[zeros[None]] * 5, zeros[None].long())


def test_the_kernel_is_the_reference_in_the_interpreter():
    program = "import kernel_parity as k; k.check_policy_loss_terms('cpu', 1500); k.check_policy_loss_ties('cpu')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=environment, cwd=Path(__file__).parents[2] / "helpers"
    )


@pytest.mark.parametrize(
    ("capability", "correction", "surrogate"),
    [
        (80, "truncate", "ppo_clip"),
        (90, "truncate", "ppo_clip"),
        (90, "none", "reinforce"),
        (90, "mask", "cispo"),
        (100, "truncate", "ppo_clip"),
    ],
)
def test_the_kernel_compiles_for_the_gpu(capability, correction, surrogate):
    kernel = _policy_loss_triton.policy_loss_kernel
    constants = _policy_loss_triton.CONSTANTS | {"CORRECTION": correction, "SURROGATE": surrogate}
    types = dict.fromkeys(("low", "high", "floor", "cap", "dual"), "fp32") | {"num_tokens": "i32", "classes": "*i64"}
    types |= {"losses": "*fp64", "sums": "*fp64"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "*fp32")
        for argument in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
