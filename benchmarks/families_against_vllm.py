"""Compares our engine with vLLM's CPU version for models of many families.

    python benchmarks/families_against_vllm.py [FILE] [NAME …]

All models have the width, the layers and the vocabulary of `small`, and random weights in fp32. `inflight bench
throughput --peer vllm` draws SEQUENCES × TOKENS tokens after prompts of PROMPT tokens, in alternation. A ratio is ours
over vLLM's tokens per second, the median over pairs. A family that vLLM's CPU version does not run has the last line
of its error. `make peers` installs vLLM.
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

import torch
from harness import finish
from transformers import AutoConfig, AutoModelForCausalLM

from inflight.engine.model.shapes import shape_config

SEQUENCES, PROMPT, TOKENS, PAIRS = 16, 128, 96, 3
LIMIT_S = 600
SMALL = shape_config("small")
SIZES: dict[str, Any] = {
    name: getattr(SMALL, name)
    for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "eos_token_id", "pad_token_id",
    )
} | {"bos_token_id": 1}  # fmt: skip
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
LATENT = {"q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 384},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 384},
    "deepseek_v3": {
        **LATENT, "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8, "head_dim": 64,
        "topk_method": "noaux_tc",
    },
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 384},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        "layer_types": (["mamba"] * 3 + ["attention"]) * 2, "mamba_n_heads": 16, "mamba_d_head": 64,
        "mamba_d_state": 64, "num_local_experts": 0, "shared_intermediate_size": 1536,
    },
    "falcon_h1": {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "mlp", "attention", "mlp"],
        "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1,
    },
    "lfm2": {
        "layer_types": (["conv"] * 3 + ["full_attention"]) * 2, "block_auto_adjust_ff_dim": False,
        "conv_dim": SIZES["hidden_size"], "block_dim": SIZES["hidden_size"],
    },
}  # fmt: skip


def compare(name: str, directory: str) -> dict[str, Any]:
    """Return tokens per second of both engines, or the reason why one did not run."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES | FAMILIES[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    sizes = ["--sequences", str(SEQUENCES), "--prompt-tokens", str(PROMPT), "--tokens", str(TOKENS)]
    command = [sys.executable, "-m", "inflight.tools.cli", "bench", "throughput", "--model", directory, *sizes]
    command += ["--dtype", "float32", "--device", "cpu", "--pairs", str(PAIRS), "--peer", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
        return {"refused": (reasons or done.stderr.splitlines() or [""])[-1][:300]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {key: found[key] for key in ("tokens_per_s", "peer_tokens_per_s", "ratio")}


def main() -> None:
    results: dict[str, Any] = {}
    for name in sys.argv[2:] or FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            try:
                results[name] = compare(name, directory)
            except subprocess.TimeoutExpired:
                results[name] = {"refused": f"no result within {LIMIT_S} s"}
        print(name, results[name], flush=True)
    sizes = {"sequences": SEQUENCES, "prompt_tokens": PROMPT, "tokens": TOKENS, "pairs": PAIRS}
    finish("families-against-vllm", {**sizes, "families": results})


if __name__ == "__main__":
    main()
