"""Layers whose tensors vLLM converts after loading, such as quantised weights and packed experts.

vLLM converts a layer in place. For every version the same conversion runs on a copy of the layer, in the thread that
prepares the version. The copy's tensors are the next tensors of the layer.
"""

import copy
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_DEPTH = 8
"""How deep tensors are searched in the objects that a conversion leaves."""


class Unmappable(Exception):
    """inflight cannot repeat what vLLM does to these weights, so that vLLM has to load them itself."""


class ConvertedLayer:
    """The current and the next tensors of a layer that vLLM converts."""

    def __init__(self, name: str, layer: nn.Module, restored: Mapping[str, torch.Tensor], *, in_place: bool):
        """restored: the parameters of the layer before the conversion; their values are not used. in_place: other
        objects refer to the memory of the current tensors. Raises Unmappable."""
        if not hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading"):
            raise Unmappable(f"{name}: vLLM converts it after loading, and inflight cannot write that form")
        if max(getattr(part, "tp_size", 1) for part in (layer, getattr(layer, "moe_config", None))) > 1:
            raise Unmappable(f"{name}: the workers can exchange data when they convert it")
        self.name, self.in_place = name, in_place
        self._layer, self._restored = layer, restored
        self._live = _tensors(layer)
        self._next: dict[str, torch.Tensor] = {}
        """Without the tensors that the conversion does not change."""

    def is_loaded(self) -> bool:
        """Return True if the next tensors equal the current ones."""
        return all(torch.equal(_comparable(self._live[name]), _comparable(after)) for name, after in self._next.items())

    @torch.no_grad()
    def convert(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Make the next tensors. loaded: new values of restored parameters; the caller can overwrite them afterwards.
        Raises Unmappable if the next tensors differ from the current ones in shape, strides or dtype, and if the
        conversion leaves its result anywhere else than in tensors of the layer."""
        twin, is_first = self._twin(loaded), not self._next
        before = dict(vars(twin))
        known = _memories([vars(self._layer), self._layer.quant_method]) if is_first else set()
        try:
            twin.quant_method.process_weights_after_loading(twin)
        except Exception as error:
            raise Unmappable(f"{self.name}: its conversion raises {type(error).__name__}: {error}") from error
        made = _tensors(twin)
        for name in loaded:
            if name not in made or not made[name].numel():
                raise Unmappable(f"{self.name}.{name}: vLLM keeps the converted values outside of the layer's tensors")
        if is_first:
            changed = [value for name, value in vars(twin).items() if value is not before.get(name)]
            if any(isinstance(value, float) for value in changed):
                raise Unmappable(f"{self.name}: its conversion makes a number from the weights")
            if _memories([*changed, twin.quant_method]) - known - {_memory(tensor) for tensor in made.values()}:
                raise Unmappable(f"{self.name}: vLLM keeps converted values outside of the layer's tensors")
        scratch = {_memory(tensor) for tensor in loaded.values()}
        for name, live in self._live.items():
            after = made.get(name)
            if after is live:
                continue
            if after is None or _form(after) != _form(live):
                raise Unmappable(f"{self.name}.{name}: vLLM converts it to another form at the second time")
            self._next[name] = after.clone() if _memory(after) in scratch else after

    def commit(self) -> None:
        """Replace the current tensors by the next ones. On a GPU the copies are queued on the current stream."""
        for name, after in self._next.items():
            live = self._live[name]
            if self.in_place or live.is_cuda:
                live.data.copy_(after)
            else:
                live.data, self._next[name] = after.data, live.data

    def _twin(self, loaded: Mapping[str, torch.Tensor]) -> Any:
        """Return a copy of the layer as it was before the conversion, with these values."""
        twin: Any = copy.copy(self._layer)
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            setattr(twin, held, copy.copy(getattr(self._layer, held)))
        for name in {*twin._parameters, *twin._buffers} - self._restored.keys():
            delattr(twin, name)
        for name, values in loaded.items():
            # vLLM's parameters have special classes and attributes.
            tensor: Any = values.detach()
            tensor.__class__, tensor.__dict__ = self._restored[name].__class__, vars(self._restored[name]).copy()
            twin._parameters.pop(name, None)
            setattr(twin, name, tensor)
        twin.__dict__.pop("_already_called_process_weights_after_loading", None)
        twin.quant_method = method = copy.copy(twin.quant_method)
        for name, part in vars(method).items():  # such as its kernel
            if hasattr(part, "__dict__") and not isinstance(part, (type, nn.Module, torch.Tensor, types.FunctionType)):
                setattr(method, name, copy.copy(part))
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None  # Experts are packed when their kernel is made.
        return twin


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that a layer itself holds, by name."""
    held = {**vars(layer), **layer._buffers, **layer._parameters}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _memories(value: Any) -> set[int]:
    """Return the memory of the tensors within an object: in containers, attributes, arguments of partials and
    closures."""
    found, seen, left = set(), set(), [(value, _DEPTH)]
    while left:
        value, depth = left.pop()
        if isinstance(value, torch.Tensor):
            if value.numel():
                found.add(_memory(value))
        elif depth and id(value) not in seen and not isinstance(value, (type, str, bytes, nn.Module, types.ModuleType)):
            seen.add(id(value))
            if isinstance(value, Mapping):
                parts = list(value.values())
            elif isinstance(value, (list, tuple, set, frozenset)):
                parts = list(value)
            else:
                parts = [getattr(value, name, None) for name in ("__dict__", "__closure__", "args", "keywords")]
                parts.append(getattr(value, "cell_contents", None) if isinstance(value, types.CellType) else None)
            left += [(part, depth - 1) for part in parts]
    return found


def _memory(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
