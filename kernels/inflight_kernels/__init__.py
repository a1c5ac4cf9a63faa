"""Triton kernels of inflight, each beside its plain PyTorch reference."""
