"""The transport of a shared directory: safetensors files, and messages with their paths.

A file contains the tensors under the model's own names, or a delta as one tensor of bytes. It appears under its name
complete or not at all. Its metadata contain its version and layout.
"""

import errno
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from inflight.core.arguments import named
from inflight.core.decoders import json_decoder
from inflight.core.errors import WeightFileError
from inflight.core.files import file_errors
from inflight.core.layout import DTYPE_BYTES, TensorSpec, WeightLayout
from inflight.weights.shared_memory import bytes_left
from inflight.weights.tensors import slot_views
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.transports.base import Receiver, Sender, StagedVersion, Transport

_DELTA = "delta"
_MAX_HEADER_BYTES = 100_000_000  # As in safetensors.
_MAX_DIMENSIONS = 64  # As in PyTorch.
_CHUNK_BYTES = 64 << 20
_ABANDONED_S = 600.0
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8"}
_DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Transport):
    """Safetensors files in a directory that trainer and engines share."""

    directory: str | Path
    delta: bool = False
    """Write changes since the last version for engines that have it."""
    keep: int = 2
    """Number of newest versions whose files are kept."""
    timeout_s: float = 600.0
    """Bound for reading a file. A slower engine is dropped. One that lends no slot gets the newest version later."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def sender(self) -> "FileSender":
        return FileSender(self)

    @classmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> "FileReceiver":
        return FileReceiver(layout, device)


class FileOrigin(msgspec.Struct, frozen=True):
    """Absolute path of a safetensors file on both sides."""

    path: str


class FileSender(Sender):
    """Writes a file per version and sends its path to the engines."""

    def __init__(self, settings: Files):
        super().__init__(timeout_s=settings.timeout_s, delta=settings.delta)
        self._directory = Path(settings.directory).absolute()  # Engines have other working directories.
        self._keep = settings.keep
        self._written: dict[tuple[int, int | None], Path] = {}
        """Maps a version, and the base of its delta, to the file."""
        for path in self._directory.glob(".version-*.partial"):
            with suppress(FileNotFoundError):  # Another trainer removed or completed it.
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        ahead = [engine for engine in slots if self.holds(engine, base)]
        changes = self.changes(ahead, staged, base) if ahead else None
        for engine in slots:
            since = base if changes is not None and engine in ahead else None
            key = staged.version, since.version if since else None
            if key not in self._written:  # Once for all engines that need the same file.
                delta = changes if since else None
                self._written[key] = write_version(
                    self._directory, engine.layout, staged.version, staged.data, delta=delta, base=key[1]
                )
                self.sent_bytes += self._written[key].stat().st_size
            self.fill(engine, staged, FileOrigin(str(self._written[key])), since)
        versions = sorted({version for version, _ in self._written} | {staged.version})
        for key in [key for key in self._written if key[0] not in versions[-self._keep :]]:
            self._written.pop(key).unlink(missing_ok=True)


class FileReceiver(Receiver):
    """Reads files by path."""

    origin = FileOrigin

    def receive(self, origin: FileOrigin, version: int, slot: torch.Tensor) -> None:
        read_version(origin.path, self.layout, version, slot)

    def receive_changes(self, origin: FileOrigin, version: int, base: int) -> torch.Tensor:
        return read_changes(origin.path, self.layout, version, base).to(self.device)


def write_version(
    directory: Path,
    layout: WeightLayout,
    version: int,
    slot: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    base: int | None = None,
) -> Path:
    """Write a slot, u8[total_bytes], or its delta since version `base`. Raises WeightFileError."""
    name = f"version-{version}.safetensors" if delta is None else f"version-{version}-from-{base}.safetensors"
    path, partial = directory / name, directory / f".{name}.partial"
    tensors = slot_views(slot.cpu(), layout) if delta is None else {_DELTA: delta.cpu()}
    metadata = {"version": str(version), "base": str(base), "fingerprint": layout.fingerprint, "format": "pt"}
    with file_errors(WeightFileError, f"version {version} could not be written to {path}"):
        directory.mkdir(parents=True, exist_ok=True)
        needed, left = sum(tensor.nbytes for tensor in tensors.values()), bytes_left(directory)
        if needed > left:
            raise OSError(errno.ENOSPC, f"it needs {needed / 2**20:,.1f} MiB and {left / 2**20:,.1f} MiB are left")
        try:
            save_file(tensors, partial, metadata)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def read_version(path: str, layout: WeightLayout, version: int, slot: torch.Tensor) -> None:
    """Fill a slot from a file. Raises WeightFileError, before anything is written, for another version or layout.

    A file system that does not answer blocks only the calling thread: unlike safetensors, which opens files with
    Python's global lock held, this code never waits with that lock.
    """
    with _opened(path, layout, version) as (file, tensors):
        found = WeightLayout.build((spec.name, spec.shape, spec.dtype) for spec in tensors.values())
        difference = layout.difference(found, ours="the engine", theirs="the file", dtypes=True)
        if difference is not None:
            raise WeightFileError(f"{path} does not hold the engine's tensors: {difference}")
        for spec in layout.tensors:
            _read(file, tensors[spec.name].offset, slot[spec.offset : spec.offset + spec.nbytes])


def read_changes(path: str, layout: WeightLayout, version: int, base: int) -> torch.Tensor:
    """Return a file's changes since version `base`, u8[m]. Raises WeightFileError as above."""
    with _opened(path, layout, version, base) as (file, tensors):
        spec, most = tensors.get(_DELTA), layout.total_bytes
        if spec is None or len(tensors) > 1 or spec.dtype != "uint8" or len(spec.shape) != 1 or spec.nbytes > most:
            raise WeightFileError(f"{path} does not hold a difference alone, of at most {most} bytes")
        changes = torch.empty(spec.nbytes, dtype=torch.uint8)
        _read(file, spec.offset, changes)
        return changes


