"""The gradient of a step with demonstrations is the sum of two gradients: policy loss and likelihood, in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bigram_run import Bigram, Run, score_tokens
from made_batches import make_rollouts
from rank_cases import AGGREGATIONS, demonstrations
from tiny_models import make_model
from train_steps import train_step

import inflight
from inflight.core.errors import InflightError
from inflight.training.data.batch import pack
from inflight.training.objective.objective import PRESETS
from inflight.training.step import Learner

PAIRS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10, 11]), ([12, 13], [14])]
WEIGHT, MAX_TOKENS = 0.3, 20


def plain_nll(model, pairs, aggregation):
    """The negative log-likelihood, each answer in a separate forward pass."""
    sums, lengths = [], []
    for prompt, answer in pairs:
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        logs = logits.log_softmax(-1)
        sums.append(-logs[range(len(prompt) - 1, len(prompt) + len(answer) - 1), answer].sum())
        lengths.append(len(answer))
    if aggregation == "token":
        return torch.stack(sums).sum() / sum(lengths)
    if aggregation == "constant":
        return torch.stack(sums).sum() / (len(pairs) * MAX_TOKENS)
    return (torch.stack(sums) / torch.tensor(lengths)).mean()


def batch_of(seed=0, count=6):
    return pack(make_rollouts(count, seed), torch.linspace(-1, 1, count).tolist())


def config_of(aggregation, **options):
    objective = replace(PRESETS["tis"], aggregation=aggregation, max_tokens=MAX_TOKENS)
    return inflight.GRPOConfig(objective=objective, max_grad_norm=0, demonstration_weight=WEIGHT, **options)


def change(config, pairs, parts=(1.0,), model=None):
    """The change of all parameters by a step of SGD with learning rate 1, and its NLL."""
    model = (model or make_model("qwen3")).double()
    before = [p.detach().clone() for p in model.parameters()]
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    for place, share in enumerate(parts):
        learner.add(batch_of(place), share=share)
    update = learner.step(inflight.pack_demonstrations(pairs) if pairs else None)
    return [was - p.detach() for was, p in zip(before, model.parameters(), strict=True)], update


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("parts", "micro_batch_tokens"), [((1.0,), 0), ((0.3, 1.0), 0), ((0.3, 1.0), 400)])
def test_the_gradient_is_the_sum_of_both(aggregation, parts, micro_batch_tokens):
    """Also in parts, of which the first has an estimate of the size of the step, and in micro-batches."""
    config = config_of(aggregation, micro_batch_tokens=micro_batch_tokens)
    alone, _ = change(config, None, parts)
    both, update = change(config, PAIRS, parts)
    model = make_model("qwen3").double()
    nll = plain_nll(model, PAIRS, aggregation)
    nll.backward()
    assert update.nll == pytest.approx(nll.item(), rel=1e-6)
    for found, policy, parameter in zip(both, alone, model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(found, policy + WEIGHT * parameter.grad, rtol=1e-5, atol=1e-7)


def test_the_statistics_are_those_of_the_rollouts_alone():
    (_, alone), (_, both) = change(config_of("token"), None), change(config_of("token"), PAIRS)
    assert both.stats == alone.stats
    assert alone.nll is None


def test_each_update_of_a_batch_has_the_demonstrations():
    model = make_model("qwen3").double()
    config = config_of("token", updates_per_batch=2)
    train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch_of(),
        config,
        demonstrations=inflight.pack_demonstrations(PAIRS),
    )
    one_by_one = make_model("qwen3").double()
    optimizer = torch.optim.SGD(one_by_one.parameters(), lr=0.1)
    for _ in range(2):
        loss, _ = inflight.policy_loss(one_by_one, batch_of(), objective=config.objective)
        (loss + WEIGHT * plain_nll(one_by_one, PAIRS, "token")).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(model.parameters(), one_by_one.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_likelihood_that_is_not_finite_skips_the_step():
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[PAIRS[2][0][0]] = math.inf  # no rollout has this token as input
    batch = pack([r for r in make_rollouts(6) if 12 not in [*r.prompt_token_ids, *r.token_ids]][:2], [1.0, -1.0])
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = train_step(model, optimizer, batch, config_of("token"), demonstrations=inflight.pack_demonstrations(PAIRS))
    assert update.num_skipped == 1
    assert torch.equal(model.lm_head.weight, before)


@pytest.fixture
def bigram(monkeypatch):
    monkeypatch.setattr("inflight.training.objective.loss.score_tokens", score_tokens)


def bigram_nll(pairs):
    """The negative log-likelihood per token under the first policy."""
    logs, steps = Bigram().table.detach().log_softmax(-1), []
    for prompt, answer in pairs:
        steps += zip([prompt[-1], *answer[:-1]], answer, strict=True)
    return -sum(float(logs[step]) for step in steps) / len(steps)


def test_grpo_takes_one_list_for_each_step_and_continues_where_a_run_was_saved(bigram):
    run = SimpleNamespace(progress={})
    whole = Run(model=Bigram(), demonstrations=demonstrations(), run=run)
    assert whole.reports[0].as_dict()["nll"] == pytest.approx(bigram_nll(demonstrations()[0]))
    run.progress["grpo"] |= {"step": 2, "num_submitted": 12, "in_flight": []}
    [report] = Run(model=Bigram(), demonstrations=demonstrations(), run=run).reports
    assert report.nll == pytest.approx(bigram_nll(demonstrations()[2]))


def test_demonstrations_can_be_an_iterator(bigram):
    packed = inflight.pack_demonstrations(zip([[1, 2, 3], [6]], [[4, 5], [7]], strict=True))
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_demonstrations_that_end_or_are_empty_are_errors(bigram):
    with pytest.raises(InflightError, match="the demonstrations have ended before the run"):
        Run(model=Bigram(), demonstrations=demonstrations()[:2])
    with pytest.raises(ValueError, match="demonstration 1 has an empty answer"):
        inflight.pack_demonstrations([([1], [2]), ([1], [])])
    with pytest.raises(ValueError, match="empty prompt"):
        inflight.pack_demonstrations([([], [2])])
    with pytest.raises(ValueError, match="demonstration_weight must be finite and above 0, got -1"):
        inflight.GRPOConfig(demonstration_weight=-1)
