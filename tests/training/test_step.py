"""A step clips, and takes no step that is not finite; weights that are not finite are named."""

import math

import pytest
import torch
from made_batches import make_batch
from tiny_models import make_model
from train_steps import train_step

from inflight.core.errors import NonFiniteWeightsError
from inflight.training.config import GRPOConfig
from inflight.training.step import Learner, check_finite, clip_and_step


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


def test_gradients_that_another_loop_has_left_are_not_in_the_first_step():
    norms, batch = [], make_batch(shape=((2, 5),))
    for has_left in (False, True):
        model = make_model("qwen3")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if has_left else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms.append(train_step(model, optimizer, batch, GRPOConfig(objective="none")).grad_norm)
    assert norms[0] == norms[1] > 0


def test_a_scheduler_that_follows_a_number_is_refused():
    optimizer = torch.optim.SGD(make_model("qwen3").parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match=r"call scheduler.step\(report.reward\) after each report"):
        Learner(torch.nn.Linear(1, 1), optimizer, GRPOConfig(), scheduler)
