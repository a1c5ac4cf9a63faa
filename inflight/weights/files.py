"""Versions as safetensors files in a directory that trainer and engines see.

A whole version holds the tensors under the model's own names, so that anything that reads safetensors can load it; a
delta holds one tensor of bytes. A file appears under its name complete or not at all, and says in its metadata which
version of which layout it is.
"""

import errno
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from inflight.core.errors import WeightFileError
from inflight.core.layout import WeightLayout
from inflight.weights.shared_memory import bytes_left
from inflight.weights.tensors import slot_views

_DELTA = "delta"
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8"}
_DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}


def write_version(
    directory: Path,
    layout: WeightLayout,
    version: int,
    slot: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    base: int | None = None,
) -> Path:
    """Write a slot, u8[total_bytes], or what changed in it since version `base`. Raises WeightFileError."""
    name = f"version-{version}.safetensors" if delta is None else f"version-{version}-from-{base}.safetensors"
    path, partial = directory / name, directory / f".{name}.partial"
    tensors = slot_views(slot.cpu(), layout) if delta is None else {_DELTA: delta.cpu()}
    metadata = {"version": str(version), "base": str(base), "fingerprint": layout.fingerprint, "format": "pt"}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        needed, left = sum(tensor.nbytes for tensor in tensors.values()), bytes_left(directory)
        if needed > left:
            raise OSError(errno.ENOSPC, f"it needs {needed / 2**20:,.1f} MiB and {left / 2**20:,.1f} MiB are left")
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise WeightFileError(f"version {version} could not be written to {path}: {error}") from error
    return path


def read_version(
    path: str, layout: WeightLayout, version: int, slot: torch.Tensor, *, base: int | None = None
) -> torch.Tensor | None:
    """Fill a slot from a file, or return the delta that it holds, u8[m], if there is to be a base. Raises
    WeightFileError, before anything is written, if it is not this version of this layout."""
    try:
        with safe_open(path, "pt") as file:
            metadata, wanted = file.metadata() or {}, {"version": str(version), "base": str(base)}
            wanted |= {"fingerprint": layout.fingerprint}
            for key, value in wanted.items():
                if metadata.get(key) != value:
                    raise WeightFileError(f"{path} has {key} {metadata.get(key)}, expected {value}")
            if base is not None:
                return file.get_tensor(_DELTA)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = WeightLayout.build(
                (name, tuple(part.get_shape()), _dtype(path, part.get_dtype())) for name, part in slices.items()
            )
            difference = layout.difference(found, ours="the engine", theirs="the file", dtypes=True)
            if difference is not None:
                raise WeightFileError(f"{path} does not hold the engine's tensors: {difference}")
            for name, view in slot_views(slot, layout).items():
                view.copy_(file.get_tensor(name))
            return None
    except (OSError, SafetensorError) as error:
        if isinstance(error, WeightFileError):
            raise
        raise WeightFileError(f"{path} cannot be read: {error}") from error


def _dtype(path: str, code: str | None) -> str:
    if code not in _DTYPES:
        raise WeightFileError(f"{path} holds tensors of dtype {code}, which no slot can hold")
    return _DTYPES[code]
