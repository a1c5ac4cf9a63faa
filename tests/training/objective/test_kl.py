"""The expected gradient of each KL penalty, by enumeration of every token of a softmax policy in float64."""

from functools import partial

import numpy as np
import pytest
import torch

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model.forward import TokenScores
from inflight.training.objective.kl import kl_estimate, kl_penalty
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import Objective

VOCABULARY = 7


class World:
    """Logits of π_θ, and log-probabilities of π_ref and of two policies that draw: π_θ itself and an older one."""

    def __init__(self, seed: int):
        random = torch.Generator().manual_seed(seed)
        own, reference, older = 0.6 * torch.randn(3, VOCABULARY, generator=random, dtype=torch.float64)
        self.logits = own.requires_grad_()
        self.logprobs = own.log_softmax(0)
        self.reference = reference.log_softmax(0)
        self.draws = {"on-policy": self.logprobs.detach(), "stale": older.log_softmax(0)}

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0]

    @property
    def targets(self) -> dict[str, torch.Tensor]:
        log_ratio = self.logprobs - self.reference
        return {
            "KL(θ‖ref)": self.gradient((self.logprobs.exp() * log_ratio).sum()),
            "KL(ref‖θ)": self.gradient(-(self.reference.exp() * log_ratio).sum()),
            "0": torch.zeros(VOCABULARY, dtype=torch.float64),
        }


# The expected gradient on-policy, and for tokens of an older policy; None: neither of a KL nor 0.
EXPECTED = {
    ("k1", True): ("KL(θ‖ref)", "KL(θ‖ref)"),
    ("k2", True): ("KL(θ‖ref)", "KL(θ‖ref)"),
    ("k3", True): ("KL(θ‖ref)", "KL(θ‖ref)"),
    ("k3_clamped", True): ("KL(ref‖θ)", "KL(ref‖θ)"),
    ("k1", False): ("0", None),
    ("k2", False): ("KL(θ‖ref)", None),
    ("k3", False): ("KL(ref‖θ)", None),
    ("k3_clamped", False): ("KL(ref‖θ)", None),
}


@pytest.mark.parametrize("draws", ["on-policy", "stale"])
@pytest.mark.parametrize(("kind", "corrected"), EXPECTED)
def test_the_expected_gradient_of_a_penalty_is_that_of_its_kl(kind, corrected, draws):
    expected = EXPECTED[kind, corrected][0 if draws == "on-policy" else 1]
    for seed in range(5):
        world = World(seed)
        behavior = world.draws[draws]
        terms = kl_penalty(kind, world.logprobs, world.reference, behavior, corrected=corrected)
        gradient = world.gradient((behavior.exp() * terms).sum())
        for name, target in world.targets.items():
            assert torch.allclose(gradient, target, rtol=1e-10, atol=1e-12) is (name == expected), name


def rollouts_of_every_token(behavior: torch.Tensor) -> PackedBatch:
    """One answer of one token for each token of the vocabulary."""
    rollouts = [
        Rollout(
            request_id=token,
            group_id=token,
            sample=0,
            params=SamplingParams(n=1, max_tokens=1),
            metadata={},
            prompt_token_ids=np.zeros(1, np.int32),
            token_ids=np.array([token], np.int32),
            logprobs=behavior[[token]].numpy(),
            weight_versions=np.zeros(1, np.int64),
            sampled_at_ns=np.zeros(1, np.int64),
            finish_reason="length",
        )
        for token in range(VOCABULARY)
    ]
    return pack(rollouts, [0.0] * VOCABULARY, trainer_version=1)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_default_penalty_of_a_loss_has_the_gradient_of_the_kl_in_flight(kind):
    world = World(0)
    behavior = world.draws["stale"]
    batch = rollouts_of_every_token(behavior).with_column("reference_logprobs", world.reference)
    leaf = world.logprobs.detach().requires_grad_()
    loss, _ = loss_of_scores(Objective(kl=kind, kl_weight=0.5), batch, TokenScores(leaf, None))
    loss.backward()
    per_token = leaf.grad * VOCABULARY  # the loss is the mean over tokens
    expected = world.gradient((behavior.exp() * per_token * world.logprobs).sum())
    assert torch.allclose(expected, 0.5 * world.targets["KL(θ‖ref)"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_as_a_reward_only_k1_has_the_gradient_of_the_kl(kind):
    world = World(1)
    terms = kl_estimate(kind, world.logprobs, world.reference).detach()
    gradient = world.gradient((world.draws["on-policy"].exp() * terms * world.logprobs).sum())
    reverse, forward = world.targets["KL(θ‖ref)"], world.targets["KL(ref‖θ)"]
    assert torch.allclose(gradient, reverse, rtol=1e-10, atol=1e-12) is (kind == "k1")
    assert torch.allclose(gradient, reverse - forward, rtol=1e-10, atol=1e-12) is (kind == "k3")


def test_a_token_far_from_the_reference_has_a_gradient_that_grows_with_the_log_ratio_alone():
    logprobs = torch.tensor([-8.0, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    penalty = partial(kl_penalty, "k3", logprobs, reference, logprobs.detach())
    [corrected] = torch.autograd.grad(penalty(corrected=True).sum(), logprobs)
    [plain] = torch.autograd.grad(penalty(corrected=False).sum(), logprobs)
    assert corrected.tolist() == pytest.approx([-7, -29])
    assert plain[0] == pytest.approx(-1095.6, rel=1e-4)
    assert plain[1] < -1e12


def test_a_clamped_penalty_never_pushes_a_token_away_from_the_reference():
    logprobs = torch.linspace(-12, -0.1, 40, dtype=torch.float64).requires_grad_()
    reference = torch.full_like(logprobs, -0.1)
    terms = kl_penalty("k3_clamped", logprobs, reference, logprobs.detach() - 0.7, corrected=True)
    [gradient] = torch.autograd.grad(terms.sum(), logprobs)
    assert (gradient <= 0).all()


def test_k1_without_a_gradient_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"expected gradient of 0.*leave kl_correction at True, or choose kl='k2'"):
        Objective(kl="k1", kl_weight=0.1, kl_correction=False)
    Objective(kl="k1", kl_weight=0.1)
    Objective(kl="k1", kl_correction=False)  # there is no penalty
