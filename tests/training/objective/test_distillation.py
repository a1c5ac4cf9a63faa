"""The expected gradient of both forms of distillation, over every answer of a tiny policy in float64."""

from dataclasses import replace
from math import log

import pytest
import torch
from tabular_policy import (
    LENGTH,
    OBJECTIVES,
    OWNERS,
    PREFIXES,
    ROWS,
    SEQUENCE_RATIO,
    TOKENS,
    VOCABULARY,
    World,
    chain,
    make_batch,
    make_world,
    sequence_probabilities,
    token_gradients,
    token_logprobs,
)

from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import TokenScores
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS, top_k_kl
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import Objective

ON_POLICY, STALE = (3, 3, 3, 3), (0, 0, 1, 2)
TOKEN_RATIO = OBJECTIVES["token ratio, no bound"]
WEIGHT = 0.7


def teacher_table(seed: int = 5) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(len(PREFIXES), VOCABULARY, generator=random, dtype=torch.float64)


def taught_batch(world: World, pattern: tuple[int, ...], k: int = 0, *, rewards: bool = False) -> PackedBatch:
    """Every answer once, with the scores of the teacher, and without advantages unless there are rewards."""
    batch, logs = make_batch(world, pattern), teacher_table().log_softmax(-1)

    def laid_out(values: torch.Tensor) -> torch.Tensor:
        column = values.new_zeros(len(batch.input_ids), *values.shape[1:])
        column[batch.drawn] = values
        return column

    top_logprobs, top_ids = logs[ROWS].topk(k)
    columns = {LOGPROBS: logs[ROWS, TOKENS], TOP_IDS: top_ids, TOP_LOGPROBS: top_logprobs}
    batch.columns = {name: laid_out(values) for name, values in columns.items()}
    return batch if rewards else replace(batch, advantages=torch.zeros_like(batch.advantages))


