"""With replay the trainer's tokens take the experts that the engine recorded, and the router still learns."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from routed_models import NUM_TOKENS, logits_of, random_ids, random_routing, state_of
from tiny_models import make_model, publish, run
from torch import nn
from torch.nn.functional import linear, softmax
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, OlmoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

from inflight.core.errors import RoutedExpertsError
from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.stream.assembler import Assembler
from inflight.training.data.batch import pack
from inflight.training.model.replay import replay_routed_experts, routed_experts_column
from inflight.training.objective.loss import policy_loss

FAMILIES = ["qwen3-moe", "mixtral", "gpt-oss"]


def draw(engine, num_prompts: int = 16, max_tokens: int = 60, publishing: nn.Module | None = None) -> list[Rollout]:
    """Rollouts of one length; `publishing` becomes the engine's weights halfway."""
    assembler, rollouts, step = Assembler(), [], 0
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    engine.requests.submit([Prompt([1 + index, 2, 3, 4, 5], params) for index in range(num_prompts)])
    while engine.has_work:
        if publishing is not None and step == max_tokens // 2:
            publish(engine, publishing)
        frame = engine.step()
        if frame is not None:
            rollouts += [rollout for group in assembler.add(frame) for rollout in group]
        step += 1
    return sorted(rollouts, key=lambda rollout: rollout.request_id)


def rows(rollouts: list[Rollout]) -> torch.Tensor:
    """i64[rollouts, P + T]"""
    return torch.from_numpy(np.stack([np.concatenate([r.prompt_token_ids, r.token_ids]) for r in rollouts])).long()


def errors_of(model: nn.Module, rollouts: list[Rollout]) -> torch.Tensor:
    """|log π of the model − log π that the engine recorded|, f32[rollouts, T]"""
    ids = rows(rollouts)
    num_drawn = len(rollouts[0].token_ids)
    with torch.no_grad():
        logprobs = logits_of(model, ids)[:, -num_drawn - 1 : -1].float().log_softmax(-1)
    taken = logprobs.gather(-1, ids[:, -num_drawn:, None]).squeeze(-1)
    return (taken - torch.from_numpy(np.stack([rollout.logprobs for rollout in rollouts]))).abs()


class TakenExperts:
    """Listens to what the experts, downstream of the routers, were told to compute."""

    def __init__(self, model: nn.Module):
        self.chosen: list[torch.Tensor] = []
        self._handles = [
            module.register_forward_pre_hook(lambda _, args: self.chosen.append(args[1]))
            for module in model.modules()
            if type(module).__name__.endswith("Experts")
        ]

    def __enter__(self) -> "TakenExperts":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def stacked(self) -> torch.Tensor:
        """i64[T, layers, k]"""
        return torch.stack(self.chosen, 1)


