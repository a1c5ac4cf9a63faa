"""Between a model and its layout: which tensors a model publishes, and views of a slot as those tensors."""

from collections.abc import Mapping

import torch
from inflight_kernels import copy_all
from torch import nn

from inflight.core.errors import LayoutMismatchError
from inflight.core.layout import DTYPE_BYTES, WeightLayout
from inflight.weights.pace import Pace

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}
"""Classes that hold a model as their `module`, told by name, so that deepspeed need not be imported."""


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


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers under the model's own names, in the model's order, tied tensors once."""
    model = unwrap(model)
    persistent = model.state_dict(keep_vars=True)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return tensors


def layout_of(model: nn.Module) -> WeightLayout:
    """Return the layout of a slot for this model in its own dtypes. What ZeRO-3 spreads is empty: `ds_shape` tells."""
    tensors = published_tensors(model)
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
def fill(views: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], pace: Pace | None = None) -> None:
    """Copy every tensor into its view, cast to the view's dtype; with a pace in pieces, which are waited for."""
    copy = copy_all if pace is None else pace.copy
    copy(list(views.values()), [tensors[name].detach() for name in views])
