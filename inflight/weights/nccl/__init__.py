"""Receives weights by NCCL from a trainer that speaks vLLM's protocol."""
