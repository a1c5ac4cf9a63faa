"""One pass classifies a model, and later questions are answered by its record."""

import pytest
import torch
from tiny_adapters import with_adapters
from tiny_models import make_model
from torch import nn

from inflight.core.errors import LayoutMismatchError
from inflight.weights.trainer.sources import classify


def in_zero(layer: nn.Module) -> nn.Module:
    """The layer, with the attribute by which ZeRO-3 is recognized."""
    layer.weight.ds_id = 0
    return layer


@pytest.mark.parametrize(
    ("model", "kind", "is_sharded"),
    [
        (lambda: nn.Linear(3, 2), "full", False),
        (lambda: nn.DataParallel(nn.Linear(3, 2)), "full", False),
        (lambda: in_zero(nn.Linear(3, 2)), "zero", True),
        (lambda: with_adapters("qwen3", "policy"), "peft", False),
    ],
)
def test_a_model_is_classified_inside_its_wrappers(model, kind, is_sharded):
    found = classify(model())
    assert (found.kind, found.is_sharded) == (kind, is_sharded)
    if kind != "peft":
        assert list(found.tensors) == ["weight", "bias"]


def test_adapters_on_a_sharded_model_are_refused():
    model = with_adapters("qwen3", "policy")
    next(model.parameters()).ds_id = 0
    with pytest.raises(LayoutMismatchError, match="adapters on a model that is spread over ranks"):
        classify(model)


def test_new_values_change_no_record_and_new_parameters_or_buffers_do():
    model = make_model("qwen3")
    found = classify(model)
    with torch.no_grad():
        model.model.norm.weight += 1
    assert not found.has_changed()
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    assert found.has_changed()
    found = classify(model)
    model.register_buffer("extra", torch.zeros(1))
    assert found.has_changed()
