"""The reference policy of a KL penalty: a separate model, or a model with adapters without them; and the penalty if it
is part of the reward."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from inflight.weights.trainer.lora import KEEP_THE_BASE

ReferenceScorer = Callable[[PackedBatch], torch.Tensor]
"""A function that computes the log-probabilities f32[n] of a batch's drawn tokens, without gradient."""


_SWITCHED_OFF = ("modules_to_save.", "token_adapter.", "trainable_tokens_")
_MIXED = ("lora_", "lokr_", "hada_", "oft_", "shira_", *_SWITCHED_OFF)
"""Parts of names of parameters that PEFT switches off with the adapters: of any model, and of mixed ones."""


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
    for a forward pass. autocast: as `GRPOConfig.autocast`. Raises ValueError if a penalty has no reference policy, also
    because the base of a PEFT model is changed or trained, or if a reference is given without a penalty.
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
        if change := _change_of_base(peft_model):
            raise ValueError(
                f"the reference would be the model without its adapters, but {change}, so that this is not the initial "
                "policy: give reference=copy.deepcopy(model), made before training"
            )
        return partial(_score, model, partial(_without_adapters, peft_model), autocast)
    name, weight = ("kl_weight", objective.kl_weight) if objective.kl_weight else ("reward_kl_weight", reward_kl_weight)
    raise ValueError(
        f"{name}={weight} asks for a KL penalty to a reference policy, but there is none: "
        "give reference=copy.deepcopy(model), made before training, which takes the memory of a second model; or train "
        "adapters of PEFT, where the model without them is the reference"
    )


def _change_of_base(model: Any) -> str:
    """Return why the base of a PEFT model is not the policy before training, or ""."""
    for init in (str(getattr(config, "init_lora_weights", None)) for config in model.peft_config.values()):
        if init.lower() not in KEEP_THE_BASE:
            return f"init_lora_weights={init!r} has changed its weights"
    prefix = getattr(model.base_model, "prefix", "")  # Without one, as in X-LoRA, every name contains "".
    own = _MIXED if type(model).__name__ == "PeftMixedModel" else (prefix, *_SWITCHED_OFF)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    base = [name for name in trained if not any(part in name for part in own)]
    return f"{base[0]} of it is trained" if base else ""


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    """Switch the adapters off. PEFT lets all of them require gradients afterwards, also the ones that were frozen."""
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, requires_grad in required:
            parameter.requires_grad_(requires_grad)


@torch.no_grad()
def _score(
    policy: nn.Module, context: Callable[[], AbstractContextManager[Any]], autocast: bool, batch: PackedBatch
) -> torch.Tensor:
    # The drawing policy has chosen the recorded experts.
    with context(), bf16_on_gpu(policy, autocast):
        return token_logprobs(policy, replace(batch, routed_experts=None))


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
