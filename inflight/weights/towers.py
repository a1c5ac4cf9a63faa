"""Parts of a multimodal model that text does not run through: towers for images and sound, and their projectors.

They are next to the text decoder: if the decoder is `model.language_model`, they are the other children of `model`. An
engine draws text alone. It drops these parts, so that a forward pass that needs one fails at load, and trainers do not
publish them.
"""

from collections.abc import Iterable
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
    heads = [model.get_output_embeddings(), model.get_input_embeddings()]  # pyright: ignore
    path = _decoder_path(model)
    parents = path.split(".")[:-1]
    towers: list[str] = []
    for depth in range(len(parents) + 1 if path else 0):
        prefix = ".".join(parents[:depth])
        for child, module in model.get_submodule(prefix).named_children():
            name = f"{prefix}.{child}" if prefix else child
            if not f"{path}.".startswith(f"{name}.") and not any(module is head for head in heads):
                towers.append(name)
    return Towers(tuple(towers))


@dataclass(frozen=True, slots=True)
class EngineNames:
    """Names in the engine of a trainer's tensors.

    Transformers has two classes for Qwen3.5 and Llama 4: one for text, and one with towers. The same decoder is `model`
    in one, and `model.language_model` or `language_model.model` in the other.
    """

    known: frozenset[str] = frozenset()
    """The engine's names. If it is empty, the names stay."""
    trainer: str = ""
    """Prefix of the decoder's names in the trainer."""
    engine: str = ""

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> "EngineNames":
        """Compare the decoder of a trainer's model without wrappers with an engine's names."""
        known, path = frozenset(names), _decoder_path(model)
        for inner, _ in model.get_submodule(path).named_parameters() if path else ():
            prefixes = {name.removesuffix(inner) for name in known if f".{name}".endswith(f".{inner}")}
            if len(prefixes) == 1:
                return cls(known, f"{path}.", prefixes.pop())
        return cls()

    def __call__(self, name: str) -> str:
        """Return the engine's name of a tensor or a module. A name without one stays."""
        if self.trainer == self.engine or name in self.known:
            return name
        if name.startswith(self.trainer):
            return self.engine + name.removeprefix(self.trainer)
        outside = [ours for ours in self.known if f".{ours}".endswith(f".{name}") or f".{name}".endswith(f".{ours}")]
        return outside[0] if len(outside) == 1 else name


def _decoder_path(model: nn.Module) -> str:
    """Return the name of a Transformers model's decoder; "" if it is the model or unknown."""
    get_decoder: Any = getattr(model, "get_decoder", None)
    decoder = None if get_decoder is None else get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def drop_towers(model: nn.Module) -> None:
    """Replace the towers of a model by modules without weights. Text runs as before."""
    weight = next(model.parameters())
    for name in towers_of(model).names:
        absent: Any = nn.Module()
        absent.device, absent.dtype = weight.device, weight.dtype  # Some models read them before they look for images.
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, absent)