def own_routing(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with TakenExperts(model) as taken, torch.no_grad():
        logits_of(model, ids)
    return taken.stacked.short()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_replay_brings_the_trainer_closer_to_a_bf16_engine(make_engine, name, dtype):
    rollouts = draw(make_engine(name, dtype="bfloat16", record_routed_experts=True))
    model = make_model(name).to(torch.bfloat16).to(dtype)  # the engine's rounded weights
    routing = routed_experts_column(rollouts)
    recorded = routing[:, 0, 0] >= 0

    with TakenExperts(model) as taken:
        without = errors_of(model, rollouts)
    moved = (taken.stacked.sort(-1).values != routing.sort(-1).values).any(-1)[recorded]
    assert moved.any(), "no token takes another expert; the comparison would show nothing"

    with TakenExperts(model) as taken, replay_routed_experts(model, routing):
        replayed = errors_of(model, rollouts)
    assert torch.equal(taken.stacked[recorded], routing[recorded].long())
    assert replayed.mean() < without.mean()
    assert replayed.max() < without.max()
    print(
        f"{name} trained in {dtype}: error of log π, mean (max), {without.mean():.3f} ({without.max():.2f}) without "
        f"replay, {replayed.mean():.3f} ({replayed.max():.2f}) with; of {moved.numel()} token-layer pairs "
        f"{moved.sum()} would take other experts without"
    )


def test_each_token_replays_the_weights_that_drew_it(make_engine):
    old, new = make_model("qwen3-moe"), make_model("qwen3-moe", seed=1)
    rollouts = draw(make_engine("qwen3-moe", record_routed_experts=True), num_prompts=3, max_tokens=20, publishing=new)
    versions = rollouts[0].weight_versions
    assert versions[0] != versions[-1]
    before = len(rollouts[0].prompt_token_ids) + int((versions == versions[0]).sum()) - 1
    routing = routed_experts_column(rollouts)
    with TakenExperts(new) as taken, replay_routed_experts(new, routing), torch.no_grad():
        logits_of(new, rows(rollouts))
    length = rows(rollouts).shape[1]
    recorded = routing.unflatten(0, (-1, length))
    assert torch.equal(taken.stacked.unflatten(0, (-1, length))[:, :-1], recorded[:, :-1].long())
    by_new = own_routing(new, rows(rollouts)).unflatten(0, (-1, length))
    assert not torch.equal(by_new[:, :before], recorded[:, :before])
    by_old = own_routing(old, rows(rollouts)).unflatten(0, (-1, length))
    assert torch.equal(by_old[:, :before], recorded[:, :before])
    assert not torch.equal(by_old[:, before:-1], recorded[:, before:-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_replaying_a_models_own_choice_changes_no_bit(name):
    model, ids = make_model(name), random_ids(40)
    routing = own_routing(model, ids)
    plain = logits_of(model, ids)
    plain.square().mean().backward()
    expected = gradients(model)
    with replay_routed_experts(model, routing):
        replayed = logits_of(model, ids)
    replayed.square().mean().backward()  # without checkpointing the context may have ended
    assert torch.equal(plain, replayed)
    assert_same(gradients(model), expected)


def test_rows_of_minus_one_are_left_to_the_router():
    model, ids = make_model("qwen3-moe"), random_ids()
    routing = random_routing()
    routing[5:], routing[2, 1] = -1, -1
    with TakenExperts(model) as taken, replay_routed_experts(model, routing):
        logits = logits_of(model, ids)
    assert torch.equal(taken.stacked[routing >= 0], routing[routing >= 0].long())
    own = taken.stacked.short()
    with replay_routed_experts(model, own):
        assert torch.equal(logits, logits_of(model, ids))

    with replay_routed_experts(model, torch.full_like(routing, -1)):
        assert torch.equal(logits_of(model, ids), logits_of(make_model("qwen3-moe"), ids))


def qwen3_moe_block(block: nn.Module, x_TH: torch.Tensor, experts_Tk: torch.Tensor) -> torch.Tensor:
    """The block's formula for given experts, token by token."""
    scores_TE = softmax(linear(x_TH, block.gate.weight), dim=-1)
    rows = []
    for x, scores_E, experts in zip(x_TH, scores_TE, experts_Tk.tolist(), strict=True):
        total = sum(scores_E[expert] for expert in experts) if block.gate.norm_topk_prob else 1.0
        outputs = []
        for expert in experts:
            gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
            outputs.append(scores_E[expert] / total * (block.experts.down_proj[expert] @ (nn.SiLU()(gate) * up)))
        rows.append(sum(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_gate_learns_at_the_recorded_experts(normalised):
    block = make_model("qwen3-moe").model.layers[1].mlp
    block.gate.norm_topk_prob = normalised
    x = torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(2))
    routing = random_routing(num_layers=1)
    target = torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(3))

    expected = qwen3_moe_block(block, x, routing[:, 0])
    (expected * target).sum().backward()
    expected_gradients = gradients(block)
    with replay_routed_experts(block, routing):
        output = block(x[None])[0]
    (output * target).sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    found = gradients(block)
    assert found["gate.weight"].abs().max() > 1e-3
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-4, msg=name)


def replaying_routers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name.endswith("gate") and "forward" in vars(module)]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def replayed_gradients(model: nn.Module, routing: torch.Tensor) -> dict[str, torch.Tensor]:
    with TakenExperts(model) as taken, replay_routed_experts(model, routing):
        logits_of(model, random_ids()).square().mean().backward()
    assert torch.equal(taken.stacked, routing.long())
    return gradients(model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointing_recomputes_with_the_replay(name, reentrant):
    model = make_model(name).train()
    routing = random_routing(num_experts=4)
    expected = replayed_gradients(model, routing)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with replay_routed_experts(model, routing):
        logits_of(model, random_ids()).square().mean().backward()
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_of_a_checkpointed_model_after_the_replay_replays_too(reentrant, inner):
    def loss(model: nn.Module) -> torch.Tensor:
        if inner:  # as losses do that never build all logits
            return model.model(input_ids=random_ids(), use_cache=False).last_hidden_state.square().mean()
        return logits_of(model, random_ids()).square().mean()

    model = make_model("qwen3-moe").train()
    with replay_routed_experts(model, random_routing()):
        loss(model).backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with replay_routed_experts(model, random_routing().roll(1, 0)):
        loss(model)
        with replay_routed_experts(model, random_routing()):
            found = loss(model)
    found.backward()
    assert_same(gradients(model), expected)
    assert not replaying_routers(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_after_the_replay_replays_under_checkpointing_by_hand(reentrant):
    model = make_model("qwen3-moe").train()
    expected = replayed_gradients(model, random_routing())
    block = model.model.layers[1].mlp
    bare = block.forward
    block.forward = lambda x: checkpoint(bare, x, use_reentrant=reentrant)
    with replay_routed_experts(model, random_routing()):
        loss = logits_of(model, random_ids()).square().mean()
    loss.backward()
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_backward_through_two_passes_replays_each(reentrant):
    model, routings = make_model("qwen3-moe").train(), (random_routing(), random_routing().roll(1, 0))
    parts = [replayed_gradients(model, routing) for routing in routings]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    losses = []
    for routing in routings:
        with replay_routed_experts(model, routing):
            losses.append(logits_of(model, random_ids()).square().mean())
    sum(losses).backward()
    assert_same(gradients(model), {name: parts[0][name] + parts[1][name] for name in parts[0]})
    assert not replaying_routers(model)


def test_a_backward_that_failed_leaves_no_replay_to_the_next_loss():
    model = make_model("qwen3-moe").train()
    expected = replayed_gradients(model, random_routing())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with replay_routed_experts(model, random_routing().roll(1, 0)):
        hidden = model.model(input_ids=random_ids(), use_cache=False, output_hidden_states=True)
    hidden.hidden_states[0].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hidden.last_hidden_state.square().mean().backward()
    gradients(model)
    model.gradient_checkpointing_disable()
    assert_same(replayed_gradients(model, random_routing()), expected)
    assert not replaying_routers(model)


def test_a_pass_without_gradient_under_checkpointing_needs_no_backward():
    model = make_model("qwen3-moe").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with replay_routed_experts(model, random_routing()):
        with torch.no_grad():
            logits_of(model, random_ids())
        model.eval()
        loss = logits_of(model, random_ids()).square().mean()
    loss.backward()


@pytest.mark.parametrize(
    ("config", "trains_gates"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, False),
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["gate"]}, True),
    ],
)
def test_a_model_wrapped_by_peft_replays(config, trains_gates):
    model = get_peft_model(make_model("qwen3-moe"), LoraConfig(r=4, init_lora_weights=False, **config))
    routing = random_routing()
    with TakenExperts(model) as taken, replay_routed_experts(model, routing):
        logits_of(model, random_ids()).square().mean().backward()
    assert torch.equal(taken.stacked, routing.long())
    found = gradients(model)
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    assert any(".mlp.gate." in name for name in found) == trains_gates


