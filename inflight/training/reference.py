"""The policy that a KL penalty refers to: a model of its own, or what a model with adapters is without them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.objective import Objective
from inflight.weights.lora import is_peft
from inflight.weights.tensors import unwrap

ReferenceScorer = Callable[[PackedBatch], torch.Tensor]
"""A function that computes the log-probabilities f32[n] of a batch's drawn tokens, without gradient."""


def reference_scorer(objective: Objective, model: nn.Module, reference: nn.Module | None) -> ReferenceScorer | None:
    """The function that scores tokens for the objective's KL penalty, or None if it has no such penalty.

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
        return partial(_score, reference.eval(), nullcontext)
    if is_peft(model):
        peft_model: Any = unwrap(model)
        return partial(_score, model, peft_model.disable_adapter)
    raise ValueError(
        f"the objective has kl_weight={objective.kl_weight}, a KL penalty to a reference policy, but there is none: "
        "give reference=copy.deepcopy(model), made before training, which takes the memory of a second model; or train "
        "adapters of PEFT, where the model without them is the reference"
    )


@torch.no_grad()
def _score(policy: nn.Module, context: Callable[[], AbstractContextManager[Any]], batch: PackedBatch) -> torch.Tensor:
    with context():
        return token_logprobs(policy, batch)
