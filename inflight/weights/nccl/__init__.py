"""Weights that a trainer sends by NCCL as it sends them to vLLM: how to meet it, and how its tensors lie in buffers."""
