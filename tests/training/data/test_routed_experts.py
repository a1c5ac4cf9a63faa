"""Routed experts that cannot be replayed are named before they do harm; those of rollouts become one column."""

import numpy as np
import pytest
import torch
from routed_models import NUM_TOKENS, logits_of, random_ids, random_routing, state_of
from tiny_models import make_model
from torch import nn

from inflight.core.errors import RoutedExpertsError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.training.model.replay import replay_routed_experts, routed_experts_column


def with_entry(token: int, values: list[int]) -> torch.Tensor:
    routing = random_routing()
    routing[token, 1] = torch.tensor(values)
    return routing


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (random_routing(num_layers=2), "are of 2 layers, the model has 3 routers"),
        (random_routing(k=3), r"are 3 routed experts per token, router 0 \(Qwen3MoeTopKRouter\) takes 2"),
        (with_entry(4, [8, 1]), r"expert 8, router 1 \(Qwen3MoeTopKRouter\) has 8"),
        (with_entry(4, [3, 3]), r"token 4 in layer 1 names an expert twice: \[3, 3\]"),
        (with_entry(4, [3, -1]), r"token 4 in layer 1 is neither experts nor all −1: \[3, -1\]"),
        (with_entry(4, [-2, -2]), r"neither experts nor all −1: \[-2, -2\]"),
        (random_routing().float(), "are torch.float32.*expected int16 or int32"),
        (random_routing()[:, 0], r"int16\[12, 2\], expected int16 or int32 \[tokens, layers, k\]"),
    ],
)
def test_routing_of_another_model_is_refused_before_the_pass(routing, message):
    model = make_model("qwen3-moe")
    state = state_of(model)
    with pytest.raises(RoutedExpertsError, match=message), replay_routed_experts(model, routing):
        pytest.fail("entered")
    assert state_of(model) == state


def test_another_number_of_tokens_is_refused():
    model = make_model("qwen3-moe")
    with (
        pytest.raises(RoutedExpertsError, match="given 9 tokens, the routed experts are of 12"),
        replay_routed_experts(model, random_routing()),
    ):
        logits_of(model, random_ids(9))


def test_a_model_without_routers_is_refused():
    with (
        pytest.raises(RoutedExpertsError, match="Qwen3ForCausalLM has no routers"),
        replay_routed_experts(make_model("qwen3"), random_routing()),
    ):
        pytest.fail("entered")


def test_a_replay_in_which_no_router_ran_is_refused():
    with (
        pytest.raises(RoutedExpertsError, match="no router ran"),
        replay_routed_experts(make_model("qwen3-moe"), random_routing()),
    ):
        pass


class ArgmaxRouter(nn.Module):
    num_experts = 8

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.amax(-1), x.argsort(-1)[:, -2:]


def test_a_router_that_selects_without_topk_is_refused():
    model = nn.Sequential(ArgmaxRouter())
    with (
        pytest.raises(RoutedExpertsError, match=r"ArgmaxRouter does not select 2 of 8 experts by torch.topk"),
        replay_routed_experts(model, random_routing(num_layers=1)),
    ):
        model(torch.randn(NUM_TOKENS, 8))


def make_rollout(num_prompt: int, num_drawn: int, routing: np.ndarray | None) -> Rollout:
    return Rollout(
        request_id=7,
        group_id=0,
        sample=0,
        params=SamplingParams(),
        metadata={},
        prompt_token_ids=np.zeros(num_prompt, np.int32),
        token_ids=np.zeros(num_drawn, np.int32),
        logprobs=np.zeros(num_drawn, np.float32),
        weight_versions=np.zeros(num_drawn, np.int64),
        sampled_at_ns=np.zeros(num_drawn, np.int64),
        finish_reason="length",
        routed_experts=routing,
    )


def test_column_lays_rollouts_one_after_another():
    first = random_routing(6, 3).numpy().astype(np.uint8)
    second = random_routing(3, 3, num_experts=300).numpy().astype(np.uint16)
    column = routed_experts_column([make_rollout(3, 4, first), make_rollout(2, 1, None), make_rollout(1, 3, second)])
    assert column.dtype == torch.int16
    assert column.shape == (7 + 3 + 4, 3, 2)
    assert column[:6].tolist() == first.tolist()
    assert (column[6:10] == -1).all()
    assert column[10:13].tolist() == second.tolist()
    assert (column[13] == -1).all()
    assert routed_experts_column([make_rollout(2, 1, None)]) is None
    assert routed_experts_column([]) is None


def test_column_of_routing_that_does_not_fit_is_refused():
    three, two = (random_routing(3, layers).numpy().astype(np.uint8) for layers in (3, 2))
    with pytest.raises(ValueError, match=r"different models.*\[\(2, 2\), \(3, 2\)\]"):
        routed_experts_column([make_rollout(2, 2, three), make_rollout(2, 2, two)])
    with pytest.raises(ValueError, match="rollout 7 has 5 tokens and routed experts of 3, expected 4"):
        routed_experts_column([make_rollout(2, 3, three)])
