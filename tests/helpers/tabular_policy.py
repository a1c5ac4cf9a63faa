"""A policy small enough to enumerate: expectations of the loss's gradient over every sequence, without sampling.

A sequence ends with token 0 or at LENGTH tokens. The logits of a token are a row of a table, one row for each prefix,
so that they depend on all that came before. S sequences with n tokens in all, P prefixes, V = VOCABULARY.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch

from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import TokenScores
from inflight.training.objective.aggregation import StepTotals
from inflight.training.objective.corrections import sequence_truncate, token_truncate
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import PRESETS, Objective

VOCABULARY, LENGTH, END = 5, 4, 0


def enumerate_sequences() -> list[tuple[int, ...]]:
    whole: list[tuple[int, ...]] = []
    open_ended: list[tuple[int, ...]] = [()]
    while open_ended:
        grown = [(*prefix, token) for prefix in open_ended for token in range(VOCABULARY)]
        whole += [sequence for sequence in grown if sequence[-1] == END or len(sequence) == LENGTH]
        open_ended = [sequence for sequence in grown if sequence[-1] != END and len(sequence) < LENGTH]
    return whole


SEQUENCES = enumerate_sequences()
PREFIXES = {prefix: i for i, prefix in enumerate(sorted({s[:t] for s in SEQUENCES for t in range(len(s))}))}
ROWS = torch.tensor([PREFIXES[s[:t]] for s in SEQUENCES for t in range(len(s))])
TOKENS = torch.tensor([s[t] for s in SEQUENCES for t in range(len(s))])
POSITIONS = torch.tensor([t for s in SEQUENCES for t in range(len(s))])
OWNERS = torch.tensor([i for i, s in enumerate(SEQUENCES) for _ in s])


@dataclass(frozen=True)
class World:
    """Versions of a policy, and what its sequences earn."""

    tables: list[torch.Tensor]
    """f64[P, V], the logits of each version; the trainer has the last one."""
    rewards: torch.Tensor
    """f64[S]"""

    @property
    def trainer_version(self) -> int:
        return len(self.tables) - 1

    def logprobs(self, version: int) -> torch.Tensor:
        """Return log π f64[n] of every token of every sequence."""
        return token_logprobs(self.tables[version])

    def drawn_by(self, pattern: Sequence[int]) -> torch.Tensor:
        """Return log π_b f64[n] where the token at position t was drawn by version pattern[t]."""
        of_versions = torch.stack([self.logprobs(version) for version in range(len(self.tables))])
        return of_versions[torch.tensor(pattern)[POSITIONS], torch.arange(len(TOKENS))]

    def on_policy_gradient(self) -> torch.Tensor:
        """Return ∇ E[reward] f64[P, V] of the trainer's policy, by differentiating the expectation itself."""
        table = self.tables[-1].clone().requires_grad_()
        (sequence_probabilities(token_logprobs(table)) * self.rewards).sum().backward()
        assert table.grad is not None
        return table.grad


