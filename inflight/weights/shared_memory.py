"""Slots in memory shared by processes of one machine.

A slot is a file in the shared-memory file system that engine and publisher map. Its pages are reserved at creation, so
that a full /dev/shm is an error at start and not a bus error later. The engine locks each of its files. The kernel
drops the lock when the engine dies, and the next engine that starts removes such orphans.
"""

import errno
import fcntl
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.core.errors import ProtocolError, SharedMemoryError
from inflight.core.messages import SharedMemoryDescriptor

if TYPE_CHECKING:
    import torch  # A process that only launches engines does not load it.

logger = logging.getLogger("inflight.weights")

_PREFIX = "inflight-slot-"
_SHM = Path("/dev/shm")
_PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for all GPUs of this process."""
_own: set[Path] = set()
"""Paths of slots of this process that still have a name."""


def default_directory() -> Path:
    """Return /dev/shm if it is writable, else the directory for temporary files. That directory might be on a disk."""
    return _SHM if _SHM.is_dir() and os.access(_SHM, os.W_OK) else Path(tempfile.gettempdir())


class SharedMemorySlot:
    """A slot of shared memory that this process made, or a part of one: `buffer`, u8[n]."""

    def __init__(self, path: Path, file: int, buffer: "torch.Tensor", unlink: Callable[[], object]):
        """file: open until `unlink`, which removes its name; the memory lives until the last process unmaps it."""
        self.path, self._file, self.buffer, self.unlink = path, file, buffer, unlink
        self._is_free = False

    @classmethod
    def create(cls, nbytes: int, *, directory: Path | None = None) -> "SharedMemorySlot":
        """Make a slot. Raises SharedMemoryError, with the size needed and the size left, if it does not fit."""
        import torch

        if directory is None:
            directory = default_directory()
            if directory != _SHM:
                logger.warning("%s cannot be written to: the weights lie in %s, which may be slow", _SHM, directory)
        remove_orphans(directory)
        file, path = _make_locked_file(directory)
        try:
            with _memory_errors(nbytes, directory):
                _reserve(file, nbytes, directory)
                memory = _map(file, nbytes)
        except SharedMemoryError:
            os.close(file)
            path.unlink()
            raise
        _own.add(path)
        unlink = weakref.finalize(memory, _remove, path, file, os.getpid())  # The open file keeps the lock.
        return cls(path, file, torch.frombuffer(memory, dtype=torch.uint8), unlink)

    @staticmethod
    def attach(descriptor: SharedMemoryDescriptor, *, pinned: bool = False) -> "torch.Tensor":
        """Map a slot of another process, u8[nbytes]. pinned: GPUs copy directly from and to it. Raises ProtocolError if
        the file is not as described."""
        import torch

        try:
            file = os.open(descriptor.path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: an impossible file name.
            raise ProtocolError(f"the engine's slot {descriptor.path} cannot be opened: {error}") from error
        try:
            size = os.fstat(file).st_size
            if size != descriptor.file_bytes:
                raise ProtocolError(
                    f"the engine's slot {descriptor.path} has {size} bytes, expected {descriptor.file_bytes}"
                )
            end = descriptor.offset + descriptor.nbytes
            if not 0 <= descriptor.offset < end <= size:
                raise ProtocolError(
                    f"the engine's slot {descriptor.path} has {size} bytes, and does not hold bytes "
                    f"{descriptor.offset} to {end}"
                )
            memory = _map(file, size)
        finally:
            os.close(file)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            memory.pin(buffer.data_ptr())
        return buffer[descriptor.offset : end]

    def split(self, count: int) -> list["SharedMemorySlot"]:
        """Return slots of equal size in the memory of this one."""
        parts = self.buffer.split(len(self.buffer) // count)
        return [SharedMemorySlot(self.path, self._file, part, self.unlink) for part in parts]

    def free(self) -> None:
        """Free the pages until `restore`, if the file system can."""
        assert self.buffer.untyped_storage().nbytes() == len(self.buffer), "the slot is a part of another one"
        if hasattr(mmap, "MADV_REMOVE") and not self._is_free:
            try:
                with mmap.mmap(self._file, 0) as memory:
                    memory.madvise(mmap.MADV_REMOVE)
                self._is_free = True
            except OSError as error:
                logger.debug("the pages of %s stay: %s", self.path, error)

    def restore(self) -> None:
        """Reserve the pages again. Raises SharedMemoryError."""
        nbytes, directory = len(self.buffer), self.path.parent
        if self._is_free:
            with _memory_errors(nbytes, directory):
                _reserve(self._file, nbytes, directory)
            self.buffer[:: mmap.PAGESIZE].sum()  # Maps the pages, so that no pass of the engine waits for that.
            self._is_free = False

    def descriptor(self) -> SharedMemoryDescriptor:
        offset, file_bytes = int(self.buffer.storage_offset()), self.buffer.untyped_storage().nbytes()
        return SharedMemoryDescriptor(str(self.path), len(self.buffer), offset, file_bytes)


@contextmanager
def _memory_errors(nbytes: int, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        left = bytes_left(directory)
        raise SharedMemoryError(
            f"a weight slot needs {nbytes / 2**20:,.1f} MiB and {directory} has {left / 2**20:,.1f} MiB left; "
            f"enlarge it (`mount -o remount,size=… {directory}`, or `--shm-size` for a container), free some, "
            "or launch with slots=1 or a smaller dtype"
        ) from error


def _reserve(file: int, nbytes: int, directory: Path) -> None:
    if nbytes > bytes_left(directory):  # An error before anything is reserved.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(file, 0, nbytes)


class _Memory(mmap.mmap):
    """A mapped file. CUDA unpins it before it is unmapped."""

    unpin: Callable[[], object] | None = None

    def pin(self, address: int) -> None:
        """Pin the pages at this address, where they are mapped. If CUDA refuses, copies take longer."""
        import torch

        cudart: Any = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(address, len(self), _PORTABLE))
        if error:
            logger.warning("CUDA cannot pin %d bytes of weights (error %d): copies take longer", len(self), error)
        else:
            self.unpin = partial(cudart.cudaHostUnregister, address)

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def _map(file: int, nbytes: int) -> _Memory:
    """Map a file with all its pages, so that the first publish and the first pass cause no page faults."""
    return _Memory(file, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _remove(path: Path, file: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # Not in a forked process.
        _own.discard(path)
        path.unlink(missing_ok=True)
        os.close(file)


def remove_own() -> None:
    """Remove the names of all slots of this process, which ends without cleanup."""
    for path in list(_own):
        path.unlink(missing_ok=True)


def remove_orphans(directory: Path) -> int:
    """Remove slots without a lock, since their engine is dead. Return their number."""
    removed = 0
    for path in directory.glob(_PREFIX + "*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # Another user's, or removed since.
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except BlockingIOError:  # Its engine lives.
            continue
        finally:
            os.close(file)
    return removed


def _make_locked_file(directory: Path) -> tuple[int, Path]:
    """Make a locked file. Try again if another engine removed it as an orphan before it was locked."""
    while True:
        file, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file, Path(name)
        os.close(file)


def bytes_left(directory: Path) -> int:
    """Return the number of free bytes for this user in a file system."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize
