"""Adapters (LoRA) that were saved by PEFT, published from their files.

A directory holds `adapter_config.json` and `adapter_model.safetensors`. What is published of an adapter is A and
α / r · B, cast to the engine's dtype; projections that it leaves alone, and ranks that it does not have, are zero.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from inflight.core.errors import BackendError, LayoutMismatchError, WeightFileError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Digests, Welcome
from inflight.weights.engine.digests import sha256
from inflight.weights.trainer.lora import CHANGE_THE_BASE
from inflight.weights.trainer.sources import PublishedLayout, WeightSource
from inflight.weights.trainer.state_dict_source import read_checkpoint

logger = logging.getLogger("inflight.weights")

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")
_HARMLESS = {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "use_rslora", "inference_mode", "init_lora_weights", "auto_mapping", "runtime_config", "megatron_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying",
}  # fmt: skip
"""Options of PEFT's that can be set while an adapter is plain LoRA. Others that are switched on are refused, also those
of later versions."""
Tensors = dict[str, torch.Tensor]


class AdapterFiles(WeightSource):
    """The adapters of an engine, by their places, which are the names that it was launched with."""

    device = torch.device("cpu")

    def __init__(self, model: Callable[[], str], digests: Callable[[], Digests]):
        """model: returns the path or name of the engine's model. digests: returns the SHA-256 of its tensors."""
        self._model, self._digests = model, digests
        self.known_bases: set[str] = set()
        """Directories with the engine's weights."""
        self.tensors: dict[str, Tensors] = {}
        """Maps places to tensors by the engine's names without the place."""
        self._layout: WeightLayout | None = None
        self._weights: WeightLayout | None = None

    def offer(self, welcome: Welcome) -> PublishedLayout:
        if welcome.adapter_layout is None:
            raise LayoutMismatchError("the engine holds no adapters; launch it with lora_rank")
        self._layout, self._weights = welcome.adapter_layout, welcome.layout
        return PublishedLayout(welcome.adapter_layout, adapters=True)

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        for name, view in views.items():
            place, _, tensor_name = name.partition(".")
            tensor = self.tensors.get(place, {}).get(tensor_name)
            view.zero_()
            if tensor is not None:
                view[: tensor.shape[0], : tensor.shape[1]].copy_(tensor)

    def load(self, place: str, directory: str | os.PathLike[str]) -> None:
        """Put the adapter of a directory at this place, in the place of what was there. Raises WeightFileError, or
        LayoutMismatchError, naming it, for what does not fit the engine's adapters."""
        if self._layout is None:
            raise LayoutMismatchError("the engine's adapters are not known yet: publish first")
        tensors = read_adapter(directory)
        shapes = {spec.name: spec.shape for spec in self._layout.tensors}
        for name, tensor in tensors.items():
            shape = shapes.get(f"{place}.{name}")
            if shape is None:
                raise LayoutMismatchError(
                    f"{directory} adapts {name.rpartition('.')[0]}, where the engine has no adapters: it has them on "
                    "projections of attention and MLP"
                )
            rank, other = (0, 1) if name.endswith("A") else (1, 0)
            if tensor.shape[other] != shape[other] or tensor.shape[rank] > shape[rank]:
                raise LayoutMismatchError(
                    f"{name} of {directory} is {list(tensor.shape)}; the engine takes {list(shape)} at most (lora_rank "
                    f"is {shape[rank]})"
                )
        self._check_base(Path(directory))
        self.tensors[place] = tensors

    def _check_base(self, directory: Path) -> None:
        """Raise WeightFileError, naming a tensor, if the adapter was trained over another checkpoint that
        is a directory here. Log the two names if the recorded base is not a directory."""
        base, model = str(_config(directory).get("base_model_name_or_path") or ""), self._model()
        if not base or base == model or os.path.realpath(base) in {os.path.realpath(model), *self.known_bases}:
            return
        if not os.path.isdir(base):
            logger.warning("%s was trained over %s, and is used with %s; they are not compared", directory, base, model)
            return
        assert self._weights is not None
        specs = {spec.name: spec for spec in self._weights.tensors}
        try:
            digests = self._digests().tensors
        except BackendError as error:
            if not os.path.isdir(model):
                logger.warning("%s was trained over %s; %s was not compared with it: %s", directory, base, model, error)
                return
            logger.warning("%s is compared with %s, with which the engine started: %s", base, model, error)
            digests = {
                name: sha256(tensor.to(getattr(torch, specs[name].dtype)))
                for name, tensor in read_checkpoint(model)
                if name in specs
            }
        for name, tensor in read_checkpoint(base):
            spec = specs.get(name)  # others are parts of tensors, or other names
            if spec is not None and (
                tuple(tensor.shape) != spec.shape or sha256(tensor.to(getattr(torch, spec.dtype))) != digests.get(name)
            ):
                raise WeightFileError(
                    f"{directory} was trained over {base}, but {name} is another tensor in the engine; start "
                    "the server from that checkpoint, or load its weights first"
                )
        self.known_bases.add(os.path.realpath(base))


