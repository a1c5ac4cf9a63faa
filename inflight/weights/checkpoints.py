"""Checkpoints in Hugging Face's form: a directory of safetensors files, with an index where there are several."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inflight.core.errors import WeightFileError

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"


def read_checkpoint(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a checkpoint, one at a time; files are mapped, so that they may be larger than memory.

    Of a directory: `model.safetensors`; else the files of `model.safetensors.index.json`; else all safetensors files.
    Raises WeightFileError, naming the file, for one that is missing, cannot be read or lacks what the index says.
    """
    path = Path(path)
    files = {path: set[str]()} if path.is_file() else _files_of(path)
    for file, expected in files.items():  # headers first, so that what is broken is told before a tensor is copied
        with _opened(file) as opened:
            absent = sorted(expected.difference(opened.keys()))
        if absent:
            raise WeightFileError(f"{file} lacks {absent[0]}, which {path / _INDEX} says it holds")
    return _tensors_of(list(files))


def _tensors_of(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _files_of(directory: Path) -> dict[Path, set[str]]:
    """Return the files of a checkpoint, each with the names that it must hold at least."""
    if not directory.is_dir():
        raise WeightFileError(f"{directory} is neither a directory nor a file")
    if (directory / _FILE).exists():
        return {directory / _FILE: set()}
    files = _index_of(directory) or {file: set[str]() for file in sorted(directory.glob("*.safetensors"))}
    if list(files) == [directory / _ADAPTER]:
        raise WeightFileError(
            f"{directory} holds an adapter and no weights; adapters are published from a PEFT model "
            "(engine.publisher(model)), or merged into the weights"
        )
    if not files:
        raise WeightFileError(f"{directory} holds no .safetensors file")
    return files


def _index_of(directory: Path) -> dict[Path, set[str]]:
    """Return a map of files to names, as the index says; it is empty if there is no index."""
    path = directory / _INDEX
    if not path.is_file():
        return {}
    files: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads(path.read_bytes())["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file beside it")
            files.setdefault(directory / file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{path} is no index of safetensors files: {error!r}") from error
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
