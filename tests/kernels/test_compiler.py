"""What runs where the C kernels cannot be compiled."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import logging, torch
logging.basicConfig(level=logging.WARNING)
from inflight_kernels import Norm, _cpu, gated_activation, linear, rms_norm
from inflight_kernels.attention import empty_cache_for_cpu, paged_attention
torch.manual_seed(0)
keys, values = empty_cache_for_cpu(3, 2, 32, 32, torch.float32)
keys.normal_()
values.normal_()
query, x, weight = torch.randn(2, 4, 32), torch.randn(5, 64), torch.randn(64)
table, starts, contexts = (torch.tensor(ids, dtype=torch.int32) for ids in ([[1, 2]], [0, 2], [20]))
results = [
    paged_attention(query, keys, values, table, starts, contexts, scale=0.2),
    linear(x, torch.randn(8, 64)),
    rms_norm(x, Norm(weight, 1e-6)),
    gated_activation(x, "silu"),
]
print(_cpu.library() is not None, [round(float(r.sum()), 3) for r in results])
"""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        pytest.param({"INFLIGHT_NO_C": "1"}, "", marks=pytest.mark.slow),
        ({"CC": "/bin/false"}, "no C kernels"),
        pytest.param({"CC": "/no/such/gcc"}, "no C kernels", marks=pytest.mark.slow),
    ],
)
def test_without_a_compiler_pytorch_computes_the_same(tmp_path, environment, message):
    base = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=base | more, capture_output=True, text=True, check=True)
        for more in ({}, environment)
    ]
    assert runs[0].stdout.startswith("True")
    assert runs[1].stdout == runs[0].stdout.replace("True", "False", 1)
    assert message in runs[1].stderr