def read_adapter(directory: str | os.PathLike[str]) -> Tensors:
    """A [r, K] and α / r · B [N, r] as MODULE.lora_A and MODULE.lora_B. Raises WeightFileError for what is not plain
    LoRA."""
    directory = Path(directory)
    config = _config(directory)
    tensors: Tensors = {}
    for full_name, tensor in read_checkpoint(directory / _WEIGHTS):
        found = _NAME.fullmatch(full_name.removeprefix(_PREFIX))
        if found is None:
            raise WeightFileError(f"{directory / _WEIGHTS} holds {full_name}; what can be published is plain LoRA")
        tensors[f"{found[1]}.lora_{found[2]}"] = tensor
    for module in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        a, b = tensors.get(f"{module}.lora_A"), tensors.get(f"{module}.lora_B")
        if a is None or b is None or not a.ndim == b.ndim == 2 or not len(a) == b.shape[1] > 0:
            raise WeightFileError(f"{directory / _WEIGHTS} holds no lora_A and lora_B of {module} that belong together")
        tensors[f"{module}.lora_B"] = b.float() * _scaling(config, module, len(a))
    if not tensors:
        raise WeightFileError(f"{directory / _WEIGHTS} holds no adapter")
    return tensors


def _config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    try:
        config = json.loads(path.read_bytes())
        kind = config["peft_type"]
        patterns = config["alpha_pattern"] = config.get("alpha_pattern") or {}
        for alpha in (config["lora_alpha"], *patterns.values()):
            if not isinstance(alpha, (int, float)):
                raise TypeError(f"lora_alpha or alpha_pattern has {alpha!r} for a number")
        for pattern in patterns:
            re.compile(pattern)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise WeightFileError(f"{path} is no configuration of an adapter: {error!r}") from error
    special = _special(config)
    if kind != "LORA" or special:
        raise WeightFileError(
            f"{path} says {', '.join([str(kind), *special])}; files are published of plain LoRA alone. Save "
            "PiSSA, OLoRA and the like as plain LoRA (save_pretrained(…, path_initial_model_for_weight_conversion=…)), "
            "and others merged into the weights (merge_and_unload())"
        )
    return config


def _special(config: Mapping[str, Any]) -> list[str]:
    """Name the options of a configuration that make an adapter more than A and B over the base model."""
    special = [
        f"{name}={value!r}"[:100]
        for name, value in config.items()
        if name not in _HARMLESS and (value is True or (isinstance(value, (dict, list, tuple)) and value))
    ]
    init, bias = str(config.get("init_lora_weights")), config.get("bias", "none")
    special += [f"init_lora_weights={init!r}, which changes the base"] if init.startswith(CHANGE_THE_BASE) else []
    special += [f"bias={bias!r}"] if bias != "none" else []
    return special


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """α / r, or α / √r of rank-stabilised LoRA (Kalajdzievski 2023), with the α of this module: that of the first
    pattern that the end of its name matches, as PEFT reads them."""
    patterns = config["alpha_pattern"].items()
    alpha = next((a for key, a in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