def prefix_gradient(divergences_P: torch.Tensor, logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Σ over prefixes of the probability that the policy `drawn` reaches it, f64[n] per token, · ∇ its divergence."""
    of_prefix, policy = torch.zeros(len(PREFIXES), dtype=torch.float64), sequence_probabilities(drawn)
    of_prefix.index_add_(0, ROWS, policy[OWNERS])
    [gradient] = torch.autograd.grad((of_prefix * divergences_P).sum(), logits)
    return gradient


def kl(kind: str, logs_q: torch.Tensor, logs_p: torch.Tensor) -> torch.Tensor:
    first, second = (logs_q, logs_p) if kind == "reverse" else (logs_p, logs_q)
    return (first.exp() * (first - second)).sum(-1)


def sampled_gradient(objective: Objective, world: World, pattern: tuple[int, ...], **options) -> torch.Tensor:
    """The expectation of −∇loss over the answers that the versions draw."""
    batch = taught_batch(world, pattern, **options)
    gradients = token_gradients(objective, batch, world.logprobs(world.trainer_version))
    return chain(sequence_probabilities(world.drawn_by(pattern))[OWNERS] * gradients, world.tables[-1])


@pytest.mark.parametrize("pattern", [ON_POLICY, STALE])
def test_the_drawn_token_has_the_gradient_of_the_reverse_kl_of_each_prefix(pattern):
    """Corrected per token: of the prefixes that π_b reaches."""
    world = make_world(0.3, seed=11)
    logits = world.tables[-1].clone().requires_grad_()
    divergences = kl("reverse", logits.log_softmax(-1), teacher_table().log_softmax(-1))
    exact = prefix_gradient(divergences, logits, world.drawn_by(pattern))
    ours = sampled_gradient(replace(TOKEN_RATIO, teacher_weight=WEIGHT), world, pattern)
    torch.testing.assert_close(ours, -WEIGHT * exact, rtol=0, atol=1e-12)
    assert exact.abs().max() > 0.1


def test_with_ratios_of_sequences_the_prefixes_are_those_of_the_policy_and_rewards_add_up():
    world = make_world(0.3, seed=11)
    logits = world.tables[-1].clone().requires_grad_()
    divergences = kl("reverse", logits.log_softmax(-1), teacher_table().log_softmax(-1))
    exact = prefix_gradient(divergences, logits, world.logprobs(world.trainer_version))
    objective = replace(SEQUENCE_RATIO, teacher_weight=WEIGHT)
    torch.testing.assert_close(sampled_gradient(objective, world, STALE), -WEIGHT * exact, rtol=0, atol=1e-12)
    both = sampled_gradient(objective, world, STALE, rewards=True)
    torch.testing.assert_close(both, world.on_policy_gradient() - WEIGHT * exact, rtol=0, atol=1e-12)


def test_without_a_correction_the_gradient_of_older_tokens_is_another():
    world = make_world(0.3, seed=11)
    corrected = sampled_gradient(replace(TOKEN_RATIO, teacher_weight=WEIGHT), world, STALE)
    plain = sampled_gradient(replace(OBJECTIVES["none"], teacher_weight=WEIGHT), world, STALE)
    assert (corrected - plain).norm() > 0.1 * corrected.norm()


def top_k_gradient(objective: Objective, world: World, pattern: tuple[int, ...], k: int) -> torch.Tensor:
    batch, table = taught_batch(world, pattern, k), world.tables[-1].clone().requires_grad_()
    logprobs = token_logprobs(table)
    at = table.log_softmax(-1)[ROWS].gather(1, batch.columns[TOP_IDS][batch.drawn])
    leaf = at.detach().requires_grad_()
    loss, stats = loss_of_scores(objective, batch, TokenScores(logprobs.detach().requires_grad_(), None, leaf))
    loss.backward()
    assert stats.teacher_kl > 0
    weighted = LENGTH * leaf.grad * sequence_probabilities(world.drawn_by(pattern))[OWNERS][:, None]
    [gradient] = torch.autograd.grad((weighted * at).sum(), table)
    return gradient


def coarse(logs_PV: torch.Tensor, ids_Pk: torch.Tensor) -> torch.Tensor:
    """log-probabilities of k tokens, and of all others together, by summing those that are left."""
    rows = []
    for logs, ids in zip(logs_PV, ids_Pk.tolist(), strict=True):
        others = [logs[i] for i in range(VOCABULARY) if i not in ids]
        rows.append(torch.stack([*(logs[i] for i in ids), torch.stack(others).logsumexp(0)]))
    return torch.stack(rows)


@pytest.mark.parametrize("k", [1, 2, VOCABULARY - 1])
@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize("pattern", [ON_POLICY, STALE])
def test_top_k_has_the_gradient_of_the_kl_with_all_others_as_one_token(pattern, kind, k):
    """With all tokens but one it is the KL of the whole distributions."""
    world, logs_p = make_world(0.3, seed=11), teacher_table().log_softmax(-1)
    logits = world.tables[-1].clone().requires_grad_()
    ids = logs_p.topk(k).indices
    divergences = kl(kind, coarse(logits.log_softmax(-1), ids), coarse(logs_p, ids))
    exact = prefix_gradient(divergences, logits, world.drawn_by(pattern))
    objective = replace(TOKEN_RATIO, teacher_weight=WEIGHT, teacher_top_k=k, teacher_kl=kind)
    ours = top_k_gradient(objective, world, pattern, k)
    torch.testing.assert_close(ours, WEIGHT * exact, rtol=0, atol=1e-12)
    if k == VOCABULARY - 1:
        whole = kl(kind, logits.log_softmax(-1), logs_p)
        torch.testing.assert_close(prefix_gradient(whole, logits, world.drawn_by(pattern)), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_tokens_that_the_policy_cannot_draw_count_among_the_others(kind):
    teacher = torch.tensor([[0.5, 0.3, 0.1]], dtype=torch.float64).log()
    policy = torch.tensor([[0.6, 0.0, 0.3]], dtype=torch.float64).log().requires_grad_()
    found = top_k_kl(kind, policy, teacher)
    q, p = [0.6, 0.3, 0.1], [0.5, 0.1, 0.4]
    first, second = (q, p) if kind == "reverse" else (p, q)
    assert found.item() == pytest.approx(sum(a * log(a / b) for a, b in zip(first, second, strict=True)))
    [gradient] = torch.autograd.grad(found.sum(), policy)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_the_divergence_is_never_negative_and_finite_without_a_rest(kind):
    random = torch.Generator().manual_seed(0)
    logs = torch.randn(2, 100, 8, generator=random).mul(4).log_softmax(-1)
    for k in (3, 8):  # all eight leave nothing for the others
        found = top_k_kl(kind, logs[0, :, :k], logs[1, :, :k])
        assert found.isfinite().all()
        assert (found > -1e-6).all()
    torch.testing.assert_close(top_k_kl(kind, logs[0], logs[0]), torch.zeros(100), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher_weight": -1.0}, "teacher_weight must be finite and at least 0, got -1"),
        ({"teacher_top_k": 4}, "teacher_top_k must be at least 0, and needs a teacher_weight above 0; got 4"),
        ({"teacher_weight": 1.0, "teacher_kl": "jsd"}, "unknown divergence from a teacher 'jsd'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(**settings)


@pytest.mark.parametrize("k", [0, 2])
def test_a_batch_without_scores_names_what_to_do(k):
    world = make_world(0.3)
    objective = replace(TOKEN_RATIO, teacher_weight=1.0, teacher_top_k=k)
    scores = TokenScores(world.logprobs(3), None, torch.zeros(len(TOKENS), k))
    with pytest.raises(ValueError, match=r"teacher_weight needs batch.columns.*give inflight.grpo\(…, teacher=…\)"):
        loss_of_scores(objective, make_batch(world, ON_POLICY), scores)
