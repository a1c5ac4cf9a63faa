"""Compiles `_cpu.c` for this machine on first use and calls it.

The shared object is kept under $XDG_CACHE_HOME/inflight (or ~/.cache/inflight), keyed by source, flags, compiler and
processor. If that directory is not writable, it is kept in the temporary directory, for this user alone. It uses the
OpenMP runtime that PyTorch has loaded, so that both share one pool of threads. Without a C compiler, or with
INFLIGHT_NO_C=1, `library()` is None and the PyTorch references run instead; `problem()` returns the reason.
"""

import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

logger = logging.getLogger("inflight.kernels")

SOURCE = Path(__file__).with_name("_cpu.c")
BLOCK = 16
"""Tokens in a block of the paged cache that the attention kernel reads."""
_PLAIN = frozenset({int, bool, float, type(None)})
"""Classes of most arguments of a kernel. Finding a class here takes less time than `isinstance(…, Tensor)`."""
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "paged_attention": [_P, _P, _P, _P, _I, _P, _L, _P, _P, _L, _I, _I, _I, _I, _F, _F, _I, _P, _I],
    "add_lora": [_P, _L, _P, _L, _P, _L, _P, _L, _I, _P, _I, _I, _P, _L, _L, _L, _I],
    "copy_scaled": [_P, _P, _L, _L, _I],
    "latent_attention": [_P, _P, _P, _I, _P, _L, _P, _P, _L, _I, _I, _I, _F, _I, _I],
    "linear": [_P, _L, _P, _P, _P, _I, _L, _L, _L, _I],
    "grouped_linear": [_P, _L, _P, _P, _P, _L, _P, _I, _L, _L, _L, _I, _I],
    "grouped_linear_transposed": [_P, _L, _P, _P, _P, _L, _P, _I, _L, _L, _L, _I, _I],
    "sort_choices": [_P, _L, _L, _L, _P, _P, _P, _I],
    "mix_experts": [_P, _P, _P, _P, _I, _L, _L, _L, _I],
    "short_convolution": [_P, _L, _P, _P, _P, _P, _I, _L, _P, _P, _L, _I, _I, _I],
    "delta_gates": [_P, _L, _P, _L, _P, _P, _P, _P, _I, _L, _I, _I],
    "gated_rms_norm": [_P, _P, _L, _P, _P, _I, _L, _I, _I, _F, _I],
    "delta_rule": [_P, _L, _P, _L, _P, _L, _I, _P, _L, _P, _P, _P, _L, _P, _P, _I, _I, _I, _I, _I, _I],
    "selective_scan": [_P, _L, _P, _P, _P, _L, _P, _L, _P, _P, _P, _L, _P, _P, _I, _I, _I, _I, _I],
    "list_pages": [_P, _L, _P, _P, _L, _I, _P],
    "rms_norm": [_P, _L, _P, _L, _P, _P, _P, _I, _L, _L, _F, _F, _I, _I],
    "gated_activation": [_P, _L, _P, _I, _L, _L, _I, _I],
    "clamped_gate": [_P, _L, _P, _I, _L, _L, _F, _F, _I],
    "rope_and_cache": [_P, _L, _P, _I, _P, _P, _P, _P, _I, _P, _P, _L, _I, _I, _I, _P, _P, _F, _F, _I, _I],
    "draw": [_P, _L, _I, _L, _L, _P, _P, _P, _P, _P, _I],
}


_problem = ""
_threads = threading.local()
"""`recorder` receives each kernel call of a thread."""


class _NotCompiledError(Exception):
    """The C kernels are missing. The message contains the reason and the remedy."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None with the reason logged once."""
    global _problem
    _problem = ""
    if os.environ.get("INFLIGHT_NO_C") == "1":
        _problem = "INFLIGHT_NO_C=1"
        return None
    try:
        compiled = _compiled()
    except _NotCompiledError as error:
        _problem = str(error)
        logger.warning("no C kernels (%s); PyTorch references run instead, more slowly", _problem)
        return None
    for name, types in _SIGNATURES.items():
        getattr(compiled, name).argtypes = types
    return compiled


def problem() -> str:
    """Return why the compiled kernels are missing or not in the usual directory, and the remedy; "" without a
    problem."""
    library()
    return _problem


