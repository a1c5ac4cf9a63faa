"""What the generic way of making a configuration small does not know, and the variants of families that matter."""

from typing import Any

_ATTENTION_ONLY = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}


def _mrope(*section: int) -> dict[str, Any]:
    """Make the override for pairs of a head's numbers by the axes of multimodal positions."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}}


_MROPE = _mrope(4, 2, 2)
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.6,
    "logits_scaling": 0.3,
}
_SPARSE = {"index_n_heads": 32, "index_topk": 128}
"""The longest sequence has as many tokens, so that all keys are chosen. With fewer, an index score of exactly 0 would
leave the choice open if there were few heads."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "axk2": _SPARSE,
    "bailing_hybrid": {"num_experts": 16},
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 3.0, "kv_n_heads": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_v32": _SPARSE,
    "deepseek_v4": {**_SPARSE, "head_dim": 64},
    "dory": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        **_SPARSE,
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "dots3_note": {"vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6,
        "num_kv_shared_layers": 2, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
        "laurel_rank": 8},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2}},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2}},
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm5_next_text": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "granitemoehybrid": {"mamba_d_head": 32, **_MULTIPLIERS},
    "granitemoeshared": {"shared_intermediate_size": 48, **_MULTIPLIERS},
    "hy_v4": _SPARSE,
    "hy_v4_vl": {"text_config": _mrope(2, 1, 1)},
    "hy_v4_vl_text": _SPARSE,
    "jamba": {"attn_layer_offset": 1},
    "kolibri1": {"num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32, "num_heads": 4},
    "mistral_large4_text": _SPARSE,
    "nemotron": {"num_key_value_heads": 2},
    **{name: {"text_config": _MROPE} for name in ("glm4v", "glm46v", "glm_ocr", "glmga", "qwen2_5_omni_thinker")},
    "glm4v_moe": {"text_config": _mrope(2, 1, 1)},
    "hunyuan_vl": {"text_config": _mrope(2, 2, 2, 2)},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 2]}},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}, "vision_config": {"out_hidden_size": 64}},
    "kyutai_speech_to_text": {"audio_pad_token_id": 6, "audio_bos_token_id": 7},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 3}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE, "vision_config": {"hidden_size": 64}},
    "paddleocr_vl": {"text_config": _MROPE},
    "qwen4_exp_text": {"indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "split_ngram_parts": 2},
    "reformer": {"hash_seed": 0, "is_decoder": True, "axial_pos_shape": (16, 16), "axial_pos_embds_dim": (32, 32)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "attention_hidden_size": 128, "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"]},
}  # fmt: skip


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """Make the override for rotary parameters of this type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


_LONGROPE = rope(
    "longrope",
    original_max_position_embeddings=128,
    factor=2.0,
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.3 * i for i in range(8)],
)
MSCALED = {"rope_parameters": {**_LONGROPE["rope_parameters"], "short_mscale": 1.2, "long_mscale": 1.3}}
YARN = rope("yarn", factor=8.0, original_max_position_embeddings=16)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_ROPES: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "llama3": LLAMA3,
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=4.0),
    "longrope": _LONGROPE,
    "partial": rope("default", partial_rotary_factor=0.5),
}
_SLIDING = {"sliding_window": 8}
_NO_SLIDING: dict[str, Any] = {"sliding_window": None}
_QWEN_SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None}
_FIRST_SLIDES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
TIED = {"tie_word_embeddings": True}
_BIDIRECTIONAL = {"use_bidirectional_attention": True}
_DECODER = {"is_decoder": True}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        **_ROPES,
        "longrope-short": {"rope_parameters": {**_LONGROPE["rope_parameters"], "original_max_position_embeddings": 32}},
        "bias": {"attention_bias": True, "mlp_bias": True},
        "tied": TIED,
        "mqa": {"num_key_value_heads": 1},
        "mha": {"num_key_value_heads": 4},
        "headdim": {"head_dim": 32},
        "gelu": {"hidden_act": "gelu"},
        "relu": {"hidden_act": "relu"},
        "one-layer": {"num_hidden_layers": 1},
    },
    "mistral": {"nosliding": _NO_SLIDING, "yarn": YARN, "tied": TIED},
    "mistral3": {"ministral3": {"text_config": {"model_type": "ministral3"}}},
    "mixtral": {"sliding": _SLIDING},
    "ministral3": {"sliding": _SLIDING, "yarn": {}},
    "qwen2": {"sliding": _QWEN_SLIDING, "yarn": YARN, "tied": TIED, "dynamic": _ROPES["dynamic"]},
    "qwen2_moe": {"sliding": _QWEN_SLIDING, "dense-layers": {"mlp_only_layers": [1]}},
    "qwen3": {"sliding": _QWEN_SLIDING, "bias": {"attention_bias": True}, "tied": TIED, "yarn": YARN},
    "qwen3_moe": {
        "sliding": _QWEN_SLIDING,
        "dense-layers": {"mlp_only_layers": [0, 2]},
        "normed": {"norm_topk_prob": True},
    },
    "phi": {"qknorm": {"qk_layernorm": True}},
    "phi3": {
        "sliding": _SLIDING,
        "partial": rope("default", partial_rotary_factor=0.5),
        "longrope": {**_LONGROPE, "original_max_position_embeddings": 128},
        "longrope-short": _LONGROPE,
    },
    "phimoe": {"sliding": _SLIDING, "longrope": MSCALED, "head-bias": {"lm_head_bias": True}},
    "doge": {"sliding": _SLIDING, "moe": {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2}},
    "starcoder2": {"nosliding": _NO_SLIDING, "sliding": _SLIDING, "nobias": {"use_bias": False}},
    "smollm3": {
        "sliding": {"use_sliding_window": True, "sliding_window": 8, **_FIRST_SLIDES},
        "all-rope": {"no_rope_layers": [1, 1, 1, 1]},
        "norope": {"no_rope_layers": [0, 1, 0, 0]},
        "yarn": YARN,
    },
    "seed_oss": {"bias": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}},
    "stablelm": {
        "qknorm-parallel": {"qk_layernorm": True, "use_parallel_residual": True},
        "bias": {"use_qkv_bias": True},
    },
    "falcon": {
        "alibi": {"alibi": True},
        "alibi-sequential": {"alibi": True, "parallel_attn": False},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "new-one-norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "mqa": {"multi_query": True},
        "mha": {"multi_query": False, "num_kv_heads": 4, "bias": True},
        "sequential": {"parallel_attn": False},
    },
    "mpt": {
        "clip": {"attn_config": {"clip_qkv": 2.0}},
        "noalibi": {"attn_config": {"alibi": False}},
    },
    "gpt2": {
        "inverse-scale": {"scale_attn_by_inverse_layer_idx": True},
        "unscaled": {"scale_attn_weights": False},
        "reorder": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
        "untied": {"tie_word_embeddings": False},
    },
    "gpt_bigcode": {"mha": {"multi_query": False}},
    "gpt_neo": {
        "global": {"attention_types": [[["global"], 4]]},
        "local": {"attention_types": [[["local"], 4]]},
    },
    "gpt_neox": {"sequential": {"use_parallel_residual": False}, "nobias": {"attention_bias": False}},
    "gemma": {"bidirectional": _BIDIRECTIONAL},
    "gemma2": {"bidirectional": _BIDIRECTIONAL, "nocap": {"attn_logit_softcapping": None}},
    "gemma3_text": {
        "bidirectional": _BIDIRECTIONAL,
        "softcap": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    },
    "gemma3n_text": {"shared-none": {"num_kv_shared_layers": 0}},
    "gemma4_text": {
        "moe": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
        "bidirectional": {"use_bidirectional_attention": "all"},
    },
    "vaultgemma": {"bidirectional": _BIDIRECTIONAL},
    "olmo": {"clip": {"clip_qkv": 1.0}},
    "olmoe": {"clip": {"clip_qkv": 1.0}, "normed": {"norm_topk_prob": True}},
    "olmo2": {"yarn": YARN},
    "olmo3": {"nosliding": _ATTENTION_ONLY},
    "deepseek_v2": {
        "noqlora": {"q_lora_rank": None},
        "groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
        "dense": {"first_k_dense_replace": 4},
    },
    "deepseek_v3": {
        "noqlora": {"q_lora_rank": None},
        "yarn": rope("yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        "uninterleaved": {"rope_interleave": False},
    },
    "deepseek_v32": {"short": {"index_topk": 8}},
    "glm_moe_dsa": {"shared": {"indexer_types": ["full", "shared", "full", "shared"]}},
    "cohere": {"qknorm": {"use_qk_norm": True}},
    "cohere2": {"nosliding": _ATTENTION_ONLY},
    "cohere_compass_text": {
        "sliding": {
            **_FIRST_SLIDES,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": None,
            },
        }
    },
    "exaone4": {"nosliding": {"sliding_window": None, "layer_types": ["full_attention"] * 4}},
    "glm4_moe": {"qknorm": {"use_qk_norm": True}},
    "granitemoehybrid": {
        "attention": {"layer_types": ["attention"] * 4},
        "attention-rope": {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    },
    "hunyuan_v1_dense": {"alpha": rope("dynamic", factor=1.0, alpha=100.0)},
    "llama4_text": {
        "full": {**_ATTENTION_ONLY, "no_rope_layers": [1, 0, 1, 0]},
        "full-rope": {**_ATTENTION_ONLY, "no_rope_layers": [1, 1, 1, 1]},
        "dense": {**_ATTENTION_ONLY, "moe_layers": []},
    },
    "minimax": {"attention": _ATTENTION_ONLY},
    "nemotron": {"bias": {"attention_bias": True, "mlp_bias": True}},
    "opt": {
        "postnorm": {"do_layer_norm_before": False},
        "projected": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
        "nobias": {"enable_bias": False, "layer_norm_elementwise_affine": False},
    },
    "persimmon": {"noqknorm": {"qk_layernorm": False}},
    "qwen3_next": {"attention": _ATTENTION_ONLY},
    "qwen3_5_text": {"attention": _ATTENTION_ONLY},
    "qwen3_5_moe_text": {"attention": _ATTENTION_ONLY},
    "lfm2": {"attention": _ATTENTION_ONLY},
    "modernbert-decoder": {"full": _ATTENTION_ONLY},
    "gpt_oss": {"full": _ATTENTION_ONLY},
    "ernie4_5_moe": {"bias": {"use_bias": True}},
    "helium": {"bias": {"attention_bias": True, "mlp_bias": True}},
    **{
        family: {"decoder": _DECODER}
        for family in (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
            "xmod", "prophetnet",
        )
    },
    "xlm": {"causal": {"causal": True}},
    "xlnet": {"uni": {"attn_type": "uni"}},
}  # fmt: skip

CANNOT_BE_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "its text model must share all layers, and refuses to",
    "musicgen": "its class takes the configuration of the decoder, and AutoModelForCausalLM gives it the whole",
    "musicgen_melody": "as musicgen",
}
"""Registered as causal language models, and Transformers 5.23 itself cannot make one; the engine refuses them."""
