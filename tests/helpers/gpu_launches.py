"""What a GPU would be given: the launches of the library's Triton kernels at any shape, compiled without a GPU.

Meta tensors have shapes, strides and dtypes but no memory, so a real shape costs nothing. Triton's own code specialises
a launch as it would on a GPU, by the alignment of pointers and by which integers are 1 or multiples of 16.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one program may have, or its launch fails: H100, H200 and B200 have 227 KiB, an A100 163, but
GPUs of compute capability 8.6 and 8.9, which take the same code, have 99 (CUDA C++ Programming Guide, compute
capabilities)."""


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def compiled(self, capability: int) -> Any:
        """As `JITFunction.run` compiles it for sm_<capability>."""
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, options = binder(*self.arguments, **self.options, debug=False)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, self.options, bound, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=options.__dict__)


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one thread, but for the shared memory, which is a program's."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches made inside, none of which runs."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, grid, arguments, options))

    with patch.object(JITFunction, "run", record):
        yield launches


def launches_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Launch]:
    with recorded() as launches:
        function(*arguments, **options)
    return launches


@cache
def _tool(name: str) -> Path:
    """Of NVIDIA's tools in Triton's wheel."""
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def resources(compiled: Any, directory: Path) -> Resources:
    """From the binary itself."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([_tool("cuobjdump"), "--dump-resource-usage", cubin], capture_output=True, text=True)
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage.stdout)[1]) for key in ("REG", "STACK", "LOCAL"))
    return Resources(registers, stack + local, compiled.metadata.shared)


def sass(compiled: Any, directory: Path) -> str:
    """The machine code in NVIDIA's notation."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return subprocess.run([_tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