def test_replay_leaves_the_model_as_it_was():
    model, ids = make_model("qwen3-moe"), random_ids()
    plain, state = logits_of(model, ids), state_of(model)
    with replay_routed_experts(model, random_routing()):
        once = logits_of(model, ids)
    assert not torch.equal(once, plain)
    assert state_of(model) == state
    with pytest.raises(KeyError), replay_routed_experts(model, random_routing()):
        raise KeyError
    assert state_of(model) == state
    with pytest.raises(RoutedExpertsError), replay_routed_experts(model, random_routing(num_tokens=5)):
        logits_of(model, ids)
    assert state_of(model) == state
    assert torch.equal(logits_of(model, ids), plain)


def test_of_nested_replays_the_innermost_counts():
    model, ids = make_model("qwen3-moe"), random_ids()
    state, inner_routing = state_of(model), random_routing().roll(1, 0)
    with replay_routed_experts(model, random_routing()):
        before = logits_of(model, ids)
        with replay_routed_experts(model, inner_routing), TakenExperts(model) as taken:
            logits_of(model, ids)
        assert torch.equal(taken.stacked, inner_routing.long())
        assert torch.equal(logits_of(model, ids), before)
    assert state_of(model) == state


def test_a_forward_that_someone_replaced_comes_back():
    model = make_model("qwen3-moe")
    gate = model.model.layers[0].mlp.gate
    theirs = gate.forward = type(gate).forward.__get__(gate)
    with replay_routed_experts(model, random_routing()):
        logits_of(model, random_ids())
    assert gate.forward is theirs


