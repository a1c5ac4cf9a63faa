OVERRIDES = {
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"mamba_d_head": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "mamba2": {"head_dim": 32, "num_heads": 4},
    "jamba": {"attn_layer_offset": 1},
    "reformer": {"is_decoder": True},
}
VARIANTS = {}
