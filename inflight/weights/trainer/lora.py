"""Models with PEFT adapters. An engine with adapter slots gets plain LoRA alone; another engine gets merged weights.

Every part of the model is published, or refused by name: at the start, and at a later `publish()` if the model has
changed. A base that changes in place is noticed by the counter of writes in PyTorch's tensors (`_version`). Writes
through `.data` are not counted, and stay invisible. An adapter is published as A and α / r · B, cast to the engine's
dtype, with zeros for projections without an adapter and for unused ranks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from inflight_kernels import ScaledCopies
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.core.errors import LayoutMismatchError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.core.text import listed
from inflight.weights.comparison import EngineWeights
from inflight.weights.tensor_names import EngineNames
from inflight.weights.tensors import fill, layout_of
from inflight.weights.towers import towers_of
from inflight.weights.trainer import peft_layers
from inflight.weights.trainer.sources import ModelSource, PublishedModel, same_objects


@dataclass(frozen=True, slots=True)
class _LoraPair:
    """A LoRA adapter on one projection: A [r, K] and B [N, r]. The layer has α / r."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    layer: Any
    adapter: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """Destinations of a model's tensors. A plan is valid while the modules and parameters stay the same."""

    parts: list[_LoraPair] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Tensors of the engine's adapters without a counterpart in this model."""
    copies: dict[tuple[int, ...], tuple[list[_LoraPair], ScaledCopies]] = field(default_factory=dict)
    """Maps views of a slot, by their ids, to the adapters in them and the copies into them."""
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    """Unadapted tensors of the base model."""
    merged: list[tuple[nn.Module, tuple[str, ...], dict[str, str]]] = field(default_factory=list)
    """Layers, their adapters to merge, and the published names of their tensors by the names in the layer."""
    outside: dict[str, torch.Tensor] = field(default_factory=dict)
    """Base tensors outside the layers with adapters, if adapters alone are published."""
    inside: dict[str, torch.Tensor] = field(default_factory=dict)
    """Base tensors of the layers with adapters. A merge changes them without a counted write; unmerging leaves rounding
    errors."""


