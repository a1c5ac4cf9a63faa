"""Triton kernels of inflight, each beside its plain PyTorch reference.

Importing this package needs no GPU and no Triton; a function takes the kernel for CUDA tensors and the reference for
all others.
"""

from inflight_kernels.selective_logprob import selective_logprobs, selective_logprobs_reference

__all__ = ["selective_logprobs", "selective_logprobs_reference"]
