"""Models that PEFT has put adapters on (LoRA): only the adapters travel, or weights with the adapters merged in.

A PEFT model is told by its attributes, so that PEFT need not be installed. What is published of an adapter is A and
α / r · B, cast to the engine's dtype; projections that it leaves alone, and ranks that it does not have, are zero.
"""

from collections.abc import Mapping
from typing import Any

import torch
from inflight_kernels import ScaledCopies, copy_all
from torch import nn

from inflight.core.errors import LayoutMismatchError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.weights.sources import ModelSource, Offer
from inflight.weights.tensors import dtype_name, published_tensors, unwrap


def is_peft(model: nn.Module) -> bool:
    """Return whether a model carries adapters of PEFT."""
    model = unwrap(model)
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


class _Part:
    """An adapter on one projection: A [r, K], B [N, r] and α / r."""

    def __init__(self, name: str, module: Any, adapter: str):
        self.name = name
        self.a: torch.Tensor = module.lora_A[adapter].weight
        self.b: torch.Tensor = module.lora_B[adapter].weight
        self._scaling, self._adapter = module.scaling, adapter

    @property
    def scale(self) -> float:
        return self._scaling[self._adapter]


class PeftSource(ModelSource):
    """Publishes adapters to engines that hold adapters; to others the weights with the active adapters merged in."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._base: nn.Module = unwrap(model).base_model.model  # pyright: ignore
        self._parts: list[_Part] = []
        self._copies: dict[int, ScaledCopies] = {}
        """Maps the slot that they go to, by the id of its first view, to the copies."""
        self._unused: list[str] = []
        """Tensors of the engine's adapters that this model has none for."""
        for name, module in self._base.named_modules():
            if _adapters_of(module):
                _check(name, module)

    def offer(self, welcome: Welcome) -> Offer:
        """Raise LayoutMismatchError, naming it, for an adapter that does not fit those of the engine."""
        if welcome.adapter_layout is None:
            tensors = self._merged_names()
            return Offer(WeightLayout.build((n, tuple(t.shape), dtype_name(t.dtype)) for n, t in tensors.items()))
        return self.offer_to(welcome.adapter_layout)

    def offer_to(self, adapter_layout: WeightLayout) -> Offer:
        """Offer adapters for slots of this layout. Raises as `offer` does."""
        shapes = {spec.name: spec.shape for spec in adapter_layout.tensors}
        self._parts = [
            _Part(f"{adapter}.{name}", module, adapter)
            for name, module in self._base.named_modules()
            for adapter in _adapters_of(module)
        ]
        for part in self._parts:
            expected = shapes.pop(f"{part.name}.lora_A", None), shapes.pop(f"{part.name}.lora_B", None)
            if None in expected:
                raise LayoutMismatchError(
                    f"the engine has no adapter {part.name}; it was launched with adapters for "
                    f"{', '.join(sorted({spec.name.split('.')[0] for spec in adapter_layout.tensors}))} on projections "
                    "of attention and MLP"
                )
            (rank, inputs), (outputs, _) = expected  # pyright: ignore
            if len(part.a) > rank or (part.a.shape[1], len(part.b)) != (inputs, outputs):
                raise LayoutMismatchError(
                    f"adapter {part.name} has rank {len(part.a)} and takes {part.a.shape[1]} to {len(part.b)}; in "
                    f"the engine it has rank {rank} and takes {inputs} to {outputs}; launch with "
                    f"lora_rank={len(part.a)} or more"
                )
        self._unused = list(shapes)
        return Offer(adapter_layout, adapters=True)

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        name, view = next(iter(views.items()))
        if not name.endswith((".lora_A", ".lora_B")):
            self._fill_merged(views)
            return
        if id(view) not in self._copies:  # a walk over the model takes longer than the copy
            self._copies[id(view)] = self._copies_to(views)
        self._copies[id(view)].run([factor for part in self._parts for factor in (1.0, part.scale)])

    @torch.no_grad()
    def _copies_to(self, views: Mapping[str, torch.Tensor]) -> ScaledCopies:
        """Work out what does not depend on values: which tensor goes where, and what stays zero."""
        destinations, sources = [], []
        for part in self._parts:
            view_a, view_b, rank = views[f"{part.name}.lora_A"], views[f"{part.name}.lora_B"], len(part.a)
            view_a[rank:].zero_()
            view_b[:, rank:].zero_()
            destinations += [view_a[:rank], view_b[:, :rank]]
            sources += [part.a, part.b]
        for name in self._unused:
            views[name].zero_()
        return ScaledCopies(destinations, sources)

    @torch.no_grad()
    def _fill_merged(self, views: Mapping[str, torch.Tensor]) -> None:
        plain = {name: tensor.detach() for name, tensor in self._merged_names().items()}
        for name, module in self._base.named_modules():
            adapters = [_Part(name, module, adapter) for adapter in _unmerged(module)]
            if adapters:  # one at a time, as all of them in fp32 would take twice the memory of the model
                merged = plain.pop(f"{name}.weight").float()
                for part in adapters:
                    merged = merged + part.scale * (part.b.float() @ part.a.float())
                views[f"{name}.weight"].copy_(merged)
        copy_all([views[name] for name in plain], list(plain.values()))

    def _merged_names(self) -> dict[str, torch.Tensor]:
        """Return the model's own tensors under its own names."""
        tensors = published_tensors(self._base)
        return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}


def _adapters_of(module: nn.Module) -> list[str]:
    return list(getattr(module, "lora_A", ()))


def _unmerged(module: Any) -> list[str]:
    """Return the active adapters that are not merged into the weight yet."""
    names = _adapters_of(module)
    return [name for name in names if name in module.active_adapters and name not in module.merged_adapters]


def _check(name: str, module: Any) -> None:
    """Check an adapted module. Raises LayoutMismatchError for what is more than A and B beside a linear layer."""
    more = [kind for kind in ("lora_embedding_A", "lora_magnitude_vector") if len(getattr(module, kind, ()))]
    more += ["bias of lora_B"] if any(module.lora_B[a].bias is not None for a in module.lora_B) else []
    if more:
        raise LayoutMismatchError(f"{name} has {', '.join(more)}; what can be published is plain LoRA")
