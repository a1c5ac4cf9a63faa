"""Layers that vLLM converts after loading, without vLLM: the layer and its method are stand-ins."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from inflight.integrations.vllm_backend.converted import ConvertedLayer, Unmappable


class Method:
    """Quantises a weight to integers, with a scale per row. vLLM's methods mark the layer when they have done so."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        layer.weight = nn.Parameter((layer.weight / scale).round().to(torch.int8).T, requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)
        layer.row_sums = layer.weight.sum(0)
        layer._already_called_process_weights_after_loading = True


def layer_of(weight: torch.Tensor, method: Any) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.quant_method = weight.clone(), method
    method.process_weights_after_loading(layer)
    return layer


def converted(layer: nn.Module, weight: torch.Tensor, **options: Any) -> ConvertedLayer:
    restored = {"weight": nn.Parameter(weight.to("meta"), requires_grad=False), "bias": layer.bias}
    return ConvertedLayer("layer", layer, restored, in_place=options.get("in_place", False))


def tensors(layer: Any) -> list[torch.Tensor]:
    return [layer.weight.clone(), layer.scale.clone(), layer.row_sums.clone(), layer.bias.clone()]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_takes_the_conversion_of_new_weights_when_they_are_committed(in_place):
    first, second = torch.randn(2, 6, 4)
    layer, expected = layer_of(first, Method()), layer_of(second, Method())
    expected.bias = layer.bias
    address, weight = layer.weight.data_ptr(), layer.weight
    shadow = converted(layer, first, in_place=in_place)
    loaded = first.clone()
    shadow.convert({"weight": loaded})
    assert shadow.is_loaded()
    before = tensors(layer)
    loaded.copy_(second)
    shadow.convert({"weight": loaded})
    loaded.zero_()  # other layers use the same memory
    assert not shadow.is_loaded()
    assert all(torch.equal(*pair) for pair in zip(tensors(layer), before, strict=True)), "not yet committed"
    shadow.commit()
    assert all(torch.equal(*pair) for pair in zip(tensors(layer), tensors(expected), strict=True))
    assert layer.weight is weight
    assert (layer.weight.data_ptr() == address) == in_place


def test_a_tensor_that_the_conversion_keeps_has_memory_of_its_own():
    class Keeps(Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.doubled = layer.weight * 2

    weight = torch.randn(3, 2)
    layer = layer_of(weight, Keeps())
    shadow = converted(layer, weight)
    loaded = torch.randn(3, 2)
    new = loaded.clone()
    shadow.convert({"weight": loaded})
    loaded.zero_()
    shadow.commit()
    assert torch.equal(layer.weight, new)
    assert torch.equal(layer.doubled, new * 2)


class OtherForm(Method):
    """Converts to another form at the second time, as vLLM does with a tensor whose memory it reuses."""

    calls = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        OtherForm.calls += 1
        if OtherForm.calls > 1:
            layer.scale = nn.Parameter(layer.scale.flatten(), requires_grad=False)


class Raises(Method):
    """Converts only once."""

    calls = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        Raises.calls += 1
        assert Raises.calls == 1, "only once"
        super().process_weights_after_loading(layer)


class Closure(Method):
    """Keeps the result in a function, as vLLM does with packed products on a CPU."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda inputs: inputs @ packed.T
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Beside(Method):
    """Keeps a part of the result in its kernel."""

    def __init__(self) -> None:
        self.kernel = SimpleNamespace(alpha=torch.zeros(1))

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        self.kernel.alpha = layer.scale.amax()


class Function(Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        packed = layer.weight.clone()
        layer.apply_packed = partial(torch.matmul, packed)


class Number(Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.scale_float = float(layer.scale.amax())


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (OtherForm, "layer.scale: .* another form"),
        (Raises, "raises AssertionError: only once"),
        (Closure, r"layer\.weight: .* outside"),
        (Beside, "layer: .* outside"),
        (Function, "layer: .* outside"),
        (Number, "a number from the weights"),
    ],
)
def test_a_layer_whose_conversion_cannot_be_repeated_is_left_to_vllm(method, reason):
    weight = torch.randn(6, 4)
    shadow = converted(layer_of(weight, method()), weight)
    with pytest.raises(Unmappable, match=reason):
        shadow.convert({"weight": weight.clone()})


def test_a_layer_is_left_to_vllm_if_nothing_converts_it_or_workers_share_it():
    weight = torch.randn(6, 4)
    with pytest.raises(Unmappable, match="cannot write that form"):
        converted(nn.Linear(4, 6), weight)
    layer = layer_of(weight, Method())
    layer.tp_size = 2
    with pytest.raises(Unmappable, match="workers can exchange data"):
        converted(layer, weight)


def test_a_conversion_leaves_the_kernel_and_the_modules_of_the_layer_alone():
    """They compute while the next tensors are made."""
    method = Beside()
    layer = layer_of(torch.randn(6, 4), method)
    layer.register_buffer("table", torch.zeros(2), persistent=False)
    alpha, new = method.kernel.alpha, torch.randn(6, 4)
    with pytest.raises(Unmappable):
        converted(layer, new).convert({"weight": new})
    assert method.kernel.alpha is alpha
    assert "table" in layer._non_persistent_buffers_set
