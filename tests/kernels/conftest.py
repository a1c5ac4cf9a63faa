"""The C kernels as they are compiled for this processor, and for older ones that it can act as."""

import functools
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from inflight_kernels import _cpu

NEEDS = {
    "native": set(),
    "haswell": {"avx2", "fma", "bmi2", "movbe"},
    "skylake-avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
"""Maps what the compiler calls a processor to what /proc/cpuinfo must have of it."""


def has(processor: str) -> bool:
    return NEEDS[processor] <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.fixture(scope="module", params=[*filter(has, NEEDS)])
def processor(request: pytest.FixtureRequest) -> Iterator[None]:
    flags = [f"-march={request.param}" if flag.startswith("-march=") else flag for flag in _cpu._FLAGS]
    library = functools.cache(_cpu.library.__wrapped__)
    with patch.object(_cpu, "_FLAGS", tuple(flags)), patch.object(_cpu, "library", library):
        assert _cpu.library() is not None, "these tests would compare PyTorch with itself"
        yield
