"""Measures latent attention against another checkout, and counts the bytes of a token in the cache.

    python benchmarks/latent_cache.py CHECKOUT [FILE]

The model has the sizes of `small`, with the attention of DeepSeek V3 and without experts. `bench throughput` draws from
it in both checkouts in alternation (`against.py`): short prompts, then long ones.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import against
import torch
from harness import finish
from transformers import AutoModelForCausalLM, DeepseekV3Config

from inflight.engine.cache.classify import classify_layers
from inflight.engine.model.attention.hook import ATTENTION_NAME

SIZES: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 8, "first_k_dense_replace": 8, "intermediate_size": 1536,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 8192,
    "max_position_embeddings": 4096, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
RUNS = {
    "decoding": "--dtype float32 --sequences 16 --tokens 96 --prompt-tokens 32 --pairs 2",
    "decoding in bf16": "--dtype bfloat16 --sequences 16 --tokens 96 --prompt-tokens 32 --pairs 2",
    "long prompts": "--dtype float32 --sequences 4 --tokens 32 --prompt-tokens 1024 --pairs 1",
}
against.PAIRS = 3


def token_bytes(config: DeepseekV3Config) -> dict[str, int]:
    """Bytes of a token in a cache in bf16, with latents and with the keys and values of all heads."""
    small = DeepseekV3Config(**{**config.to_dict(), **{name: SIZES[name] for name in ("hidden_size", "vocab_size")}})
    small.num_hidden_layers = small.first_k_dense_replace = 1
    model = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    [layer] = classify_layers(model).attention
    per_head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    numbers = {"latents": layer.token_dim, "keys_and_values": config.num_attention_heads * per_head}
    return {name: count * config.num_hidden_layers * 2 for name, count in numbers.items()}


def main() -> None:
    other = Path(sys.argv.pop(1)).resolve()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=other, capture_output=True, text=True, check=True).stdout
    config, published = DeepseekV3Config(**SIZES), DeepseekV3Config()
    result: dict[str, Any] = {"other_commit": commit.strip(), "pairs": against.PAIRS, "sizes": SIZES}
    result["token_bytes"] = {"this model": token_bytes(config), "DeepSeek V3": token_bytes(published)}
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
        for name, arguments in RUNS.items():
            result[name] = against.compare(other, f"throughput --model {directory} {arguments}", ["tokens_per_s"])
    finish("latent-cache", result)


if __name__ == "__main__":
    main()