def takes(*tensors: torch.Tensor) -> bool:
    """Return whether the C kernels can read these tensors: on the CPU, all float32 or all bfloat16, each row
    contiguous."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    for tensor in tensors:  # a generator would take twice the time, and a pass calls this for each of its kernels
        if not tensor.is_cpu or tensor.dtype != dtype or tensor.stride(-1) != 1:
            return False
    return library() is not None


def call(name: str, *arguments: object) -> bool:
    """Call a kernel; tensors are passed as addresses. Return False if it refuses these inputs (nothing was written)."""
    values = [a.data_ptr() if type(a) not in _PLAIN and isinstance(a, torch.Tensor) else a for a in arguments]
    kernel, threads = getattr(library(), name), torch.get_num_threads()
    if kernel(*values, threads) != 0:
        return False
    if (recorder := getattr(_threads, "recorder", None)) is not None:
        recorder(partial(kernel, *values, threads), [a for a in arguments if isinstance(a, torch.Tensor)])
    return True


def is_recorded() -> bool:
    """Return whether the kernel calls of this thread are recorded, to run again with other numbers."""
    return getattr(_threads, "recorder", None) is not None


@contextmanager
def recorded(recorder: Callable[[Callable[[], int], list[torch.Tensor]], None]) -> Iterator[None]:
    """Give every kernel that this thread runs inside the block to `recorder`: the function that runs it once more and
    returns 0, and the tensors that it reads and writes."""
    _threads.recorder = recorder
    try:
        yield
    finally:
        _threads.recorder = None


def _compiled() -> ctypes.CDLL:
    """Load the kernels from the first directory that contains them or is writable."""
    global _problem
    compiler = _compiler()
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + repr((_FLAGS, compiler, _processor())).encode()).hexdigest()[:16]
    problems = []
    for find, make in ((_cache, _make_directory), (_temporary, _make_private)):
        directory = None
        try:
            make(directory := find())
            library = _load(_compile(compiler, directory / f"kernels-{key}.so"), compiler)
        except subprocess.CalledProcessError as error:
            if os.strerror(errno.ENOSPC) not in error.stderr:
                lines = [line for line in error.stderr.splitlines() if "error" in line]
                text = "; ".join(lines) or error.stderr.strip() or f"exit code {error.returncode}"
                raise _NotCompiledError(f"{compiler[0]} failed: {text[:500]}; set CC to another C compiler") from error
            problems.append(f"{directory} cannot be used: {os.strerror(errno.ENOSPC)}")
        except OSError as error:
            if error.filename == compiler[0]:
                raise _NotCompiledError(
                    f"{compiler[0]} cannot be run: {error.strerror}; set CC to a C compiler"
                ) from error
            reason = error.strerror or str(error)
            problems.append(f"{directory} cannot be used: {reason}" if directory else reason)
        else:
            if problems:
                _problem = f"{problems[0]}; set XDG_CACHE_HOME to another directory. {directory} is used until then"
            return library
    raise _NotCompiledError(f"{' and '.join(problems)}; set XDG_CACHE_HOME to a directory that can be written to")


def _compiler() -> list[str]:
    """Return the command of the compiler. CC can contain arguments."""
    try:
        command = shlex.split(os.environ.get("CC") or "")
    except ValueError as error:
        raise _NotCompiledError(f"CC cannot be read: {error}; set CC to a C compiler") from error
    found = command or [one for one in (shutil.which("gcc"), shutil.which("cc")) if one][:1]
    if not found:
        raise _NotCompiledError("no C compiler found: install gcc, or set CC to one")
    return found


def _load(path: Path, compiler: list[str]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "undefined symbol" not in str(error):
            raise
        path.unlink(missing_ok=True)
        raise _NotCompiledError(
            f"the object that {compiler[0]} has made cannot be loaded: {error}; set CC to gcc"
        ) from error


def _compile(compiler: list[str], target: Path) -> Path:
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            unlinked, shared = f"{directory}/kernels.o", f"{directory}/kernels.so"
            for arguments in (["-c", *_FLAGS, str(SOURCE), "-o", unlinked], ["-shared", unlinked, "-lm", "-o", shared]):
                subprocess.run([*compiler, *arguments], check=True, capture_output=True, text=True)
            os.replace(shared, target)  # whole or not at all, also if several processes compile at the same time
    return target


def _cache() -> Path:
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "inflight"
    if not path.is_absolute():
        raise OSError(f"{path} cannot be used: it is not an absolute path")
    return path


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"inflight-kernels-{os.getuid()}"


def _make_directory(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)


def _make_private(directory: Path) -> None:
    """Make a directory of this user alone: others can write to its parent, and its content will be executed."""
    directory.mkdir(0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError("others than this user can write there")


def _processor() -> str:
    """Return the properties that -march=native depends on."""
    try:
        with open("/proc/cpuinfo") as file:
            return "".join(sorted({line for line in file if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor()
