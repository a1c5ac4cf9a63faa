"""Triton kernels: right in the interpreter, and compiled for every supported GPU, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from inflight_kernels import _selective_logprob_triton as kernels
from inflight_kernels import selective_logprobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PARITY = Path(__file__).with_name("kernel_parity.py")


def test_kernels_equal_their_references_in_the_interpreter():
    subprocess.run([sys.executable, PARITY, "cpu"], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_kernels_equal_their_references_on_the_gpu():
    subprocess.run([sys.executable, PARITY, "cuda"], check=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_compile_for_the_gpu(capability, dtype):
    floats = dict.fromkeys(("temperatures", "logprobs", "lses", "grads"), "*fp32")
    types = {
        "logits": f"*{dtype}",
        "grad_logits": f"*{dtype}",
        "tokens": "*i64",
        "stride_n": "i32",
    } | floats
    for kernel in (kernels.forward_kernel, kernels.backward_kernel):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs={"V": 151_936, "BLOCK": kernels.BLOCK_V})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert f"sm_{capability}" in compiled.asm["ptx"]
        assert len(compiled.asm["cubin"]) > 1000


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"expected logits \[N, V\].* got \[2, 3\], \[3\] and \[2\]"):
        selective_logprobs(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), torch.ones(2))
