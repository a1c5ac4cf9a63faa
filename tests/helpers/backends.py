"""Engines of every backend over one small model. On a GPU they run there, in fp32 or INFLIGHT_TEST_DTYPE."""

import os

import pytest
import torch
from peers_python import PEERS_PYTHON
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

import inflight

BACKENDS = ["inflight", pytest.param("vllm", marks=pytest.mark.peers)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = os.environ.get("INFLIGHT_TEST_DTYPE", "float32")
TOLERANCE = 0.8 if DTYPE == "bfloat16" else 0.03 if DEVICE == "cuda" else 5e-5
"""In nats. Attention kernels of vLLM multiply in TF32 on a GPU."""
FAR = 1.0
"""In nats. Weights of another version have a larger error."""


def make_tied() -> PreTrainedModel:
    """One with tied embeddings, whose output layer vLLM packs on its own, and heads of a size that it has."""
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=3,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=199,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=7,
        pad_token_id=None,
        initializer_range=0.2,  # peaked enough that distributions differ from position to position
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    return model


def launch(model: str, backend: str, **options) -> inflight.Engine:
    if backend == "vllm":
        options = {"backend_python": PEERS_PYTHON, "cuda_graphs": False, "answer_timeout_s": 120.0} | options
    defaults = {"backend": backend, "max_sequences": 16, "max_context": 128, "threads": 1, "dtype": DTYPE}
    if DEVICE == "cuda":
        # Several engines share the GPU, and vLLM refuses to measure free memory while others allocate or free it.
        defaults |= {"kv_cache_fraction": 0.05, "kv_cache_tokens": 4096}
    return inflight.launch(model, **(defaults | options))
