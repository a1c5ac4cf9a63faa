"""A vLLM that computes something else than Transformers is refused. Here a Transformers model draws in its place."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from family_configs import Family
from family_weights import make_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from inflight.core.errors import BackendError, UnsupportedModelError
from inflight.integrations.vllm_backend import agreement
from inflight.integrations.vllm_backend.agreement import DrawnPrompt, check_logits, parameters_without_memory
from inflight.integrations.vllm_backend.converted import Unmappable
from inflight.integrations.vllm_backend.shadow import Computed, Parameter, Shadow, copy_of
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views

DTYPES = [torch.float32, torch.bfloat16]


class StandIn:
    """An engine core whose model takes the weights of the slot when they are committed, and draws tokens."""

    def __init__(self, model: PreTrainedModel, slot: torch.Tensor, layout: Any):
        self.model, self.slot, self.layout = model, slot, layout
        self.model.set_attn_implementation("sdpa")  # sums in another order
        self.num_commits = 0

    def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        if method == "inflight_commit":
            self.num_commits += 1
            fill(published_tensors(self.model), slot_views(self.slot, self.layout))
        return [True]

    @torch.no_grad()
    def draw(self, prompts: list[list[int]], num_tokens: int, num_logprobs: int) -> list[DrawnPrompt]:
        drawn = []
        for prompt in prompts:
            ids, columns, logprobs = list(prompt), [], []
            for _ in range(num_tokens):
                row = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0, -1].float(), -1)
                top = row.topk(num_logprobs).indices
                token = int(torch.multinomial(row.exp(), 1))
                columns.append(torch.cat([torch.tensor([token]), top]))
                logprobs.append(row[columns[-1]])
                ids.append(token)
            drawn.append(DrawnPrompt(ids, torch.stack(columns), torch.stack(logprobs)))
        return drawn


def check(
    name: str,
    dtype: torch.dtype,
    mistake: Callable[[Any], None] = lambda _: None,
    *,
    large: bool = False,
    overrides: dict[str, Any] | None = None,
) -> StandIn:
    """Compare a model with one of a configuration that has a mistake. large: as trained, and not as begun with."""
    model: Any = make_model(Family(name, name, overrides or {}), large=large)
    model.to(dtype)
    layout = layout_of(model)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fill(slot_views(slot, layout), published_tensors(model))
    before = slot.clone()
    config = copy.deepcopy(model.config)
    mistake(config)
    core = StandIn(AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), slot, layout)
    core.collective_rpc("inflight_commit")
    with parameters_without_memory():
        skeleton = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager"
        )
    torch.manual_seed(0)
    try:
        check_logits(core, core.draw, skeleton, layout, slot, name=name, max_context=128, on_gpu=False)
    finally:
        assert torch.equal(slot, before), "the weights are those that were loaded again"
        if core.num_commits > 1:
            assert all(map(torch.equal, published_tensors(core.model).values(), published_tensors(model).values()))
    return core


def other_theta(config: Any) -> None:
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1.7 * config.rope_parameters["rope_theta"]}


def no_window(config: Any) -> None:
    config.layer_types = ["full_attention"] * len(config.layer_types)


def other_activation(config: Any) -> None:
    config.hidden_act = "relu"


def other_scale(config: Any) -> None:
    config.attention_multiplier *= 0.5


MISTAKES = {
    "theta": ("llama", other_theta),
    "theta-qwen3": ("qwen3", other_theta),
    "window": ("gemma3_text", no_window),
    "activation": ("qwen2", other_activation),
    "scale": ("granite", other_scale),
}


@pytest.mark.medium
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_name(mistake, large, dtype):
    """Also with the weights that Transformers begins with, with which few parts show."""
    name, make = MISTAKES[mistake]
    with pytest.raises(UnsupportedModelError, match=rf"something else than Transformers for '{name}' .* off by \d"):
        check(name, dtype, make, large=large)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_right_model_is_taken_and_has_its_weights_again(name, large, dtype):
    overrides = {"lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}}
    assert check(name, dtype, large=large, overrides=overrides.get(name)).num_commits == 3


def test_heads_of_another_size_than_their_share_are_compared():
    check("qwen2", torch.float32, overrides={"head_dim": 32})


def test_a_large_model_is_compared_over_its_own_weights_alone(monkeypatch):
    monkeypatch.setattr(agreement, "_SMALL", 1000)
    assert check("qwen2", torch.bfloat16, large=True).num_commits == 1
    with pytest.raises(UnsupportedModelError, match="as loaded"):
        check("qwen2", torch.bfloat16, other_activation, large=True)


def test_a_worker_that_prepares_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(agreement, "_PREPARE_S", 0.0)
    monkeypatch.setattr(StandIn, "collective_rpc", lambda self, method, args=(): [method != "inflight_prepared"])
    with pytest.raises(BackendError, match="has not prepared weights within 0 s"):
        agreement._take(StandIn.__new__(StandIn))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_loader_that_computes_is_run_for_every_version(in_place):
    """As vLLM's of Mamba layers, which keep −exp(A_log). in_place: another tensor refers to the same memory."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)
        param.data.copy_(-torch.exp(param))

    slots = [torch.zeros(96, dtype=torch.uint8)[32 * i : 32 * i + 64] for i in range(2)]  # at other places
    views = [slot[16:32].view(torch.float32) for slot in slots]
    live, following = torch.zeros(4), torch.zeros(4)
    seen = live.view(2, 2)
    call = partial(load, loaded_weight=views[0])
    computed = Computed.of(call, torch.nn.Parameter(torch.zeros(4)), slots[0])
    shadow = Shadow(slots, [Parameter("A", live, following, [], [computed], in_place=in_place)])
    assert shadow.reads() == [(16, 32)]
    for version in range(4):
        slot = version % 2
        views[slot].copy_(torch.arange(4) + version)
        shadow.prepare(slot)
        shadow.commit()
        torch.testing.assert_close(live, -torch.exp(torch.arange(4.0) + version))
        if in_place:
            assert torch.equal(seen.flatten(), live)


