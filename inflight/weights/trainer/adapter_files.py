"""Adapters (LoRA) that were saved by PEFT, published from their files.

A directory contains `adapter_config.json` and `adapter_model.safetensors`. The published tensors of an adapter are A
and α / r · B, cast to the engine's dtype; projections without an adapter, and unused ranks, are zero.
"""

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from inflight.core.errors import BackendError, LayoutMismatchError, WeightFileError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Digests, Status, Welcome
from inflight.core.options import EngineOptions
from inflight.weights.engine.digests import sha256
from inflight.weights.tensor_names import EngineNames
from inflight.weights.trainer.lora import KEEP_THE_BASE
from inflight.weights.trainer.sources import WeightSource
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


class Engine(Protocol):
    """An engine whose weights are compared with the base of an adapter, like `inflight.Engine`."""

    options: EngineOptions

    def digests(self) -> Digests: ...
    def status(self) -> Status: ...


class AdapterFiles(WeightSource):
    """The adapters of an engine, by the adapter names that it was launched with ("places")."""

    device = torch.device("cpu")
    adapters = True

    def __init__(self, engine: Engine):
        self._engine = engine
        self._known_bases: set[str] = set()
        """Checkpoints with the engine's weights: their directories, or names if they are in no directory here."""
        self._published: str | None = None
        """Checkpoint whose weights were published last, as `note_weights` has it."""
        self.tensors: dict[str, Tensors] = {}
        """Maps places to tensors by the engine's names without the place."""
        self._layout: WeightLayout | None = None
        self._weights: WeightLayout | None = None

    def offer(self, welcome: Welcome) -> WeightLayout:
        if welcome.adapter_layout is None:
            raise LayoutMismatchError("the engine holds no adapters; launch it with lora_rank")
        self._layout, self._weights = welcome.adapter_layout, welcome.layout
        return welcome.adapter_layout

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        for name, view in views.items():
            place, _, tensor_name = name.partition(".")
            tensor = self.tensors.get(place, {}).get(tensor_name)
            view.zero_()
            if tensor is not None:
                view[: tensor.shape[0], : tensor.shape[1]].copy_(tensor)

    def load(self, place: str, directory: str | os.PathLike[str]) -> None:
        """Replace the adapter at this place by the adapter of a directory. Raises WeightFileError or
        LayoutMismatchError, with the reason, if it does not fit the engine's adapters."""
        if self._layout is None:
            raise LayoutMismatchError("the engine's adapters are not known yet: publish first")
        tensors = read_adapter(directory)
        shapes = {
            spec.name.removeprefix(f"{place}."): spec.shape
            for spec in self._layout.tensors
            if spec.name.startswith(f"{place}.")
        }
        names = EngineNames(shapes)
        tensors = {names(name): tensor for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            shape = shapes.get(name)
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

    def note_weights(self, checkpoint: str) -> None:
        """Note that weights of this directory were published, or others ("")."""
        self._known_bases, self._published = {_find(checkpoint)} - {""}, checkpoint

    def _check_base(self, directory: Path) -> None:
        """Raise WeightFileError, naming a tensor, if the adapter was trained over other weights than the engine's. Log
        a warning if nothing is compared, as the checkpoint is not on this machine."""
        config, model = _config(directory), self._engine.options.model
        base = str(config.get("base_model_name_or_path") or "")
        if not base:
            logger.warning("%s names no base that it was trained over, and is not compared with %s", directory, model)
            return
        checkpoint = _find(base, config.get("revision"))
        if not self._engine.status().version:  # nothing was published
            self._known_bases.add(_find(model))
        if checkpoint in self._known_bases:
            return
        if not os.path.isdir(checkpoint):
            logger.warning(
                "%s was trained over %s, and is used with %s; they are not compared, since the first one is neither a "
                "directory nor in Hugging Face's cache here", directory, checkpoint, model,
            )  # fmt: skip
            return
        assert self._weights is not None
        specs = {spec.name: spec for spec in self._weights.tensors}
        names = EngineNames(specs)
        try:
            digests = self._engine.digests().tensors
        except BackendError as error:
            start = _find(model if self._published is None else self._published)
            if not os.path.isdir(start):
                logger.warning("%s was trained over %s; %s was not compared with it: %s", directory, base, model, error)
                return
            logger.warning("%s is compared with %s, the engine's checkpoint: %s", base, start, error)
            digests = {
                name: sha256(tensor.to(getattr(torch, specs[name].dtype)))
                for found, tensor in read_checkpoint(start)
                if (name := names(found)) in specs
            }
        num_compared = 0
        for found, tensor in read_checkpoint(checkpoint):
            spec = specs.get(name := names(found))  # others are parts of tensors, or other names
            if spec is None or (tensor.is_floating_point() and tensor.itemsize == 1):  # has a scale
                continue
            num_compared += 1
            if tuple(tensor.shape) != spec.shape or sha256(tensor.to(getattr(torch, spec.dtype))) != digests.get(name):
                raise WeightFileError(
                    f"{directory} was trained over {base}, but {name} is another tensor in the engine; start "
                    "the server from that checkpoint, or load its weights first"
                )
        if num_compared < len(specs):
            logger.warning(
                "%s was trained over %s; %d of %d tensors were compared with the engine's, the others have other names "
                "there", directory, base, num_compared, len(specs),
            )  # fmt: skip
        if num_compared:
            self._known_bases.add(checkpoint)


def _find(name: str, revision: object = None) -> str:
    """Return the directory of a checkpoint, local or in Hugging Face's cache; else its name."""
    if os.path.isdir(name):
        return os.path.realpath(name)
    revision = revision if isinstance(revision, str) and revision else None
    with suppress(HFValidationError):  # the path of a directory on another machine
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(config, str):
            directory = os.path.realpath(os.path.dirname(config))
            try:
                read_checkpoint(directory)
                return directory
            except WeightFileError as error:
                logger.info("the weights of %s are not whole in Hugging Face's cache: %s", name, error)
    return f"{name} (revision {revision})" if revision else name


def read_adapter(directory: str | os.PathLike[str]) -> Tensors:
    """Return A [r, K] and α / r · B [N, r] as MODULE.lora_A and MODULE.lora_B. Raises WeightFileError unless the
    adapter is plain LoRA."""
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
    special += [f"init_lora_weights={init!r}, which changes the base"] if init.lower() not in KEEP_THE_BASE else []
    special += [f"bias={bias!r}"] if bias != "none" else []
    return special


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return α / r, or α / √r of rank-stabilised LoRA (Kalajdzievski 2023), with the α of this module. As in PEFT, the
    first pattern that matches the end of the module's name decides α."""
    patterns = config["alpha_pattern"].items()
    alpha = next((a for key, a in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
