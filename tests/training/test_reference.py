"""The policy that a KL penalty refers to."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from made_batches import make_rollouts
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from train_steps import train_step

import inflight
from inflight.core.rollout import Turn
from inflight.training.data.batch import pack
from inflight.training.data.scored_groups import ScoredGroups
from inflight.training.grpo import GRPOConfig
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.distillation import LOGPROBS
from inflight.training.objective.kl import kl_estimate
from inflight.training.objective.objective import Objective
from inflight.training.reference import charge_kl, reference_scorer
from inflight.training.teacher import with_teacher

KL = Objective(kl_weight=0.5)


def test_the_base_of_a_peft_model_is_its_reference():
    base = make_model("qwen3")
    expected = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    batch = pack(make_rollouts(), [1.0, -1.0, 0.5, -0.5, 0.2, -0.2])
    score = reference_scorer(KL, model, None)
    ours = score(batch)
    assert not ours.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(ours, token_logprobs(expected, batch))
        assert not torch.allclose(ours, token_logprobs(model, batch), atol=1e-2)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    config = GRPOConfig(objective=KL, sampling=inflight.SamplingParams(n=2))
    update = train_step(model, torch.optim.SGD(trained, lr=0.1), batch, config, score_reference=score)
    assert update.stats.reference_kl > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' has changed its weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' has changed its weights"),
        ({"bias": "all"}, r"q_proj.base_layer.bias of it is trained"),
    ],
)
def test_a_base_that_is_not_the_initial_policy_is_no_reference(options, message):
    model = get_peft_model(make_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))
    with pytest.raises(ValueError, match=message):
        reference_scorer(KL, model, None)
    assert reference_scorer(KL, model, make_model("qwen2")) is not None


def test_a_mixed_model_with_a_trained_base_has_no_reference():
    for bias, refused in (("none", False), ("all", True)):
        config = LoraConfig(r=2, target_modules=["q_proj"], bias=bias)
        model = get_peft_model(make_model("qwen2"), config, mixed=True)
        with pytest.raises(ValueError, match="bias of it is trained") if refused else nullcontext():
            reference_scorer(KL, model, None)


def test_trained_parts_that_are_switched_off_with_the_adapters_are_no_change_of_the_base():
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[3, 4])
    expected = make_model("llama")
    model = get_peft_model(copy.deepcopy(expected), config)
    batch = pack(make_rollouts(), [0.0] * 6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora" not in name:
                parameter.add_(0.5)
    score = reference_scorer(KL, model, None)
    torch.testing.assert_close(score(batch), token_logprobs(expected, batch).detach())


def test_scoring_the_base_leaves_frozen_adapters_frozen():
    model = get_peft_model(make_model("qwen3"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    reference_scorer(KL, model, None)(pack(make_rollouts(), [0.0] * 6))
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_a_reference_chooses_its_own_experts():
    model, reference = make_model("qwen3-moe"), make_model("qwen3-moe", seed=5)
    batch = pack(make_rollouts(), [0.0] * 6)
    expected = token_logprobs(reference, batch).detach()
    experts = torch.zeros(len(batch.input_ids), 3, 2, dtype=torch.int16)
    experts[..., 1] = 1
    routed = replace(batch, routed_experts=experts)
    assert not torch.allclose(token_logprobs(reference, routed), expected, atol=1e-2)
    torch.testing.assert_close(reference_scorer(KL, model, reference)(routed), expected)
    torch.testing.assert_close(with_teacher(reference, routed).columns[LOGPROBS][batch.drawn], expected)
    reference_scorer(KL, model, make_model("qwen3"))(routed)


@pytest.mark.parametrize("micro_batch_tokens", [0, 25])
def test_a_rollout_is_charged_for_the_sum_of_its_tokens_kl(micro_batch_tokens):
    """The KL is of the recorded log-probabilities to the reference's, which a pass for each rollout alone gives."""
    model, reference = make_model("qwen3"), make_model("qwen3", seed=1)
    rollouts = make_rollouts(6)
    for index, rollout in enumerate(rollouts):
        rollout.reward = float(index)
    scored = ScoredGroups([rollouts[:2], rollouts[2:4], rollouts[4:]])
    score = reference_scorer(Objective(), model, reference, reward_kl_weight=0.1)
    sampling = inflight.SamplingParams(n=2, max_tokens=16)
    config = GRPOConfig(reward_kl_weight=0.1, micro_batch_tokens=micro_batch_tokens, sampling=sampling)
    charged, mean = charge_kl(scored, score, config)
    sums = []
    for rollout in rollouts:
        logs = token_logprobs(reference, pack([rollout], [0.0])).double().tolist()
        sums.append(math.fsum(ours - theirs for ours, theirs in zip(rollout.logprobs.tolist(), logs, strict=True)))
    expected = [index - 0.1 * kl for index, kl in enumerate(sums)]
    assert [rollout.reward for rollout in charged.rollouts] == pytest.approx(expected, rel=1e-4)
    assert mean == pytest.approx(math.fsum(sums) / 6, rel=1e-4)
    assert [rollout.reward for rollout in rollouts] == [0, 1, 2, 3, 4, 5]
    assert charged.dropped is scored.dropped


def _turns(rollout, index):
    length = len(rollout.token_ids)
    return (Turn(0, length, True), *([Turn(length, length, False)] if index == 1 else []))


def test_all_sequences_of_an_episode_are_charged_for_their_sum():
    model, reference = make_model("qwen3"), make_model("qwen3", seed=1)
    rollouts = [
        replace(rollout, group_id=0, sample=min(index, 1), reward=1.0, turns=_turns(rollout, index))
        for index, rollout in enumerate(make_rollouts(3))
    ]
    score = reference_scorer(Objective(), model, reference, reward_kl_weight=0.1)
    config = GRPOConfig(reward_kl_weight=0.1, sampling=inflight.SamplingParams(n=2, max_tokens=16))
    alone = [charge_kl(ScoredGroups([[rollout]]), score, config)[1] for rollout in rollouts]
    charged, mean = charge_kl(ScoredGroups([rollouts]), score, config)
    sums = [alone[0], alone[1] + alone[2], alone[1] + alone[2]]
    assert min(map(abs, alone)) > 1e-3
    assert [rollout.reward for rollout in charged.rollouts] == pytest.approx([1 - 0.1 * kl for kl in sums], rel=1e-4)
    assert mean == pytest.approx(sum(alone) / 2, rel=1e-4)
    # Advantages of turns see the same charge.
    assert [turn.reward for rollout in charged.rollouts for turn in rollout.turns] == [
        pytest.approx(-0.1 * kl, rel=1e-4) if kl else None for kl in (*alone[:2], 0.0, alone[2])
    ]


def test_a_kl_in_the_reward_needs_a_reference_too():
    model = make_model("qwen3")
    with pytest.raises(ValueError, match=r"reward_kl_weight=0.1 asks for a KL penalty.*give reference=copy.deepcopy"):
        reference_scorer(Objective(), model, None, reward_kl_weight=0.1)


def test_the_expected_gradient_of_a_reward_with_k1_is_that_of_the_kl_itself():
    """Enumerated: a policy over three answers, whose rewards are charged for log π − log π_ref, on-policy."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logs = logits.log_softmax(0)
    [of_kl] = torch.autograd.grad((logs.exp() * (logs - reference)).sum(), logits, retain_graph=True)
    charged = kl_estimate("k1", logs.detach(), reference)
    [by_reward] = torch.autograd.grad((logs.exp().detach() * charged * logs).sum(), logits)
    torch.testing.assert_close(by_reward, of_kl, rtol=1e-12, atol=1e-14)
