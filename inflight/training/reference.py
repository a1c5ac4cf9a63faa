"""The policy that a KL penalty refers to: a model of its own, or what a model with adapters is without them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.objective import Objective
from inflight.weights.lora import is_peft
from inflight.weights.tensors import unwrap

ReferenceScorer = Callable[[PackedBatch], torch.Tensor]
"""Log-probabilities f32[n] of the drawn tokens of a batch, without gradient."""


def reference_scorer(objective: Objective, model: nn.Module, reference: nn.Module | None) -> ReferenceScorer | None:
    """What scores tokens for the objective's KL penalty, or None if it has none.

    reference: put into evaluation mode and never changed. None: the base of a PEFT model, whose adapters are switched
    off for a forward pass. Raises ValueError if there is no policy to refer to, or one that nothing refers to.
    """
    if not objective.kl_weight:
        if reference is not None:
            raise ValueError("reference is given, but the objective has no KL penalty: set Objective(kl_weight=…)")
        return None
    if reference is not None:
        if unwrap(reference) is unwrap(model):
            raise ValueError(
                "reference is the model that is trained, to which its KL is always 0; give a copy: "
                "reference=copy.deepcopy(model)"
            )
        return _scorer_of(reference.eval())
    if is_peft(model):
        return _scorer_of_base(model)
    raise ValueError(
        f"the objective has kl_weight={objective.kl_weight}, a KL penalty to a reference policy, but there is none: "
        "give reference=copy.deepcopy(model), made before training, which takes the memory of a second model; or train "
        "adapters of PEFT, where the model without them is the reference"
    )


def _scorer_of(reference: nn.Module) -> ReferenceScorer:
    @torch.no_grad()
    def score(batch: PackedBatch) -> torch.Tensor:
        return token_logprobs(reference, batch)

    return score


def _scorer_of_base(model: nn.Module) -> ReferenceScorer:
    peft_model: Any = unwrap(model)

    @torch.no_grad()
    def score(batch: PackedBatch) -> torch.Tensor:
        with peft_model.disable_adapter():
            return token_logprobs(model, batch)

    return score
