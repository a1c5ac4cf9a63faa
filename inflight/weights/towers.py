"""Parts of a multimodal model that text does not run through: towers for images and sound, and their projectors.

They are next to the text decoder: if the decoder is `model.language_model`, they are the other children of `model`. An
engine draws text alone. It drops these parts, so that a forward pass that needs one fails at load, and trainers do not
publish them.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Towers:
    """Names of the modules of a model that text does not run through."""

    names: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        """Return whether a module or a tensor is part of a tower."""
        return any(name == tower or name.startswith(f"{tower}.") for tower in self.names)


def towers_of(model: nn.Module) -> Towers:
    """Return the towers of a multimodal Transformers model without wrappers. Other models have none."""
    config: Any = getattr(model, "config", None)
    get_decoder: Any = getattr(model, "get_decoder", None)
    if get_decoder is None or getattr(config, "text_config", None) is None:
        return Towers()
    decoder, heads = get_decoder(), [model.get_output_embeddings(), model.get_input_embeddings()]  # pyright: ignore
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    parents = path.split(".")[:-1]
    towers: list[str] = []
    for depth in range(len(parents) + 1 if path else 0):
        prefix = ".".join(parents[:depth])
        for child, module in model.get_submodule(prefix).named_children():
            name = f"{prefix}.{child}" if prefix else child
            if not f"{path}.".startswith(f"{name}.") and not any(module is head for head in heads):
                towers.append(name)
    return Towers(tuple(towers))


def drop_towers(model: nn.Module) -> None:
    """Replace the towers of a model by modules without weights. Text runs as before."""
    weight = next(model.parameters())
    for name in towers_of(model).names:
        absent: Any = nn.Module()
        absent.device, absent.dtype = weight.device, weight.dtype  # Some models read them before they look for images.
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, absent)
