"""Tiny configurations of architectures in which something differs from Llama, by name; and models of them with weights
that are large enough for every part to show."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BertGenerationConfig,
    BigBirdPegasusConfig,
    CohereConfig,
    DogeConfig,
    Ernie4_5Config,
    ErnieConfig,
    Exaone4Config,
    FalconConfig,
    FlexOlmoConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GitConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MptConfig,
    NemotronConfig,
    Olmo3Config,
    PegasusConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    RobertaConfig,
    SmolLM3Config,
    T5Config,
)
from transformers.models.emu3.configuration_emu3 import Emu3TextConfig

VOCABULARY = 199
CONTEXT = 128

_BASE = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 7,
    "pad_token_id": 1,
}
_SHAPE = {
    **_BASE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
_GEMMA = {
    **_SHAPE,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_ENCODER = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_BART = {
    **_BASE,
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "max_position_embeddings": 256,
}
_FALCON = {**_BASE, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}

RIGHT: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2_moe-sliding": lambda: Qwen2MoeConfig(
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
        num_experts=4,
        shared_expert_intermediate_size=32,
        **_EXPERTS,
        **_SHAPE,
    ),
    "phimoe-sliding": lambda: PhimoeConfig(num_local_experts=4, num_experts_per_tok=2, sliding_window=8, **_SHAPE),
    "ministral3": lambda: Ministral3Config(
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        },
        **_SHAPE,
    ),
    "smollm3": lambda: SmolLM3Config(no_rope_layer_interval=2, **_SHAPE),
    "smollm3-sliding": lambda: SmolLM3Config(
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **_SHAPE,
    ),
    "glm": lambda: GlmConfig(head_dim=16, **_SHAPE),
    "ernie4_5": lambda: Ernie4_5Config(head_dim=16, **_SHAPE),
    "olmo3": lambda: Olmo3Config(sliding_window=8, **_SHAPE),
    "exaone4-sliding": lambda: Exaone4Config(sliding_window=8, sliding_window_pattern=2, **_SHAPE),
    "llama4_text-full": lambda: Llama4TextConfig(
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=8192,
        attn_temperature_tuning=False,
        layer_types=["full_attention"] * 4,
        **_SHAPE,
    ),
    "llama4_text": lambda: Llama4TextConfig(
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=96,
        floor_scale=120,
        **_SHAPE,
    ),
    "llama-dynamic": lambda: LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        **(_SHAPE | {"max_position_embeddings": 96}),
    ),
    "granite": lambda: GraniteConfig(
        embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0, attention_multiplier=0.2, **_SHAPE
    ),
    "nemotron": lambda: NemotronConfig(head_dim=16, **_SHAPE),
    "gemma3n_text": lambda: Gemma3nTextConfig(
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
        laurel_rank=8,
        **_GEMMA,
    ),
    "gemma4_text": lambda: Gemma4TextConfig(
        global_head_dim=32,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        **_GEMMA,
    ),
    "gemma4_text-large": lambda: Gemma4TextConfig(
        global_head_dim=32,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=30.0,
        **_GEMMA,
    ),
    "flex_olmo": lambda: FlexOlmoConfig(num_experts=4, num_experts_per_tok=2, **_SHAPE),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=256, **_BASE),
    "cohere": lambda: CohereConfig(logit_scale=0.25, **_SHAPE),
    "bert-decoder": lambda: BertConfig(is_decoder=True, **_ENCODER),
}
"""What the engine and the trainer compute as Transformers does."""

REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "gpt_neo": (
        lambda: GPTNeoConfig(
            hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], **_BASE
        ),
        "GPTNeoForCausalLM does not take its attention from Transformers' attention interface",
    ),
    "falcon-new": (
        lambda: FalconConfig(new_decoder_architecture=True, num_kv_heads=2, alibi=False, **_FALCON),
        "FalconForCausalLM does not take its attention",
    ),
    "falcon-mqa": (lambda: FalconConfig(multi_query=True, **_FALCON), "FalconForCausalLM does not take its attention"),
    "falcon-alibi": (lambda: FalconConfig(alibi=True, **_FALCON), "FalconForCausalLM does not take its attention"),
    "mpt": (
        lambda: MptConfig(d_model=64, n_layers=2, n_heads=4, max_seq_len=256, **_BASE),
        "MptForCausalLM .*MptAttention",
    ),
    "git": (
        lambda: GitConfig(
            vision_config={
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "image_size": 32,
                "patch_size": 16,
            },
            **_ENCODER,
        ),
        "GitForCausalLM does not take its attention",
    ),
    "t5": (
        lambda: T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, **_BASE),
        "t5 is an encoder and a decoder",
    ),
    "bart-decoder": (lambda: BartConfig(**_BART), "BartForCausalLM cannot be run.*position_ids"),
    "pegasus": (lambda: PegasusConfig(**_BART), "PegasusForCausalLM cannot be run.*position_ids"),
    "bigbird_pegasus": (lambda: BigBirdPegasusConfig(**_BART), "BigBirdPegasusForCausalLM cannot be run.*position_ids"),
    "emu3": (lambda: Emu3TextConfig(**_SHAPE), "emu3_text_model is no causal language model"),
    "bert": (lambda: BertConfig(**_ENCODER), "BertLMHeadModel is no causal decoder"),
    "roberta": (lambda: RobertaConfig(**_ENCODER), "RobertaForCausalLM is no causal decoder"),
    "bert-generation": (lambda: BertGenerationConfig(**_ENCODER), "BertGenerationDecoder is no causal decoder"),
    "ernie": (lambda: ErnieConfig(**_ENCODER), "ErnieForCausalLM is no causal decoder"),
    "doge": (lambda: DogeConfig(num_experts=4, keep_window_size=8, **_SHAPE), "DogeForCausalLM .*mask of its own"),
}
"""What the engine refuses, and how it says so."""


def large_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model with matrices of standard deviation 0.2 and norms and biases that are not at their 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else parameter + 0.3 * noise)
    return model.eval()


def make_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """fp32, with Transformers' eager attention."""
    torch.manual_seed(seed)
    return large_weights(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager"), seed
    )
