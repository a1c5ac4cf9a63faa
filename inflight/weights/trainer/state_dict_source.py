"""Weights that `publish()` receives as names and tensors, or as a checkpoint, instead of reading a model.

They are copied one by one in the thread that calls `publish()`, since gathering a tensor can be a collective. A
checkpoint has Hugging Face's form: a directory of safetensors files, with an index if there are several.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.core.errors import LayoutMismatchError, ProtocolError, WeightFileError
from inflight.core.layout import Alias, WeightLayout, is_cast
from inflight.core.messages import Welcome
from inflight.core.text import listed
from inflight.weights.tensor_names import EngineNames, ModuleTree, unwrapped
from inflight.weights.trainer.sources import WeightSource

logger = logging.getLogger("inflight.weights")

Weights = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | str | os.PathLike[str]
"""Pairs of a name and a tensor, a mapping of names to tensors, or the path of a checkpoint: a directory of safetensors
files, or one file."""

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"


class StateDictSource(WeightSource):
    """Weights that arrive with each `publish()`, in the engine's layout."""

    aliases = True

    def __init__(self, weights: Weights | Callable[[], Weights] | None = None):
        """weights: for each `publish()` without weights; a function is called each time."""
        self._weights = weights
        gpu = torch.cuda.is_initialized()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    def offer(self, welcome: Welcome) -> WeightLayout:
        return welcome.layout

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        raise AssertionError("there is no model to copy")

    def pairs(self, weights: Weights | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return names and tensors to publish. Raises TypeError, and WeightFileError during the iteration."""
        if weights is None:
            weights = self._weights() if callable(self._weights) else self._weights
        if weights is None:
            raise TypeError("this publisher has no model; hand the weights over: publisher.publish(weights)")
        if isinstance(weights, (str, os.PathLike)):
            return read_checkpoint(weights)
        if isinstance(weights, nn.Module) or not isinstance(weights, Iterable):
            raise TypeError(
                "publish() takes pairs of a name and a tensor, a mapping, or the path of a checkpoint, "
                f"got {type(weights).__name__}; for a model, make the publisher with it: engine.publisher(model)"
            )
        return iter(weights.items() if isinstance(weights, Mapping) else weights)  # pyright: ignore


@dataclass(slots=True)
class _Place:
    """Destination of a named tensor: a tensor of the slot, or a part of one."""

    tensor: str
    view: torch.Tensor
    came: bool = False


@torch.no_grad()
def copy_state_dict(
    views: Mapping[str, torch.Tensor], aliases: Sequence[Alias], pairs: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Fill a slot, cast to the dtypes of its views. The copies are done when this returns.

    A tensor can have its own name, another name of the model or a checkpoint, names of its parts (the experts of a
    layer), names of another class for the same checkpoint, and the prefixes of wrappers (`module.`, `_orig_mod.`,
    `base_model.model.`, …). The prefix of the model's body can be absent. Tensors of two names must be equal. Tensors
    of parts that the engine's model lacks (layers for multi-token prediction, value heads) are ignored with a warning.
    All pairs are read to the end, as other ranks might be gathering too. Then it raises LayoutMismatchError, naming
    tensors that are repeated, missing, of another shape or without values, or for which the model has no place.
    """
    places = _places(views, aliases)
    ignored = {alias.name for alias in aliases if not alias.tensor}
    missing = {name: view.numel() for name, view in views.items()}
    """Maps a tensor to its number of missing elements."""
    engine_names = EngineNames(views), EngineNames(places)
    bodies = {f"{name.partition('.')[0]}." for name in views}
    """Prefixes that names in a checkpoint of the model's body lack."""
    wrong: list[str] = []
    unknown: list[str] = []
    num_pairs = 0
    for pair in pairs:
        match pair:
            case (str() as name, torch.Tensor() as tensor):
                num_pairs += 1
            case _:
                raise TypeError(f"weights are pairs of a name and a tensor, got {str(pair)[:80]}")
        if name.endswith("rotary_emb.inv_freq"):
            continue  # Old checkpoints contain it; the model computes it.
        names = [name, plain := unwrapped(name), *(engine_name(plain) for engine_name in engine_names)]
        names += [f"{body}{plain}" for body in bodies]
        if not ignored.isdisjoint(names):
            continue
        place = next((places[each] for each in names if each in places), None)
        if place is None:
            unknown.append(plain)
        elif (problem := _problem(place, tensor, missing)) is not None:
            wrong.append(f"{name}: {problem}")
        else:
            place.came = True
            if missing[place.tensor]:
                place.view.copy_(tensor)
                missing[place.tensor] -= tensor.numel()
            elif not _same(place.view, tensor):
                wrong.append(f"{name}: other values than those that came for {place.tensor}, which are the same tensor")
    for device in {view.device for view in views.values() if view.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    absent = [name for name, left in missing.items() if left and left == views[name].numel()]
    if unknown:
        tree = ModuleTree(places)
        strange = [n for n in unknown if absent or tree.has_place_for(n)] or tree.beyond_the_last_layer(unknown)
        wrong += [f"{name}: only in what was handed over" for name in strange]
    wrong += [f"{name}: only in the engine" for name in absent]
    wrong += [f"{name}: came in part only" for name, left in missing.items() if left and name not in absent]
    if wrong:
        raise LayoutMismatchError(_complaint(wrong, num_pairs))
    if unknown:
        _warn_once(f"{len(unknown)} tensors of parts that the engine's model lacks are ignored ({listed(unknown)})")


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _problem(place: _Place, tensor: torch.Tensor, missing: Mapping[str, int]) -> str | None:
    """Return why this tensor cannot be copied; None if it can."""
    if place.came:
        return "came twice"
    if tensor.shape != place.view.shape:
        return f"shape {list(place.view.shape)} in the engine, {list(tensor.shape)} in what was handed over"
    if 0 < missing[place.tensor] < tensor.numel():
        return "came both whole and in parts"
    if isinstance(tensor, DTensor):
        return "is a DTensor; hand over what its full_tensor() returns, which all ranks call"
    if tensor.is_meta:
        return "has no values (it is on the meta device)"
    if not is_cast(str(tensor.dtype).removeprefix("torch."), str(place.view.dtype).removeprefix("torch.")):
        return f"{place.view.dtype} in the engine, {tensor.dtype} in what was handed over, which needs more than a cast"
    return None


def _same(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Compare bit for bit, NaN included."""
    ours, theirs = (part.contiguous().view(-1).view(torch.uint8) for part in (view, tensor.to(view)))
    return torch.equal(ours, theirs)


def _places(views: Mapping[str, torch.Tensor], aliases: Sequence[Alias]) -> dict[str, _Place]:
    places = {name: _Place(name, view) for name, view in views.items()}
    for alias in filter(lambda alias: alias.tensor, aliases):
        view = views.get(alias.tensor)
        last = alias.offset + sum((n - 1) * stride for n, stride in zip(alias.shape, alias.strides, strict=True))
        if view is None or min(alias.offset, *alias.shape, *alias.strides) < 0 or last >= max(1, view.numel()):
            raise ProtocolError(f"the engine says that {alias.name} is a part of {alias.tensor}, where it cannot be")
        part = view.as_strided(alias.shape, alias.strides, view.storage_offset() + alias.offset)
        places.setdefault(alias.name, _Place(alias.tensor, part))
    return places


def _complaint(wrong: list[str], num_pairs: int) -> str:
    if not num_pairs:
        return "no tensors were handed over; an iterator can be read only once, so that each publish() needs a new one"
    hints = ""
    if all(line.endswith("only in the engine") for line in wrong):
        hints = " (a version is published whole, not in part)"
    elif any(".lora_" in line for line in wrong):
        hints = " (merge adapters into the weights, or publish the PEFT model: engine.publisher(model))"
    shown = listed(wrong, 4, "; ") + hints
    return f"what was handed over does not hold the engine's tensors: {shown}; nothing was published"


def read_checkpoint(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a checkpoint, one at a time. Files are mapped, so that they can exceed memory.

    A directory is read from `model.safetensors`, else from the files of `model.safetensors.index.json`, else from all
    safetensors files. Raises WeightFileError, naming the file, if a file is missing, cannot be read or lacks a tensor
    of the index.
    """
    path = Path(path)
    files = {path: set[str]()} if path.is_file() else _files_of(path)
    for file, expected in files.items():  # Headers first: a broken file is reported before a tensor is copied.
        with _opened(file) as opened:
            absent = sorted(expected.difference(opened.keys()))
        if absent:
            raise WeightFileError(f"{file} lacks {absent[0]}, which {path / _INDEX} says it holds")

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for file in files:
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)

    return tensors()


def _files_of(directory: Path) -> dict[Path, set[str]]:
    """Return the files of a checkpoint, each with names that it must contain."""
    if not directory.is_dir():
        raise WeightFileError(
            f"{directory} is neither a directory nor a file; to publish a model's parameters, pass the model itself"
        )
    if (directory / _FILE).exists():
        return {directory / _FILE: set()}
    files: dict[Path, set[str]] = {}
    index = directory / _INDEX
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items() if index.is_file() else ():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file beside it")
            files.setdefault(directory / file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{index} is no index of safetensors files: {error!r}") from error
    files = files or {file: set[str]() for file in sorted(directory.glob("*.safetensors"))}
    if list(files) == [directory / _ADAPTER]:
        raise WeightFileError(
            f"{directory} holds an adapter and no weights; adapters are published from a PEFT model "
            "(engine.publisher(model)), or merged into the weights"
        )
    if not files:
        raise WeightFileError(f"{directory} holds no .safetensors file")
    return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise WeightFileError(f"{file} does not exist, or is no file")
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise WeightFileError(f"{file} cannot be read as safetensors: {error}") from error
