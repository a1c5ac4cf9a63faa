"""The policy that a KL penalty refers to."""

import copy

import torch
from made_batches import make_rollouts
from peft import LoraConfig, get_peft_model
from tiny_models import make_model

import inflight
from inflight.training.data.batch import pack
from inflight.training.grpo import GRPOConfig, train_step
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.objective import Objective
from inflight.training.reference import reference_scorer

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