def token_logprobs(table: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(table, -1)[ROWS, TOKENS]


def sequence_probabilities(logprobs: torch.Tensor) -> torch.Tensor:
    """Multiply the probabilities of each sequence's tokens: f64[S] from f64[n]."""
    return logprobs.new_zeros(len(SEQUENCES)).index_add(0, OWNERS, logprobs).exp()


def make_world(step: float, *, versions: int = 4, seed: int = 0) -> World:
    """Make versions of which each has gone `step` further per logit: half up the gradient's sign, as Adam does, half at
    random, as the gradients of other prompts push it."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    world = World([normal(len(PREFIXES), VOCABULARY)], normal(len(SEQUENCES)))
    for _ in range(versions - 1):
        direction = (world.on_policy_gradient().sign() + normal(len(PREFIXES), VOCABULARY)) / 2**0.5
        world.tables.append(world.tables[-1] + step * direction)
    return world


def make_batch(world: World, pattern: Sequence[int], recorded: torch.Tensor | None = None) -> PackedBatch:
    """Pack every sequence once, after a prompt of one token, each as if it were alone in its optimizer step.

    recorded: what is taken for log π_b f64[n], if not the truth. Advantages are rewards less the mean over π_b. π_p,
    where an objective asks for it, is the newest version that drew.
    """
    truth = world.drawn_by(pattern)
    advantages = world.rewards - (sequence_probabilities(truth) * world.rewards).sum()
    lengths = torch.tensor([len(sequence) + 1 for sequence in SEQUENCES])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    drawn = torch.ones(int(starts[-1]), dtype=torch.bool)
    drawn[starts[:-1]] = False

    def column(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(drawn)).masked_scatter(drawn, values)

    return PackedBatch(
        input_ids=column(TOKENS),
        position_ids=column(POSITIONS + 1),
        cu_seqlens=starts.int(),
        loss_mask=drawn,
        behavior_logprobs=column(truth if recorded is None else recorded),
        weight_versions=column(torch.tensor(pattern)[POSITIONS]),
        sampled_at_ns=torch.zeros(len(drawn), dtype=torch.int64),
        temperatures=torch.ones(len(drawn)),
        advantages=column(advantages[OWNERS]),
        groups=torch.zeros(len(SEQUENCES), dtype=torch.int64),
        totals=StepTotals(num_tokens=LENGTH, num_sequences=1, group_tokens=torch.tensor([LENGTH])),
        proximal_logprobs=column(world.logprobs(max(pattern))),
        trainer_version=world.trainer_version,
    )


def token_gradients(objective: Objective, batch: PackedBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Return −∂loss / ∂log π_θ f64[n], times LENGTH. Objectives that rank the tokens of a batch rank the tokens of all
    sequences, each once, however likely it is."""
    leaf = logprobs.detach().clone().requires_grad_()
    loss, _ = loss_of_scores(objective, batch, TokenScores(leaf, None))
    loss.backward()
    assert leaf.grad is not None
    return -LENGTH * leaf.grad


def chain(weights: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return Σ_t weights_t ∇log π(token t) f64[P, V]"""
    table = table.clone().requires_grad_()
    (weights * token_logprobs(table)).sum().backward()
    assert table.grad is not None
    return table.grad


@dataclass(frozen=True)
class Expectation:
    """Moments of −∇loss of one sequence, over the sequences that π_b draws."""

    gradient: torch.Tensor
    """f64[P, V]"""
    second_moment: float
    """E‖−∇loss‖²"""

    @property
    def variance(self) -> float:
        """The variance of all coordinates together. The mean of a batch of N sequences has an N-th of it."""
        return self.second_moment - self.gradient.square().sum().item()


def expect(
    objective: Objective,
    world: World,
    pattern: Sequence[int],
    *,
    recorded: torch.Tensor | None = None,
) -> Expectation:
    """Take the expectation where the token at position t is drawn by version pattern[t]. The objective aggregates by
    "constant" with LENGTH, so that nothing but the correction can be biased."""
    assert (objective.aggregation, objective.max_tokens) == ("constant", LENGTH)
    gradients = token_gradients(objective, make_batch(world, pattern, recorded), world.logprobs(world.trainer_version))
    probabilities = sequence_probabilities(world.drawn_by(pattern))[OWNERS]
    policy = world.tables[-1].softmax(-1)[ROWS]
    scores = torch.nn.functional.one_hot(TOKENS, VOCABULARY) - policy  # ∇log π of a token, in its prefix's row
    second_moment = (probabilities * gradients.square() * scores.square().sum(-1)).sum().item()  # prefixes differ
    return Expectation(chain(probabilities * gradients, world.tables[-1]), second_moment)


def bias(estimate: Expectation, truth: torch.Tensor) -> dict[str, float]:
    """Measure the distance of an expectation from the gradient that it estimates, and the noise of one sequence."""
    gradient = estimate.gradient
    return {
        "relative_error": ((gradient - truth).norm() / truth.norm()).item(),
        "cosine": torch.nn.functional.cosine_similarity(gradient.flatten(), truth.flatten(), dim=0).item(),
        "relative_norm": (gradient.norm() / truth.norm()).item(),
        "relative_noise": estimate.variance**0.5 / truth.norm().item(),
    }


def _constant(objective: Objective) -> Objective:
    return replace(objective, aggregation="constant", max_tokens=LENGTH)


SEQUENCE_RATIO = _constant(replace(PRESETS["tis"], correction=partial(sequence_truncate, cap=inf)))
"""The whole ratio of a sequence, which nothing bounds."""
OBJECTIVES: dict[str, Objective] = {
    "sequence ratio, no bound": SEQUENCE_RATIO,
    "token ratio, no bound": _constant(replace(PRESETS["tis"], correction=partial(token_truncate, cap=inf))),
    **{name: _constant(objective) for name, objective in PRESETS.items()},
}
"""Maps the names of the table to objectives; every preset is among them."""


def bias_table(world: World, pattern: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the bias of every objective, with π_b as recorded, and of the whole ratio with another π_b.

    π_b "of version v" is what recomputing it with the weights of one version, for all tokens, would give.
    """
    truth = world.on_policy_gradient()
    table = {name: bias(expect(objective, world, pattern), truth) for name, objective in OBJECTIVES.items()}
    for name, version in (("oldest", min(pattern)), ("newest", max(pattern)), ("trainer's", world.trainer_version)):
        for objective in ("sequence ratio, no bound", "tis"):
            estimate = expect(OBJECTIVES[objective], world, pattern, recorded=world.logprobs(version))
            table[f"{objective}, π_b of the {name} version"] = bias(estimate, truth)
    return table


def distance(world: World, pattern: Sequence[int]) -> dict[str, float]:
    """Measure how far π_θ is from π_b: expectations over the drawn tokens, and over sequences."""
    log_ratios = world.logprobs(world.trainer_version) - world.drawn_by(pattern)
    probabilities = sequence_probabilities(world.drawn_by(pattern))
    of_tokens = probabilities[OWNERS] / probabilities[OWNERS].sum()
    whole = log_ratios.new_zeros(len(SEQUENCES)).index_add(0, OWNERS, log_ratios)
    return {
        "kl_per_token": -(of_tokens * log_ratios).sum().item(),
        "mean_abs_log_ratio": (of_tokens * log_ratios.abs()).sum().item(),
        "tokens_above_2": of_tokens[log_ratios.exp() > 2].sum().item(),
        "ess_of_tokens": 1 / (of_tokens * (2 * log_ratios).exp()).sum().item(),
        "ess_of_sequences": 1 / (probabilities * (2 * whole).exp()).sum().item(),
        "max_abs_log_ratio_of_sequence": whole.abs().max().item(),
    }
