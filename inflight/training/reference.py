"""The reference policy of a KL penalty: a separate model, or a model with adapters without them; and the penalty if it
is part of the reward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import fsum
from statistics import fmean
from typing import Any

import msgspec
import torch
from torch import nn

from inflight.core.rollout import Turn, samples_of
from inflight.training.config import GRPOConfig
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import ScoredGroups
from inflight.training.model.forward import bf16_on_gpu, token_logprobs
from inflight.training.objective.objective import Objective
from inflight.weights.tensors import is_peft, unwrap

ReferenceScorer = Callable[[PackedBatch], torch.Tensor]
"""A function that computes the log-probabilities f32[n] of a batch's drawn tokens, without gradient."""


def reference_scorer(
    objective: Objective,
    model: nn.Module,
    reference: nn.Module | None,
    *,
    reward_kl_weight: float = 0.0,
    autocast: bool = True,
) -> ReferenceScorer | None:
    """Return the function that scores tokens for a KL penalty, in the objective or in the reward, or None without a
    penalty.

    reference: put into evaluation mode and never changed. None: the base of a PEFT model; its adapters are switched off
    for a forward pass. autocast: as `GRPOConfig.autocast`. Raises ValueError if a penalty has no reference policy, or a
    reference is given without a penalty.
    """
    if not objective.kl_weight and not reward_kl_weight:
        if reference is not None:
            raise ValueError(
                "reference is given, but there is no KL penalty: set Objective(kl_weight=…), or "
                "GRPOConfig(reward_kl_weight=…)"
            )
        return None
    if reference is not None:
        if unwrap(reference) is unwrap(model):
            raise ValueError(
                "reference is the model that is trained, to which its KL is always 0; give a copy: "
                "reference=copy.deepcopy(model)"
            )
        return partial(_score, reference.eval(), nullcontext, autocast)
    if is_peft(model):
        peft_model: Any = unwrap(model)
        return partial(_score, model, peft_model.disable_adapter, autocast)
    name, weight = ("kl_weight", objective.kl_weight) if objective.kl_weight else ("reward_kl_weight", reward_kl_weight)
    raise ValueError(
        f"{name}={weight} asks for a KL penalty to a reference policy, but there is none: "
        "give reference=copy.deepcopy(model), made before training, which takes the memory of a second model; or train "
        "adapters of PEFT, where the model without them is the reference"
    )


@torch.no_grad()
def _score(
    policy: nn.Module, context: Callable[[], AbstractContextManager[Any]], autocast: bool, batch: PackedBatch
) -> torch.Tensor:
    with context(), bf16_on_gpu(policy, autocast):
        return token_logprobs(policy, batch)


def charge_kl(scored: ScoredGroups, score_reference: ReferenceScorer, config: GRPOConfig) -> tuple[ScoredGroups, float]:
    """Return copies of the groups with rewards r − reward_kl_weight · Σ_t KL_t, and the mean of Σ_t KL_t over their
    samples. There must be a group.

    Σ_t runs over the drawn tokens of the sample: of the rollout, or of all token sequences of an episode.
    KL_t = log π_b − log π_ref, with π_b as recorded. The expectation of the sum is KL(π_b ‖ π_ref) of the whole answer.
    On-policy, it adds the gradient of that KL to the expected gradient of the reward (RLOO, Ahmadian et al.,
    arXiv 2402.14740, §2). Each token sequence of an episode is charged for its own tokens in its last drawn turn.
    """
    batch = pack(scored.rollouts, [0.0] * len(scored.rollouts))
    kl_of: dict[int, float] = {}
    for part in batch.micro_batches(config.micro_batch_tokens) if config.micro_batch_tokens else [batch]:
        behavior = part.behavior_logprobs[part.drawn].double()
        estimates = behavior - score_reference(part).double().to(behavior.device)
        kls = estimates.new_zeros(part.num_sequences).index_add(0, part.sequence_ids[part.drawn], estimates)
        kl_of |= {id(rollout): kl for rollout, kl in zip(part.rollouts, kls.tolist(), strict=True)}
    beta = config.reward_kl_weight
    samples = samples_of(scored.rollouts)
    sums = [fsum(kl_of[id(rollout)] for rollout in sample) for sample in samples]
    charges = {id(rollout): beta * kl for sample, kl in zip(samples, sums, strict=True) for rollout in sample}
    groups = [
        [
            replace(r, reward=(r.reward or 0.0) - charges[id(r)], turns=_charged(r.turns, beta * kl_of[id(r)]))
            for r in group
        ]
        for group in scored.groups
    ]
    return ScoredGroups(groups, scored.dropped), fmean(sums)


def _charged(turns: tuple[Turn, ...], charge: float) -> tuple[Turn, ...]:
    """Return the turns with the reward of the last drawn one reduced by the charge."""
    last = max((index for index, turn in enumerate(turns) if turn.drawn), default=None)
    if last is None:
        return turns
    charged = msgspec.structs.replace(turns[last], reward=(turns[last].reward or 0.0) - charge)
    return (*turns[:last], charged, *turns[last + 1 :])