class PeftSource(ModelSource):
    """Publishes LoRA adapters to engines with adapter slots, and weights with the active adapters merged to others.

    Raises LayoutMismatchError, naming the part, if a part of the model would not be published.
    """

    def __init__(self, model: PublishedModel):
        super().__init__(model)
        self._root = model.root
        self._base = peft_layers.base_of(model.root)
        self._names = EngineNames()
        self._seen: tuple[list[object], list[object]] = [], []
        """The state of the model (`_state`) when the plan was made."""
        self._plan = _Plan()
        self._layout: WeightLayout | None = None
        """The engine's layout of adapters; None if the adapters are merged."""
        self._engine: EngineWeights | None = None
        """The weights of the last engine with the base of the adapters, if they are compared."""
        self._merged_once = False
        """An adapter is or was merged into the base."""
        self._checked: tuple[list[object], list[int], list[int]] = [], [], []
        """The base that was last compared: modules and parameters, and the write counts of `outside` and `inside`."""

    def offer(self, welcome: Welcome) -> WeightLayout:
        self._names = EngineNames(spec.name for spec in welcome.layout.tensors)
        self.plan(welcome.adapter_layout)
        if welcome.adapter_layout is not None:
            return welcome.adapter_layout
        offered = dict(self._plan.plain)
        for layer, _, names in self._plan.merged:
            own = peft_layers.own_tensors(layer)
            offered |= {whole: own[key] for key, whole in names.items()}
        offer = layout_of(offered)
        known = {spec.name for spec in welcome.layout.tensors}
        apart = [name for spec in offer.tensors if (name := spec.name) not in known]
        if apart and getattr(getattr(self._base, "config", None), "tie_word_embeddings", False):
            raise LayoutMismatchError(
                f"{apart[0]} is the same tensor as the embedding in the engine (tied weights), but the adapters make "
                "them differ; leave both out of the adapters, or launch the engine from a checkpoint with "
                "tie_word_embeddings=false that holds both"
            )
        return offer

    def compare(self, engine: EngineWeights) -> bool | None:
        """Raise LayoutMismatchError, naming tensors, if the engine's weights are not the base of adapters alone."""
        if self._layout is None:
            return engine.begin_as(chain(self._plan.plain.items(), self._merged()))
        objects, _, inside = self._checked
        unwritten = same_objects(objects, self._seen[0]) and inside == _writes(self._plan.inside)
        self._check_base(engine, earlier=self._engine if unwritten or self._merged_once else None)
        self._engine = engine
        return None  # Adapters are not compared.

    def prepare(self) -> None:
        """Plan again if the model has changed. Raises as `offer` and `compare` do."""
        objects, values = _state(self._root)
        if values != self._seen[1] or not same_objects(self._seen[0], objects):
            self.plan(self._layout)
        if self._engine is None:
            return
        objects, outside, inside = self._checked
        if not same_objects(objects, self._seen[0]) or outside != _writes(self._plan.outside):
            self._check_base(self._engine, merged_once=self._merged_once)
        elif not self._merged_once and inside != _writes(self._plan.inside):
            self._check_base(self._engine)

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        plan = self._plan
        if self._layout is None:
            for name, tensor in self._merged():
                views[name].copy_(tensor.detach())
            fill({name: views[name] for name in plan.plain}, plan.plain)
            return
        key = tuple(map(id, views.values()))
        if key not in plan.copies:  # Walking over the model takes longer than the copy.
            plan.copies[key] = _copies_to(views, plan)
        parts, copies = plan.copies[key]
        copies.run([factor for part in parts for factor in (1.0, part.layer.scaling[part.adapter])])

    def adapters_changed_by(self, optimizer: torch.optim.Optimizer) -> Collection[str]:
        groups = optimizer.param_groups
        changed = {id(parameter) for group in groups for parameter in group["params"] if parameter.grad is not None}
        return {part.adapter for part in self._plan.parts if id(part.a) in changed or id(part.b) in changed}

    def plan(self, adapter_layout: WeightLayout | None) -> None:
        """Plan the copies into adapter slots of this layout, or of merged weights. Raises LayoutMismatchError."""
        state = _state(self._root)
        if any(isinstance(parameter, DTensor) for parameter in self._root.parameters()):  # on one rank, too
            raise LayoutMismatchError(
                "adapters on a model of DTensors cannot be published; leave fully_shard out on one rank"
            )
        plan = self._merge_plan() if adapter_layout is None else self._adapter_plan(adapter_layout)
        self._layout, self._plan, self._seen = adapter_layout, plan, state
        self.adapters = adapter_layout is not None

    def _adapter_plan(self, layout: WeightLayout) -> _Plan:
        parts: list[_LoraPair] = []
        outside, inside = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        towers = towers_of(self._base)  # Text does not use adapters in towers either.
        for name, module in self._base.named_modules():
            if name in towers:
                continue
            peft_layers.refuse_copies(name, module)
            if peft_layers.is_adapted(module):
                parts += _lora_parts(self._names(f"{name}.weight").removesuffix(".weight"), module)
                self._merged_once = self._merged_once or bool(getattr(module, "merged_adapters", None))
        for name, tensor, adapted in peft_layers.base_parts(self._base):
            if name in towers:
                continue
            (inside if adapted else outside)[self._names(name)] = tensor
        fine = {id(tensor) for part in parts for tensor in (part.a, part.b)}
        fine |= {id(t) for t in (*outside.values(), *inside.values()) if not t.requires_grad}
        fine |= {id(parameter) for name, parameter in self._base.named_parameters() if name in towers}
        lost = [name for name, parameter in self._root.named_parameters() if id(parameter) not in fine]
        if lost:
            raise LayoutMismatchError(
                f"{_named(lost)} would not be published: an engine with lora_rank takes A and B of plain LoRA alone; "
                "leave them out or freeze them, or launch the engine without lora_rank to publish whole weights"
            )
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        for part in parts:
            expected = shapes.pop(f"{part.name}.lora_A", None), shapes.pop(f"{part.name}.lora_B", None)
            if None in expected:
                names = sorted({one.name.split(".")[0] for one in parts})
                raise LayoutMismatchError(
                    f"the engine has no adapter {part.name}; it was launched with adapters for "
                    f"{', '.join(sorted({spec.name.split('.')[0] for spec in layout.tensors}))} on projections "
                    f"of attention and MLP; leave others out, launch it with adapters={names}, or launch it "
                    "without lora_rank to publish whole weights"
                )
            (rank, inputs), (outputs, _) = expected  # pyright: ignore
            if len(part.a) > rank or (part.a.shape[1], len(part.b)) != (inputs, outputs):
                raise LayoutMismatchError(
                    f"adapter {part.name} has rank {len(part.a)} and takes {part.a.shape[1]} to {len(part.b)}; in "
                    f"the engine it has rank {rank} and takes {inputs} to {outputs}; launch with "
                    f"lora_rank={len(part.a)} or more"
                )
        return _Plan(parts=parts, unused=list(shapes), outside=outside, inside=inside)

    def _check_base(
        self, engine: EngineWeights, *, merged_once: bool = False, earlier: EngineWeights | None = None
    ) -> None:
        """Raise LayoutMismatchError, naming tensors, if the base differs. merged_once: the tensors of layers with
        adapters can differ. earlier: they can differ from the engine's if this engine, which had the same base, has the
        same ones."""
        plan = self._plan
        writes = _writes(plan.outside), _writes(plan.inside)
        differences = engine.differences({**plan.outside, **plan.inside}.items())
        if merged_once:
            differences = [name for name in differences if name not in plan.inside]
        if earlier is not None:
            differences = [name for name in differences if name not in plan.inside or not engine.agrees(earlier, name)]
        if not differences:
            self._checked = self._seen[0], *writes
            return
        configs: Mapping[str, Any] = getattr(self._root, "peft_config", None) or {}
        inits = {str(getattr(config, "init_lora_weights", None)) for config in configs.values()}
        changing = [init for init in sorted(inits) if init.lower() not in KEEP_THE_BASE]
        merged = any(getattr(module, "merged_adapters", None) for module in self._base.modules())
        reason = (
            "adapters are merged into it; unmerge_adapter() first"
            if merged
            else f"init_lora_weights={changing[0]!r} changes it; take another initialization, or publish the changed "
            "base first, or launch the engine without lora_rank to publish whole weights"
            if changing
            else "launch the engine from the checkpoint of the trainer, or publish the base first"
        )
        raise LayoutMismatchError(
            f"the base of the adapters differs from the engine's weights ({_named(differences)}): {reason}"
        )

    def _merge_plan(self) -> _Plan:
        inside = {id(parameter) for parameter in self._base.parameters()}
        lost = [name for name, parameter in self._root.named_parameters() if id(parameter) not in inside]
        if lost:
            raise LayoutMismatchError(
                f"{_named(lost)} would not be published, being no weights of the base model; train LoRA, or a method "
                "that PEFT can merge into the weights"
            )
        plan, of_tensor, towers = _Plan(), dict[int, nn.Module](), towers_of(self._base)
        for name, holder in peft_layers.holders(self._base):
            if name in towers:
                continue
            adapters = ()
            if peft_layers.is_adapted(holder):
                _check_enabled(name, holder)
                adapters = tuple(peft_layers.unmerged(holder))
            if adapters:
                peft_layers.check_merge(name, holder, adapters)
            names: dict[str, str] = {}
            own = peft_layers.own_tensors(holder)
            for key, tensor in own.items():
                tied = of_tensor.setdefault(id(tensor), holder)
                if tied is holder or not _computes_alike(tied, holder):
                    names[key] = self._names(f"{name}.{key}" if name else key)
            if adapters:
                plan.merged.append((holder, adapters, names))
            else:
                plan.plain.update({whole: own[key] for key, whole in names.items()})
        return plan

    def _merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield merged tensors layer by layer. All of them in fp32 would take twice the memory of the model."""
        for layer, adapters, names in self._plan.merged:
            merged = peft_layers.merged_tensors(layer, adapters)
            yield from ((whole, merged[key]) for key, whole in names.items())


KEEP_THE_BASE = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"}
"""Values of PEFT's `init_lora_weights`, in lower case, that leave the weights of the base model as they are."""


