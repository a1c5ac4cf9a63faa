"""A kernel of `kernel_bench.py`, the machine that it runs on, and the libraries that also compute it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from statistics import median
from typing import Any

import torch

BF16, FP32 = torch.bfloat16, torch.float32
REPEATS = 25
COMPILE_UNTIL_S = 33.0
"""Seconds after the start from which on no other peer is compiled, so that all ends within about 45."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    tokens: int = 16_384
    decode: int = 256
    hidden: int = 4096
    intermediate: int = 12_288
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    contexts: tuple[int, int] = (100, 1124)
    """Tokens of the sequences that decode, drawn uniformly."""
    chunks: tuple[int, int] = (4, 512)
    """Number of chunks of prompts in a pass, and number of tokens of each."""
    vocab: int = 151_936
    logprob_rows: int = 4096
    copied: tuple[int, ...] = (151_936 * 4096, *[4096 * 4096] * 16, *[4096] * 16)
    rank: int = 16
    adapters: int = 8
    copy_bytes: int = 4 << 30
    matmul: int = 8192
    flush_bytes: int = 1 << 30


SMALL = Sizes(
    tokens=24,
    decode=4,
    hidden=64,
    intermediate=96,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    contexts=(3, 40),
    chunks=(2, 5),
    vocab=1500,
    logprob_rows=6,
    copied=(3000, 64),
    rank=4,
    adapters=2,
    copy_bytes=1 << 16,
    matmul=32,
    flush_bytes=1 << 10,
)

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    shape: str
    dtype: str = "bfloat16"
    num_bytes: int
    """Bytes that one call reads and writes, counted by hand."""
    is_long: bool = True
    """True if moving the bytes takes longer than launches and one way to memory and back; if not, the share of the
    ceiling says nothing."""
    num_flops: float = 0.0
    """Of a kernel that is bound by them."""
    ours: Call
    error: Callable[[], float]
    tolerance: float = 1e-2
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    """Maps a peer to a function that makes its call ready, and raises where it cannot."""


@dataclass(frozen=True, slots=True)
class Machine:
    device: torch.device
    sizes: Sizes
    began_s: float

    @property
    def capability(self) -> int:
        """The major compute capability; 0 for a CPU."""
        return torch.cuda.get_device_capability(self.device)[0] if self.device.type == "cuda" else 0

    def random(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device, dtype=FP32) * scale).to(dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, below, shape, device=self.device)

    def ms(self, call: Call) -> float:
        """Return the median over calls, after two that are not counted."""
        for _ in range(2):
            call()
        if self.device.type == "cpu":
            return 1e3 * median(_wall_s(call) for _ in range(3))
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        other = _flush_buffer(self)
        for began, ended in spans:
            other.sum()  # reads, so that nothing is left in the cache that has yet to be written
            began.record()
            call()
            ended.record()
        torch.cuda.synchronize()
        return median(began.elapsed_time(ended) for began, ended in spans)


def _wall_s(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@cache
def _flush_buffer(machine: Machine) -> torch.Tensor:
    return torch.zeros(machine.sizes.flush_bytes // 4, dtype=FP32, device=machine.device)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖result − expected‖ / ‖expected‖ in fp64; infinite if something is not finite."""
    difference = float(torch.linalg.vector_norm(result.double() - expected.double()))
    norm = float(torch.linalg.vector_norm(expected.double()))
    error = difference / norm if norm else difference
    return error if math.isfinite(error) else math.inf


def compiled(machine: Machine, function: Callable[..., Any]) -> Callable[..., Any]:
    if machine.device.type == "cpu":
        return function  # a rehearsal: it would need a C++ compiler
    if time.perf_counter() - machine.began_s > COMPILE_UNTIL_S:
        raise TimeoutError(f"not compiled: {COMPILE_UNTIL_S:.0f} s were over")
    return torch.compile(function, dynamic=False)


def liger_op(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


def flashinfer_module(module: str, generator: str, *arguments: str) -> Any:
    """Import a module of FlashInfer whose kernels are compiled already."""
    require_compiled(module, generator, *arguments)
    return import_module(f"flashinfer.{module}")


def require_compiled(module: str, generator: str, *arguments: Any) -> None:
    specification = getattr(import_module(f"flashinfer.jit.{module}"), generator)(*arguments)
    if not specification.is_aot:
        raise RuntimeError("its kernels would be compiled first, which takes minutes")
