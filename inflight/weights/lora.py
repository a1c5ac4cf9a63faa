"""Models that PEFT has put adapters on (LoRA): only the adapters travel, or weights with the adapters merged in.

A PEFT model is told by its attributes, so that PEFT need not be installed. What is published of an adapter is A and
α / r · B, cast to the engine's dtype; projections that it leaves alone, and ranks that it does not have, are zero.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from inflight_kernels import copy_all
from torch import nn

from inflight.core.errors import LayoutMismatchError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.weights.sources import ModelSource, Offer
from inflight.weights.tensors import dtype_name, published_tensors, unwrap


def is_peft(model: nn.Module) -> bool:
    """Whether a model carries adapters of PEFT."""
    model = unwrap(model)
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


class PeftSource(ModelSource):
    """Adapters, to engines that hold adapters; to others the weights with the active adapters merged in."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._base: nn.Module = unwrap(model).base_model.model  # pyright: ignore
        self._wants_adapters = False
        for name, module in self._base.named_modules():
            if _adapters_of(module):
                _check(name, module)

    def offer(self, welcome: Welcome) -> Offer:
        """Raises LayoutMismatchError, naming it, for an adapter that does not fit those of the engine."""
        self._wants_adapters = welcome.adapter_layout is not None
        if welcome.adapter_layout is None:
            tensors = self._merged_names()
            return Offer(WeightLayout.build((n, tuple(t.shape), dtype_name(t.dtype)) for n, t in tensors.items()))
        shapes = {spec.name: spec.shape for spec in welcome.adapter_layout.tensors}
        for name, (a, b, _) in self._parts():
            expected = shapes.get(f"{name}.lora_A"), shapes.get(f"{name}.lora_B")
            if None in expected:
                raise LayoutMismatchError(
                    f"the engine has no adapter {name}; it was launched with adapters for "
                    f"{', '.join(sorted({module.split('.')[0] for module in shapes}))} on projections of attention and "
                    "MLP"
                )
            (rank, inputs), (outputs, _) = expected  # pyright: ignore
            if len(a) > rank or (a.shape[1], len(b)) != (inputs, outputs):
                raise LayoutMismatchError(
                    f"adapter {name} has rank {len(a)} and takes {a.shape[1]} to {len(b)}; in the engine it has rank "
                    f"{rank} and takes {inputs} to {outputs}; launch with lora_rank={len(a)} or more"
                )
        return Offer(welcome.adapter_layout, adapters=True)

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        if self._wants_adapters:
            self._fill_adapters(views)
        else:
            self._fill_merged(views)

    @torch.no_grad()
    def _fill_adapters(self, views: Mapping[str, torch.Tensor]) -> None:
        parts = dict(self._parts())
        scaled = torch._foreach_mul([b.float() for _, b, _ in parts.values()], [scale for *_, scale in parts.values()])
        destinations, sources = [], []
        for (name, (a, _, _)), b in zip(parts.items(), scaled, strict=True):
            view_a, view_b, rank = views[f"{name}.lora_A"], views[f"{name}.lora_B"], len(a)
            if rank < len(view_a):
                view_a[rank:].zero_()
                view_b[:, rank:].zero_()
            destinations += [view_a[:rank], view_b[:, :rank]]
            sources += [a.detach(), b]
        copy_all(destinations, sources)
        for name, view in views.items():
            if name.rpartition(".")[0] not in parts:
                view.zero_()

    @torch.no_grad()
    def _fill_merged(self, views: Mapping[str, torch.Tensor]) -> None:
        merged = {name: tensor.detach() for name, tensor in self._merged_names().items()}
        for name, module in self._base.named_modules():
            for adapter in _unmerged(module):
                a, b, scale = _part(module, adapter)
                weight = merged[f"{name}.weight"]
                merged[f"{name}.weight"] = weight.float() + scale * (b.float() @ a.float())
        copy_all(list(views.values()), [merged[name] for name in views])

    def _parts(self) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor, float]]]:
        """("ADAPTER.MODULE", (A [r, K], B [N, r], α / r)) of every adapter on every projection."""
        for name, module in self._base.named_modules():
            for adapter in _adapters_of(module):
                yield f"{adapter}.{name}", _part(module, adapter)

    def _merged_names(self) -> dict[str, torch.Tensor]:
        """The model's own tensors under its own names."""
        tensors = published_tensors(self._base)
        return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}


def _adapters_of(module: nn.Module) -> list[str]:
    return list(getattr(module, "lora_A", ()))


def _unmerged(module: Any) -> list[str]:
    """Active adapters that are not in the weight yet."""
    names = _adapters_of(module)
    return [name for name in names if name in module.active_adapters and name not in module.merged_adapters]


def _part(module: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    return module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.scaling[adapter]


def _check(name: str, module: Any) -> None:
    """Raises LayoutMismatchError for what is more than A and B beside a linear layer."""
    more = [kind for kind in ("lora_embedding_A", "lora_magnitude_vector") if len(getattr(module, kind, ()))]
    more += ["bias of lora_B"] if any(module.lora_B[a].bias is not None for a in module.lora_B) else []
    if more:
        raise LayoutMismatchError(f"{name} has {', '.join(more)}; what can be published is plain LoRA")