def _lora_parts(name: str, layer: Any) -> list[_LoraPair]:
    """Return the adapters of a layer. Raises LayoutMismatchError, naming it, for anything but A and B on a linear
    layer."""
    from peft.tuners.lora.layer import Linear

    _check_enabled(name, layer)
    adapters = sorted(layer._get_available_adapters())
    odd = "" if type(layer) is Linear else f"{type(layer).__name__} of {type(layer).__module__}"
    for adapter in adapters if not odd else ():
        variant = layer.lora_variant.get(adapter)
        odd = odd or (f"{type(variant).__name__.removesuffix('Variant')}" if variant is not None else "")
        odd = odd or ("a bias of lora_B" if layer.lora_B[adapter].bias is not None else "")
    is_linear = isinstance(layer.base_layer, nn.Linear) and layer.base_layer.weight.is_floating_point()
    odd = odd or (f"a base of another kind ({type(layer.base_layer).__name__})" if not is_linear else "")
    odd = odd or ("no values yet (it is on the meta device)" if any(p.is_meta for p in layer.parameters()) else "")
    active = [adapter for adapter in layer.active_adapters if adapter in adapters]
    if odd:
        raise LayoutMismatchError(
            f"{name} has {odd}; an engine with lora_rank takes plain LoRA on linear layers alone: launch it without "
            "lora_rank to publish the weights with the adapters merged in"
        )
    if len(active) > 1:
        raise LayoutMismatchError(
            f"{name} computes with {len(active)} adapters at once ({', '.join(active)}); a request draws with one: "
            "set_adapter() activates one, add_weighted_adapter() makes one of several"
        )
    a: Any = layer.lora_A
    b: Any = layer.lora_B
    return [
        _LoraPair(f"{adapter}.{name}", a[adapter].weight, b[adapter].weight, layer, adapter) for adapter in adapters
    ]


