"""Receives weights by NCCL from a trainer that uses vLLM's protocol."""