@contextmanager
def _opened(
    path: str, layout: WeightLayout, version: int, base: int | None = None
) -> Iterator[tuple[int, dict[str, TensorSpec]]]:
    """Open the file of a version. Pipes and devices are refused, since they might be endless."""
    if "\0" in path:
        raise WeightFileError(f"{path[:200]!r} cannot be read: no file can be called that")
    with file_errors(WeightFileError, f"{path} cannot be read"):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise WeightFileError(f"{path} cannot be read: it is no regular file")
            tensors, metadata = _read_header(path, file)
            wanted = {"version": str(version), "base": str(base), "fingerprint": layout.fingerprint}
            for key, value in wanted.items():
                if metadata.get(key) != value:
                    raise WeightFileError(f"{path} has {key} {metadata.get(key, 'none')[:200]}, expected {value}")
            yield file, tensors
        finally:
            os.close(file)


class _HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(path: str, file: int) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return tensors by name, with offsets from the beginning of the file, and metadata. Raises WeightFileError unless
    the tensors fill the rest of the file, one after another, each with the size of its shape."""
    size = os.fstat(file).st_size
    header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
    begin = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or begin > size:
        raise WeightFileError(f"{path} cannot be read: it has {size} bytes, too few for its header")
    encoded = torch.empty(header_bytes, dtype=torch.uint8)
    _read(file, 8, encoded)
    try:
        header = json_decoder(dict[str, msgspec.Raw]).decode(encoded.numpy().data)
        metadata = json_decoder(dict[str, str]).decode(header.pop("__metadata__", b"{}"))
        entries = {name: json_decoder(_HeaderEntry).decode(raw) for name, raw in header.items()}
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightFileError(f"{path} cannot be read: its header is damaged: {str(error)[:200]}") from error
    tensors, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _DTYPES:
            raise WeightFileError(f"{path} holds tensors of dtype {entry.dtype[:200]}, which no slot can hold")
        if len(entry.shape) > _MAX_DIMENSIONS:  # Their product could take minutes.
            raise WeightFileError(f"{path} holds a tensor of {len(entry.shape)} dimensions, which no slot can hold")
        dtype, first = _DTYPES[entry.dtype], entry.data_offsets[0]
        nbytes = math.prod(entry.shape) * DTYPE_BYTES[dtype]
        if first != end or entry.data_offsets[1] != first + nbytes or min(entry.shape, default=0) < 0:
            raise WeightFileError(f"{path} cannot be read: the offsets of {name[:200]} do not match its shape")
        tensors[name] = TensorSpec(name, entry.shape, dtype, begin + first, nbytes)
        end = first + nbytes
    if begin + end != size:
        raise WeightFileError(f"{path} cannot be read: it has {size} bytes, expected {begin + end}")
    return tensors, metadata


def _read(file: int, offset: int, target: torch.Tensor) -> None:
    """Fill u8[n] from the file."""
    chunk = torch.empty(min(_CHUNK_BYTES, len(target)), dtype=torch.uint8) if target.is_cuda else None
    for part in target.split(_CHUNK_BYTES):
        memory = part if chunk is None else chunk[: len(part)]
        view, done = memory.numpy().data, 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "it became shorter while it was read")
            done += count
        if memory is not part:
            part.copy_(memory)
        offset += len(part)