def _check_enabled(name: str, layer: Any) -> None:
    if layer.disable_adapters:
        raise LayoutMismatchError(
            f"the adapters of {name} are disabled; publish outside of disable_adapter(), or call "
            "enable_adapter_layers() first"
        )


def _computes_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two holders of one tensor compute with the same values: both without or both with one adapter."""
    if not (peft_layers.is_adapted(one) or peft_layers.is_adapted(other)):
        return True
    addresses = [{p.untyped_storage().data_ptr() for p in holder.parameters()} for holder in (one, other)]
    return addresses[0] == addresses[1] and getattr(one, "scaling", None) == getattr(other, "scaling", None)


@torch.no_grad()
def _copies_to(views: Mapping[str, torch.Tensor], plan: _Plan) -> tuple[list[_LoraPair], ScaledCopies]:
    """Return the adapters of a plan that have views, and their copies. Set the rest of the views to zero."""
    destinations, sources = [], []
    parts = [part for part in plan.parts if f"{part.name}.lora_A" in views]
    for part in parts:
        view_a, view_b, rank = views[f"{part.name}.lora_A"], views[f"{part.name}.lora_B"], len(part.a)
        view_a[rank:].zero_()
        view_b[:, rank:].zero_()
        destinations += [view_a[:rank], view_b[:, :rank]]
        sources += [part.a, part.b]
    for name in views.keys() & set(plan.unused):
        views[name].zero_()
    return parts, ScaledCopies(destinations, sources)


def _state(root: nn.Module) -> tuple[list[object], list[object]]:
    """Return the inputs of a plan: modules and parameters, compared by identity, and values, compared by equality.
    `nn.Module.modules()` would take several times as long."""
    objects: list[object] = []
    values: list[object] = []
    stack: list[nn.Module] = [root]
    while stack:
        module = stack.pop()
        objects.append(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                objects.append(parameter)
                values += (parameter.requires_grad, parameter.shape)
        own = module.__dict__
        if "_active_adapter" in own:
            values += (str(own["_active_adapter"]), own.get("_disable_adapters"), tuple(own.get("merged_adapters", ())))
        stack += [child for child in module._modules.values() if child is not None]
    return objects, values


def _writes(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the number of writes to each tensor, as autograd counts them. Tensors of inference mode have no count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def _named(names: Sequence[str]) -> str:
    return listed([name.removeprefix("base_model.model.") for name in names])
