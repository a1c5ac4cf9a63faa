"""Names of tensors: in other classes of Transformers, in wrappers, and as a tree of modules."""

import re
from collections import Counter
from collections.abc import Collection, Iterable

_DECODER = re.compile(r"^((model|language_model|text_model)\.)+")
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Causal masks in old checkpoints of GPT-2 and GPT-Neo. They were saved as buffers; no weights have these names."""


def unwrapped(name: str) -> str:
    """Remove the prefixes that DistributedDataParallel, FSDP, torch.compile, checkpointing and PEFT add to names."""
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return plain.removeprefix("base_model.model.").replace(".base_layer.", ".")


def in_decoder(name: str) -> str:
    """Remove the path of the text decoder from a tensor's name.

    Qwen3.5 and Llama 4 have a class for text and a class with towers: their decoders are `model` in one of them, and
    `model.language_model` or `language_model.model` in the other. Towers have other names (`visual`, `vision_model`).
    """
    return _DECODER.sub("", name)


class EngineNames:
    """The engine's names of tensors that other classes of Transformers name differently."""

    def __init__(self, names: Iterable[str] = ()):
        """names: the engine's. Without any, names stay."""
        self._known = frozenset(names)
        count = Counter(map(in_decoder, self._known))
        self._by_rest = {rest: name for name in self._known if count[rest := in_decoder(name)] == 1}

    def __call__(self, name: str) -> str:
        """Return the engine's name of a tensor. A name without one stays."""
        return name if name in self._known else self._by_rest.get(in_decoder(name), name)


class ModuleTree:
    """The modules of a model that hold tensors, by the names of the tensors, without the path of the decoder."""

    def __init__(self, names: Iterable[str]):
        self._children: dict[str, set[str]] = {"": set()}
        """Maps the path of a module to the names of its modules."""
        self._holders: set[str] = set()
        """Paths of modules that hold tensors themselves. The model is left out."""
        for name in names:
            *path, _ = in_decoder(name).split(".")
            for depth, part in enumerate(path):
                self._children[".".join(path[:depth])].add(part)
                self._children.setdefault(".".join(path[: depth + 1]), set())
            self._holders.add(".".join(path))
        self._holders.discard("")

    def has_place_for(self, name: str) -> bool:
        """Return whether a tensor is an adapter, or belongs to a layer or a module with tensors that the model has.
        Tensors of other parts (towers for images, value heads) do not change the model's output."""
        path, _ = self._walk(name)
        inside = path in self._holders or any(part.isdigit() for part in path.split("."))
        return "lora_" in name or (inside and not name.endswith(_MASKS))

    def beyond_the_last_layer(self, names: Collection[str]) -> list[str]:
        """Return the tensors of layers that a list of the model lacks, except layers for multi-token prediction."""
        predict = tuple({name.rpartition("eh_proj.")[0] for name in names if ".eh_proj." in name})
        walks = ((name, *self._walk(name)) for name in names if not (predict and name.startswith(predict)))
        return [name for name, path, after in walks if after.isdigit() and self._is_list(path)]

    def _is_list(self, path: str) -> bool:
        children = self._children[path]
        return bool(children) and all(child.isdigit() for child in children)

    def _walk(self, name: str) -> tuple[str, str]:
        """Return the path of the innermost module of a tensor's name, and the next part of the name. The name can lack
        the prefix of the model's body."""
        first, *_ = parts = in_decoder(name).split(".")
        path = ""
        if first not in self._children[""]:
            path = next((body for body in self._children[""] if first in self._children[body]), "")
        for part in parts[:-1]:
            if part not in self._children[path]:
                return path, part
            path = f"{path}.{part}" if path else part
        return path, parts[-1]