def test_a_loader_that_is_given_something_else_than_a_part_of_a_slot_is_unmappable():
    call = partial(dict, loaded_weight=torch.zeros(4))
    with pytest.raises(Unmappable):
        Computed.of(call, torch.zeros(4), torch.zeros(64, dtype=torch.uint8))


def test_a_parameter_may_differ_by_the_rounding_of_parts_with_fewer_bits():
    slot = torch.zeros(64, dtype=torch.uint8)
    for dtype, off, same in (
        (torch.bfloat16, 0.005, True),
        (torch.bfloat16, 0.1, False),
        (torch.float32, 0.005, False),
    ):
        target = torch.zeros(4)
        copy = copy_of(target, slot[: 4 * dtype.itemsize].view(dtype), slot)
        after = torch.full((4,), off)
        assert Parameter("bias", target, after, [copy]).agree(target, after) == same
    after = torch.full((4,), 0.005)
    assert not Parameter("bias", torch.zeros(4), after, []).agree(torch.zeros(4), after)


class Stuck(StandIn):
    """Keeps the weights that it started with."""

    def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        return super().collective_rpc(method, args) if self.num_commits == 0 else [True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "is_refused"), [(StandIn, False), (Stuck, True)])
def test_a_quantised_model_has_to_follow_new_weights(kind, is_refused, dtype, caplog):
    """Its errors are not refused, here those of a rounded model."""
    model: Any = make_model(Family("llama", "llama", {}), large=True).to(dtype)
    layout = layout_of(model)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fill(slot_views(slot, layout), published_tensors(model))
    core = kind(AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype).eval(), slot, layout)
    core.collective_rpc("inflight_commit")
    with parameters_without_memory():
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype)
    torch.manual_seed(0)
    check = partial(check_logits, core, core.draw, skeleton, layout, slot, name="llama", max_context=128, on_gpu=False)
    with caplog.at_level("INFO", "inflight.engine"):
        if is_refused:
            with pytest.raises(UnsupportedModelError, match="does not take new weights of 'llama'"):
                check(quantized=True)
        else:
            check(quantized=True)
    assert "vLLM quantises llama: the log-probabilities of nine of ten drawn tokens are within" in caplog.text
    assert torch.equal(slot_views(slot, layout)["model.norm.weight"], published_tensors(model)["model.norm.weight"])
