"""Products of fused layers over the slot's own weights, and how parts of a module are found.

T tokens, K input size, N output size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from inflight_kernels import linear
from torch import nn

from inflight.engine.model.adapters import Lora, merged_lora

Block = Callable[[torch.Tensor], torch.Tensor]
"""Maps [T, K] to [T, N]."""


class UnknownPartError(Exception):
    """Some part of a model is not of a known kind. The message names it."""


@dataclass(frozen=True, slots=True)
class Product:
    """One product, with the adapters of its layers."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: Lora | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, self.bias)
        if self.lora is not None:
            self.lora.add(y, x)
        return y


def product_of(*modules: nn.Linear) -> Product:
    """Return one product over weights that are adjacent in the slot. Raises UnknownPartError."""
    for module in modules:
        if type(module) is not nn.Linear:
            raise UnknownPartError(f"{type(module).__name__} in place of a Linear")
    biases = [module.bias for module in modules if module.bias is not None]
    if biases and len(biases) < len(modules):
        raise UnknownPartError("some of the sibling projections have a bias, others not")
    weight = _cover([module.weight for module in modules])
    return Product(weight, _cover(biases) if biases else None, merged_lora(modules))


def part_of(module: nn.Module, name: str, kind: type = nn.Module) -> Any:
    """Return an attribute of this kind. Raises UnknownPartError."""
    part = getattr(module, name, None)
    if not isinstance(part, kind):
        raise UnknownPartError(f"{type(module).__name__} has no {name}")
    return part


def _cover(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the view [sum of rows, …] of tensors that are adjacent in memory."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            raise UnknownPartError("sibling projections are not adjacent in memory")
        end += tensor.nbytes
    shape = (sum(len(t) for t in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())
