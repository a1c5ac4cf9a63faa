"""PEFT layers: their tensors of the base model, unmerged or with the adapters merged.

PEFT itself merges, in a copy of one layer at a time, so that each mergeable method is published as PEFT computes it.
First, random inputs check that the merged copy has the outputs of the adapted layer.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from inflight.core.errors import LayoutMismatchError
from inflight.weights.tensors import unwrap

_NOISE = 0.05
"""Noise that the check of a merge adds to an adapter, since a new adapter is zero."""
_MOST_ERROR = 1e-3
"""Largest difference between adapted and merged outputs in fp32, relative to the largest output."""


def is_of_peft(module: nn.Module) -> bool:
    """Return whether PEFT defines the class of a module."""
    return type(module).__module__.partition(".")[0] == "peft"


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel."""
    from peft import PeftMixedModel, PeftModel

    model = unwrap(model)
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model.base_model.model if isinstance(model, PeftMixedModel) else model


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a layer with adapters around a layer of the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def holders(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that holds tensors of the base model, with its name there. An adapted layer is one module.

    For `modules_to_save` it yields the active copy. Raises LayoutMismatchError for other parts of PEFT.
    """
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
        yield from holders(module.modules_to_save[active[0]] if active else module.original_module, name)
    elif isinstance(module, TrainableTokensWrapper):
        yield from holders(module.token_adapter, name)
    elif is_adapted(module):
        yield name, module
    elif is_of_peft(module):
        raise LayoutMismatchError(
            f"{name or 'the model'} is a {type(module).__name__} of PEFT, and computes with more than the weights of "
            "the base model; an engine cannot compute it: train LoRA, or a method that PEFT can merge into the weights"
        )
    else:
        yield name, module
        for child_name, child in module.named_children():
            yield from holders(child, f"{name}.{child_name}" if name else child_name)


def refuse_copies(name: str, module: nn.Module) -> None:
    """Raise LayoutMismatchError, naming it, for a module that PEFT trains as a copy."""
    from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper

    if isinstance(module, AuxiliaryTrainingWrapper):
        option = "trainable_token_indices" if isinstance(module, TrainableTokensWrapper) else "modules_to_save"
        raise LayoutMismatchError(
            f"{name} is trained next to the adapters ({option}), and would not be published: an engine with lora_rank "
            "takes A and B of plain LoRA alone; leave it out, or launch the engine without lora_rank to publish "
            "whole weights"
        )


def own_tensors(holder: nn.Module) -> dict[str, torch.Tensor]:
    """Return the unmerged base tensors of a module from `holders`, by their names in the module."""
    if is_adapted(holder):
        return _tensors(holder.get_base_layer(), recurse=True)  # pyright: ignore
    return _tensors(holder, recurse=False)


def base_parts(base: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name and value of each base tensor, and True if a layer with adapters holds it. A tied tensor has all
    of its names."""
    for name, holder in holders(base):
        for key, tensor in own_tensors(holder).items():
            yield f"{name}.{key}" if name else key, tensor, is_adapted(holder)


def unmerged(layer: Any) -> list[str]:
    """Return the active adapters of a layer that are not merged yet."""
    names = layer._get_available_adapters()
    return [name for name in layer.active_adapters if name in names and name not in layer.merged_adapters]


@torch.no_grad()
def merged_tensors(layer: nn.Module, adapters: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return a layer's base tensors with these adapters merged, at least in fp32. The layer is unchanged."""
    return _tensors(_merge(_copy(layer), adapters), recurse=True)


@torch.no_grad()
def check_merge(name: str, layer: nn.Module, adapters: Sequence[str]) -> None:
    """Raise LayoutMismatchError, naming the layer, unless the merged layer has the outputs of these adapters."""
    what = f"{name} has adapters ({type(layer).__name__} of {type(layer).__module__})"
    advice = "launch the engine with lora_rank for plain LoRA, or train adapters that PEFT can merge into the weights"
    try:
        probe: Any = _copy(layer).eval()
        base, generator = probe.get_base_layer(), torch.Generator().manual_seed(0)
        frozen = {id(parameter) for parameter in base.parameters()}
        for parameter in probe.parameters():
            if id(parameter) not in frozen and parameter.is_floating_point():
                parameter += _NOISE * torch.randn(parameter.shape, generator=generator).to(parameter)
        inputs = _inputs(base, generator)
        expected = probe(inputs)
        difference = (_merge(probe, adapters)(inputs) - expected).abs().max() / expected.abs().max()
    except Exception as error:  # PEFT's exceptions for layers that it cannot merge, or for other inputs
        reason = " ".join(str(error).split())[:200]
        raise LayoutMismatchError(
            f"{what} that cannot be merged: {type(error).__name__}: {reason}; {advice}"
        ) from error
    if not difference <= _MOST_ERROR:
        raise LayoutMismatchError(
            f"{what} whose merged weights compute something else (by {difference:.1e} of the output); {advice}"
        )


def _tensors(module: nn.Module, *, recurse: bool) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=recurse, remove_duplicate=False))
    modules = module.named_modules() if recurse else [("", module)]
    for prefix, each in modules:
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def _copy(layer: Any) -> Any:
    memo = {id(kept): kept for kept in (getattr(layer, "kwargs", None),) if kept is not None}  # can hold other layers
    return copy.deepcopy(layer, memo)._apply(lambda t: t.float() if t.is_floating_point() and t.itemsize < 4 else t)


def _merge(layer: Any, adapters: Sequence[str]) -> nn.Module:
    layer.merge(adapter_names=list(adapters))
    return layer.get_base_layer()


def _inputs(base: nn.Module, generator: torch.Generator) -> torch.Tensor:
    weight: Any = getattr(base, "weight", None)
    if weight is None:
        raise TypeError(f"{type(base).__name__} has no single weight")
    if isinstance(base, nn.Embedding):
        return torch.arange(len(weight), device=weight.device)[None]
    width = len(weight) if type(base).__name__ == "Conv1D" else weight.shape[-1]  # of Transformers: [inputs, outputs]
    return torch.randn(2, 8, width, generator=generator).to(weight)
