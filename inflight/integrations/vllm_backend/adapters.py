"""The adapters (LoRA) of one of vLLM's workers. A publish changes them in the same way as the weights.

vLLM keeps the adapters of all requests side by side in a tensor per projection. Every adapter of the engine has one
permanent place there. The copies that vLLM makes when it takes an adapter are recorded once, as parts of published
tensors and their targets, and repeated for every version.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from inflight.integrations.vllm_backend.converted import Unmappable
from inflight.integrations.vllm_backend.shadow import Copy, NoteCopies, Parameter, Shadow, copy_of


class AdapterShadow(Shadow):
    """Shadow of the next adapters. The first adapters are zero."""

    def __init__(
        self, manager: Any, names: Sequence[str], slots: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ):
        """manager: vLLM's manager of a model whose adapters have these names. slots: u8[n] each; the numbers in the
        first slot are distinct. tensors: views of the first slot by our names. Raises Unmappable."""
        super().__init__(slots, _place(manager, names, slots[0], tensors))
        self.prepare(0)
        for parameter in self._parameters:
            assert parameter.live is not None
            if not torch.equal(parameter.live, parameter.next):
                raise Unmappable(f"{parameter.name} is not what was loaded")
            parameter.live.zero_()
            parameter.next.zero_()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Restore the modules of a model as they were before vLLM wrapped them. Their names are the names in its
    loaders."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(getattr(child, "base_layer", None), nn.Module)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def _place(
    manager: Any, names: Sequence[str], slot: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> list[Parameter]:
    """Give every adapter its place. Return vLLM's tensors of all adapters, by projection."""
    with NoteCopies(make=True) as noted, torch.no_grad():
        for number, name in enumerate(names, start=1):
            own = {k.removeprefix(f"{name}."): view for k, view in tensors.items() if k.startswith(f"{name}.")}
            manager.add_adapter(_adapter(manager, number, own))
            manager.activate_adapter(number)
    copies: dict[int, list[Copy]] = {}
    for target, source in noted.made:
        copies.setdefault(target.untyped_storage().data_ptr(), []).append(copy_of(target, source, slot))
    parameters = []
    for module_name, module in manager.modules.items():
        for live in (*module.lora_a_stacked, *module.lora_b_stacked):
            made = copies.pop(live.untyped_storage().data_ptr(), [])
            parameters.append(Parameter(f"the adapters of {module_name}", live, torch.zeros_like(live), made))
    if copies:
        raise Unmappable("an adapter goes where it is not computed with")
    return parameters


def _adapter(manager: Any, number: int, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return one adapter in vLLM's form. Its tensors are not copied, and already include α / r."""
    from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
    from vllm.lora.lora_weights import LoRALayerWeights  # pyright: ignore[reportMissingImports]
    from vllm.lora.utils import parse_fine_tuned_lora_name  # pyright: ignore[reportMissingImports]

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    if mapper is not None:  # The manager itself joins projections that are computed as one.
        mapper = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper  # the latter in vLLM 0.26
        mapper = mapper()
    layers: dict[str, Any] = {}
    rank = 0
    for name, a in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "lora_A":
            rank, b = len(a), tensors[f"{module}.lora_B"]
            its_name = parse_fine_tuned_lora_name(f"base_model.model.{module}.lora_A.weight", mapper)[0]
            layers[its_name] = LoRALayerWeights(its_name, rank, rank, a, b)
    return LoRAModel(number, rank, layers)
