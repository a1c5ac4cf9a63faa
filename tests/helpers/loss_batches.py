"""Packed batches made by hand, in float64, with ratios on both sides of every bound."""

from dataclasses import dataclass

import torch
from plain_objectives import Sequence, Token

from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import TokenScores
from inflight.training.objective.aggregation import StepTotals
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import Objective
from inflight.training.objective.tokens import DrawnTokens

TRAINER_VERSION = 5
SEEDS = range(4)
AGGREGATIONS = ("token", "sequence", "group", "constant")
MAX_TOKENS = 9
SPREADS = (0.0, 1e-4, 2e-3, 0.05, 0.3, 1.3)
"""Standard deviations of log ρ within a sequence; the first makes an on-policy one."""


@dataclass
class Case:
    batch: PackedBatch
    logprobs: torch.Tensor
    """f64[n], log π_θ of the drawn tokens."""
    entropies: torch.Tensor
    """f64[n]"""

    def scores(self, batch: PackedBatch | None = None) -> TokenScores:
        """Leaves with gradient, of a batch or of a micro-batch of it."""
        leaves = torch.zeros(len(self.batch.input_ids), 2, dtype=torch.float64)
        leaves[self.batch.loss_mask] = torch.stack([self.logprobs, self.entropies], 1)
        chosen = self.batch if batch is None else batch
        rows = leaves[chosen.input_ids[chosen.loss_mask]]  # token ids are the tokens' places in the whole batch
        return TokenScores(rows[:, 0].clone().requires_grad_(), rows[:, 1].clone().requires_grad_())

    def tokens(self) -> DrawnTokens:
        """With the batch's proximal column as π_p."""
        batch, drawn = self.batch, self.batch.loss_mask
        return DrawnTokens(
            logprobs=self.logprobs.clone().requires_grad_(),
            behavior=batch.behavior_logprobs[drawn],
            proximal=batch.proximal_logprobs[drawn],
            advantages=batch.advantages[drawn],
            sequences=batch.sequence_ids[drawn],
            num_sequences=batch.num_sequences,
        )


def make_case(seed: int, *, copies: int = 4, per_token_advantages: bool = False) -> Case:
    """Sequences of 0 to 9 drawn tokens in groups of 3, `copies` of each spread, one group of them without a token."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    spreads = [spread for spread in SPREADS for _ in range(copies)]
    lengths = [*torch.randint(1, 10, (len(spreads),), generator=random).tolist(), 0, 0, 0]
    lengths[5] = 0
    prompts = torch.randint(1, 4, (len(lengths),), generator=random).tolist()
    order = torch.randperm(len(spreads), generator=random).tolist()
    spreads = [spreads[i] for i in order] + [0.0] * 3
    groups = torch.arange(len(lengths)) // 3
    columns: list[list[torch.Tensor]] = [[] for _ in range(7)]
    for prompt, length, spread in zip(prompts, lengths, spreads, strict=True):
        behavior = -0.05 - 5 * torch.rand(length, generator=random, dtype=torch.float64)
        logprobs = (behavior + spread * (normal(length) + normal(1))).clamp(max=-1e-3)
        proximal = (behavior + spread * (normal(length) + normal(1))).clamp(max=-1e-3)
        reference = behavior + 0.3 * normal(length)
        advantages = normal(length) if per_token_advantages else normal(1).expand(length)
        versions = torch.randint(0, TRAINER_VERSION + 1, (length,), generator=random).sort().values.double()
        entropies = 2 * torch.rand(length, generator=random, dtype=torch.float64)
        drawn = (behavior, logprobs, proximal, reference, advantages, versions, entropies)
        for column, values in zip(columns, drawn, strict=True):
            column.append(torch.cat([torch.zeros(prompt, dtype=torch.float64), values]))
    behavior, logprobs, proximal, reference, advantages, versions, entropies = map(torch.cat, columns)
    loss_mask = torch.cat([torch.arange(p + n) >= p for p, n in zip(prompts, lengths, strict=True)])
    sizes = torch.tensor([0, *(p + n for p, n in zip(prompts, lengths, strict=True))])
    advantages[sizes.cumsum(0)[2] : sizes.cumsum(0)[3]] = 0  # a sequence from which there is nothing to learn
    num_tokens = len(loss_mask)
    batch = PackedBatch(
        input_ids=torch.arange(num_tokens),
        position_ids=torch.cat([torch.arange(size) for size in sizes[1:].tolist()]),
        cu_seqlens=sizes.cumsum(0).int(),
        loss_mask=loss_mask,
        behavior_logprobs=behavior,
        weight_versions=versions.long(),
        sampled_at_ns=torch.zeros(num_tokens, dtype=torch.int64),
        temperatures=torch.ones(num_tokens),
        advantages=advantages,
        groups=groups,
        totals=StepTotals(
            num_tokens=sum(lengths),
            num_sequences=len(lengths),
            group_tokens=torch.bincount(groups, torch.tensor(lengths).double()).long(),
        ),
        proximal_logprobs=proximal,
        reference_logprobs=reference,
        trainer_version=TRAINER_VERSION,
    )
    return Case(batch, logprobs[loss_mask], entropies[loss_mask])


def pad(batch: PackedBatch, drawn: torch.Tensor) -> torch.Tensor:
    """f64[n] of the drawn tokens → f64[B, longest answer], zeros on the right, as trainers that do not pack have it."""
    rows = batch.sequence_ids[batch.loss_mask]
    lengths = torch.bincount(rows, minlength=batch.num_sequences)
    starts = lengths.cumsum(0) - lengths
    padded = drawn.new_zeros(batch.num_sequences, int(lengths.max()))
    return padded.index_put((rows, torch.arange(len(rows)) - starts[rows]), drawn)


# Comparisons with trainers that pad.


def ours(objective: Objective, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient by log π_θ f64[n])"""
    scores = case.scores()
    loss, _ = loss_of_scores(objective, case.batch, scores)
    loss.backward()
    return loss.detach(), scores.logprobs.grad


def padded(case: Case, name: str) -> torch.Tensor:
    return pad(case.batch, getattr(case.batch, name)[case.batch.loss_mask])


def sequence_advantages(case: Case) -> torch.Tensor:
    """f64[B]: these trainers have one advantage for a sequence."""
    return padded(case, "advantages")[:, 0]


def agree(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.allclose(a[0], b[0], rtol=1e-5, atol=1e-8) and torch.allclose(a[1], b[1], rtol=1e-5, atol=1e-9)


# Comparisons with the formulas of `plain_objectives.py`.


def sequences_of(case: Case) -> list[Sequence]:
    batch, drawn = case.batch, case.batch.loss_mask
    columns = (
        case.logprobs,
        batch.behavior_logprobs[drawn],
        batch.proximal_logprobs[drawn],
        batch.advantages[drawn],
        batch.weight_versions[drawn],
        batch.reference_logprobs[drawn],
        case.entropies,
    )
    sequences: list[Sequence] = [[] for _ in range(batch.num_sequences)]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for s, row in zip(batch.sequence_ids[drawn].tolist(), rows, strict=True):
        sequences[s].append(Token(*row[:4], int(row[4]), *row[5:]))
    return sequences


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def close(ours: torch.Tensor, expected: list[float], rel: float = 1e-12) -> bool:
    assert ours.dtype == torch.float64
    return torch.allclose(ours.detach(), torch.tensor(expected, dtype=torch.float64), rtol=rel, atol=1e-14)
