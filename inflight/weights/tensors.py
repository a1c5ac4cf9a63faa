"""Tensors of a model that are published, their layout, and views of a slot as these tensors."""

from collections.abc import Mapping

import torch
from inflight_kernels import copy_all
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.core.errors import LayoutMismatchError
from inflight.core.layout import DTYPE_BYTES, WeightLayout
from inflight.weights.tensor_names import unwrapped
from inflight.weights.towers import towers_of

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}
"""Names of classes that hold a model as their `module`. Names suffice, so that deepspeed need not be imported."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`. Raises LayoutMismatchError for a dtype that no slot can hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise LayoutMismatchError(f"dtype {dtype} cannot be published; supported: {', '.join(DTYPE_BYTES)}")
    return name


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel, DeepSpeedEngine and torch.compile wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and any(kind.__name__ in _WRAPPERS for kind in type(model).__mro__):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_peft(model: nn.Module) -> bool:
    """Return whether a model is a PeftModel with adapters that can be switched off."""
    model = unwrap(model)
    return hasattr(model, "peft_config") and hasattr(model, "base_model") and hasattr(model, "disable_adapter")


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers under the model's own names, in the model's order, tied tensors once.
    Wrappers of its modules are not part of the names, unless two tensors would get one name. Towers of a multimodal
    model are not published."""
    model = unwrap(model)
    persistent, towers = set(map(unwrapped, model.state_dict(keep_vars=True))), towers_of(model)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update({name: buffer for name, buffer in model.named_buffers() if unwrapped(name) in persistent})
    tensors = {name: tensor for name, tensor in tensors.items() if name not in towers}
    plain_names = {unwrapped(name): tensor for name, tensor in tensors.items()}
    return plain_names if len(plain_names) == len(tensors) else tensors


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor of a single rank, as FSDP2 makes it, as a plain tensor over the same memory; and any other
    tensor. FSDP2 can replace that memory, so callers do not keep the plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout_of(model: nn.Module | Mapping[str, torch.Tensor]) -> WeightLayout:
    """Return the layout of a slot for a model, or for its published tensors, in its own dtypes.

    ZeRO-3 leaves a tensor empty and keeps its shape as `ds_shape`.
    """
    tensors = published_tensors(model) if isinstance(model, nn.Module) else model
    return WeightLayout.build(
        (name, tuple(getattr(t, "ds_shape", t.shape)), dtype_name(t.dtype)) for name, t in tensors.items()
    )


def slot_views(buffer_bytes: torch.Tensor, layout: WeightLayout) -> dict[str, torch.Tensor]:
    """View a slot (u8[total_bytes]) as the tensors of its layout. Nothing is copied."""
    return {
        spec.name: buffer_bytes[spec.offset : spec.offset + spec.nbytes]
        .view(getattr(torch, spec.dtype))
        .view(spec.shape)
        for spec in layout.tensors
    }


@torch.no_grad()
def fill(views: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor into its view, cast to the view's dtype."""
    near: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, view in views.items():
        tensor = plain(tensors[name]).detach()
        if tensor.is_cuda and not view.is_cuda:
            view.copy_(tensor.to(view.dtype))  # PyTorch would copy first, and cast on the host.
        else:
            near.append((view, tensor))
    copy_all([view for view, _ in near], [tensor for _, tensor in near])
