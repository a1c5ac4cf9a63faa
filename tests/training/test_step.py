"""A step clips, and takes no step that is not finite; weights that are not finite are named."""

import math

import pytest
import torch
from tiny_models import make_model

from inflight.core.errors import NonFiniteWeightsError
from inflight.training.step import check_finite, clip_and_step, ess_factor


def test_check_finite_sees_every_value_and_may_leave_out_what_is_frozen():
    model = make_model("qwen3")
    check_finite(model)
    with torch.no_grad():
        model.lm_head.weight[5, 5] = -math.inf
    model.lm_head.weight.requires_grad_(False)
    check_finite(model, trainable=True)
    with pytest.raises(NonFiniteWeightsError):
        check_finite(model)
    quantized = torch.nn.Module()
    quantized.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    check_finite(quantized)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 100.0])
def test_clip_and_step_clips_steps_and_zeroes(max_grad_norm):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_and_step(optimizer, max_grad_norm=max_grad_norm) == pytest.approx(5.0)
    factor = 0.1 if max_grad_norm == 0.5 else 1.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([-3.0, -4.0]) * factor, rtol=1e-4, atol=0)
    assert parameter.grad is None or not parameter.grad.any()
    for bad in (math.nan, math.inf):
        was = parameter.detach().clone()
        parameter.grad = torch.tensor([1.0, bad])
        assert not math.isfinite(clip_and_step(optimizer, max_grad_norm=max_grad_norm))
        assert torch.equal(parameter.detach(), was)
        assert parameter.grad is None or not parameter.grad.any()
    with pytest.raises(ValueError, match="max_grad_norm must be at least 0"):
        clip_and_step(optimizer, max_grad_norm=-1.0)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_a_factor_scales_the_learning_rates_of_one_step(rate):
    slow, fast = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [slow], "lr": rate / 10}, {"params": [fast], "lr": rate}])
    for factor in (0.25, 1.0):
        slow.grad, fast.grad = torch.ones(1), torch.ones(1)
        before = slow.item(), fast.item()
        clip_and_step(optimizer, max_grad_norm=0.0, lr_factor=factor)
        assert before[0] - slow.item() == pytest.approx(0.05 * factor)
        assert before[1] - fast.item() == pytest.approx(0.5 * factor)
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


def test_the_factor_of_vcpo_is_a_square_root_that_never_exceeds_1():
    assert ess_factor(0.25, 1.0) == 0.5
    assert ess_factor(0.25, 0.5) == pytest.approx(math.sqrt(0.5))
    assert ess_factor(0.6, 0.5) == 1.0
    assert ess_factor(math.nan, 1.0) == 1.0