GROUPED = {"hidden_size": 32, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
ROUTERS = {
    "olmoe": lambda: OlmoeTopKRouter(OlmoeConfig(hidden_size=32, num_experts=8, num_experts_per_tok=2)),
    "deepseek-v2": lambda: DeepseekV2TopkRouter(
        DeepseekV2Config(n_routed_experts=8, topk_method="group_limited_greedy", **GROUPED)
    ),
    "deepseek-v3": lambda: DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=8, **GROUPED)),
    "deepseek-v3, one group": lambda: DeepseekV3TopkRouter(
        DeepseekV3Config(n_routed_experts=8, **GROUPED | {"n_group": 1, "topk_group": 1})
    ),
    "glm4-moe": lambda: Glm4MoeTopkRouter(Glm4MoeConfig(n_routed_experts=8, **GROUPED)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_other_families(name):
    router = ROUTERS[name]()
    nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(NUM_TOKENS, 32, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(router)
    routing = random_routing(num_layers=1)
    logits, own_weights, own = model(x)
    with replay_routed_experts(model, routing):
        _, weights, indices = model(x)
    assert (own.sort(-1).values != routing[:, 0].long().sort(-1).values).any()
    assert torch.equal(indices, routing[:, 0].long())
    # Between the weights of a token's experts are those of the scores, also outside of the groups chosen now.
    scores = logits.sigmoid() if "v3" in name or "glm" in name else logits.softmax(-1)
    chosen = scores.gather(-1, indices)
    torch.testing.assert_close(weights[:, 0] / weights[:, 1], chosen[:, 0] / chosen[:, 1])
    with replay_routed_experts(model, own[:, None].short()):
        assert torch.equal(model(x)[1], own_weights)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_replays_what_its_batch_recorded(make_engine, checkpointing):
    """Backward too: with checkpointing it runs the routers again, after the loss has been returned."""
    prompts = [Prompt([5, i], SamplingParams(max_tokens=12, ignore_eos=True, seed=i)) for i in range(6)]
    rollouts = run(make_engine("qwen3-moe", record_routed_experts=True), prompts)
    for rollout in rollouts:
        rollout.routed_experts = (rollout.routed_experts + 1) % 8  # not what the router would choose
    gradients = []
    for checkpointed in (False, checkpointing):
        model = make_model("qwen3-moe").train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = pack(rollouts, [1.0, -1.0] * 3)
        policy_loss(model, batch)  # nobody goes backward from this one
        loss, stats = policy_loss(model, batch)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert stats.ratios.logprob_diff > 0.1
        plain = model(input_ids=torch.arange(6)[None], use_cache=False).logits
        assert torch.equal(plain, make_model("qwen3-moe")(input_ids=torch.arange(6)[None], use_cache=False).logits)
    torch.testing.assert_close(*gradients)
