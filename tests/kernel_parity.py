"""Kernels against their references, on the device named by the first argument.

`TRITON_INTERPRET=1 python kernel_parity.py cpu` runs the kernels in Triton's interpreter; on a GPU, without it, they
run compiled.
"""

import sys

import torch
from inflight_kernels import selective_logprobs_reference
from inflight_kernels._selective_logprob_triton import SelectiveLogprobs


def check_selective_logprobs(device: str, dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (torch.randn(rows, vocabulary + 5, generator=generator) * 3)[:, 2:-3]  # rows that do not lie end to end
    logits[0, 0] = -torch.inf
    tokens = torch.randint(1, vocabulary, (rows,), generator=generator).to(device)
    temperatures = torch.empty(rows).uniform_(0.3, 2, generator=generator).to(device)
    grads = torch.randn(rows, generator=generator).to(device)
    results = []
    for function in (SelectiveLogprobs.apply, selective_logprobs_reference):
        leaf = logits.to(device, dtype).requires_grad_()
        out = function(leaf, tokens, temperatures)
        out.backward(grads)
        results.append((out.detach(), leaf.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocabulary in ((1, 7), (3, 4096), (5, 9001)):
            check_selective_logprobs(sys.argv[1], dtype, rows, vocabulary)
    print("kernels agree with their references")
