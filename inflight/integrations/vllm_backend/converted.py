"""Layers whose tensors vLLM converts after loading, such as quantised weights and packed experts.

vLLM converts a layer in place. For every version the same conversion runs on a copy of the layer, in the thread that
prepares the version. The copy's tensors are the next tensors of the layer.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Unmappable(Exception):
    """inflight cannot repeat what vLLM does to these weights, so that vLLM has to load them itself."""


class ConvertedLayer:
    """The current and the next tensors of a layer that vLLM converts."""

    def __init__(self, name: str, layer: nn.Module, restored: Mapping[str, torch.Tensor], *, in_place: bool):
        """restored: the parameters of the layer before the conversion; their values are not used. in_place: other
        objects refer to the memory of the current tensors. Raises Unmappable."""
        if not hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading"):
            raise Unmappable(f"{name}: vLLM converts it after loading, and inflight cannot write that form")
        if getattr(layer, "tp_size", 1) > 1:
            raise Unmappable(f"{name}: the workers exchange data when they convert it")
        self.name, self.in_place = name, in_place
        self._layer, self._restored = layer, restored
        self._live = _tensors(layer)
        self._next: dict[str, torch.Tensor] = {}
        """Without the tensors that the conversion does not change."""

    def is_loaded(self) -> bool:
        """Return True if the next tensors equal the current ones."""
        return all(torch.equal(_bytes(self._live[name]), _bytes(after)) for name, after in self._next.items())

    @torch.no_grad()
    def convert(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Make the next tensors. loaded: new values of restored parameters; the caller can overwrite them afterwards.
        Raises Unmappable if the next tensors differ from the current ones in shape, strides or dtype."""
        twin: Any = copy.copy(self._layer)
        twin._parameters, twin._buffers = dict(self._layer._parameters), dict(self._layer._buffers)
        for name in {*twin._parameters, *twin._buffers} - self._restored.keys():
            delattr(twin, name)
        for name, values in loaded.items():
            # vLLM's parameters have classes and attributes of their own.
            tensor: Any = values.detach()
            tensor.__class__, tensor.__dict__ = self._restored[name].__class__, vars(self._restored[name]).copy()
            twin._parameters.pop(name, None)
            setattr(twin, name, tensor)
        twin.__dict__.pop("_already_called_process_weights_after_loading", None)
        twin.quant_method = method = copy.copy(twin.quant_method)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None  # Experts are packed when their kernel is made.
        try:
            method.process_weights_after_loading(twin)
        except Exception as error:
            raise Unmappable(f"{self.name}: its conversion raises {type(error).__name__}: {error}") from error
        made = _tensors(twin)
        memory = {tensor.untyped_storage().data_ptr() for tensor in loaded.values()}
        for name, live in self._live.items():
            after = made.get(name)
            if after is live:
                continue
            if after is None or _form(after) != _form(live):
                raise Unmappable(f"{self.name}.{name}: vLLM converts it to another form at the second time")
            self._next[name] = after.clone() if after.untyped_storage().data_ptr() in memory else after

    def commit(self) -> None:
        """Replace the current tensors by the next ones. On a GPU the copies are queued on the current stream."""
        for name, after in self._next.items():
            live = self._live[name]
            if self.in_place or live.is_cuda:
                live.data.copy_(after)
            else:
                live.data, self._next[name] = after.data, live.data


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that a layer itself holds, by name."""
    held = {**vars(layer), **layer._buffers, **layer._parameters}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
