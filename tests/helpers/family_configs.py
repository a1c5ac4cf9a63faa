"""Tiny configurations of every model family that the installed Transformers registers as a causal language model.

A family's configuration starts from the defaults of its class. Whatever makes a model large is made small by the name
of the attribute; of attributes with a value per layer, layers are chosen so that every kind of layer is there. Windows,
chunks and the lengths at which positions are scaled lie far below the lengths of the sequences that are tried.
"""

import copy
import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from family_overrides import OVERRIDES, VARIANTS
from family_published import OF_ANOTHER_KIND
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

VOCABULARY = 199
MAX_CONTEXT = 128
"""Tokens of the longest sequence that is tried."""
WINDOW = 8
LAYERS = 4

_OTHERS = (
    (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, modeling_auto.AutoModelForImageTextToText),
    (modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, modeling_auto.AutoModelForMultimodalLM),
    (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, modeling_auto.AutoModelForSeq2SeqLM),
    (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.AutoModelForMaskedLM),
)

_SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd emb_dim dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size "
    "output_embedding_size backbone_hidden_size lru_width attention_hidden_size hidden_size_global embed_dim",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads attention_heads swa_num_attention_heads "
    "linear_num_value_heads linear_num_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts mamba_n_heads mamba_num_heads moe_layer_end_index zero_expert_num "
    "num_centroids rel_extent max_window_layers conv_L_cache",
    2: "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
    "num_experts_per_token moe_topk moe_k moe_top_k n_group num_expert_group n_groups o_groups hc_mult hc_count "
    "mamba_n_groups global_attn_every_n_layers sliding_window_pattern no_rope_layer_interval layer_group_size "
    "attn_layer_period expert_layer_period shared_expert_sink_count hc_sinkhorn_iters attn_layer_offset "
    "num_hash_layers layer_types_period num_layers_per_stack H_cycles L_cycles depth",
    1: "topk_group first_k_dense_replace num_dense_layers moe_layer_start_index num_nextn_predict_layers "
    "num_shared_experts n_shared_experts moe_num_shared_experts num_mtp_layers num_kv_shared_layers "
    "moe_layer_interval",
    16: "head_dim v_head_dim qk_nope_head_dim kv_channels swa_head_dim index_head_dim indexer_head_dim dim_head d_kv "
    "d_head attention_head_dim attention_head_size linear_head_dim linear_key_head_dim linear_value_head_dim "
    "kv_lora_rank q_lora_rank o_lora_rank gated_norm_rank hc_lowrank hidden_size_per_layer_input ple_embed_dim "
    "mamba_d_head mamba_head_dim mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank "
    "attention_chunk_size floor_scale mamba_chunk_size chunk_size global_head_dim block_size rotary_dim d_rel "
    "log_scaling_n_floor original_max_position_embeddings",
    8: "qk_rope_head_dim window_size sliding_window sliding_window_size attention_window_size local_attention "
    "index_topk keep_window_size index_block_size local_attn_chunk_length lsh_attn_chunk_length",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner d_ff dff dim_ff d_inner "
    "expert_ffn_hidden_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size "
    "feed_forward_size ffn_dim",
    48: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "shared_experts_intermediate_size moe_shared_expert_intermediate_size",
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size "
    "unpadded_vocab_size ngram_vocab_size_base encoder_hash_byte_group_vocab",
    2 * MAX_CONTEXT: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
    "model_max_length max_source_positions",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DROPOUTS = ("dropout", "_pdrop", "layerdrop", "dropout_prob", "dropout_p", "jitter", "jitter_noise")
_SPECIAL_TOKENS = {name: index for index, name in enumerate(("pad", "bos", "eos", "sep", "cls", "mask"))}


def causal_families() -> list[str]:
    """The model types that AutoModelForCausalLM takes: decoders, encoders that can be decoders, and composites."""
    return list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def other_families() -> list[str]:
    """Further model types whose logits are tokens': of vision, audio and language, encoder-decoders, encoders."""
    names = {name: None for names, _ in _OTHERS for name in names}
    return [name for name in names if name not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def multimodal_families() -> list[str]:
    """The model types that draw tokens from text, and from images or sound, too."""
    return list(dict.fromkeys(name for names, _ in _OTHERS[:2] for name in names))


def auto_class(config: PretrainedConfig) -> type:
    """The first of the classes that build models by their configuration and have one for this one."""
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return modeling_auto.AutoModelForCausalLM
    return next(auto for names, auto in _OTHERS if config.model_type in names)


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """A configuration of the family with some 100,000 parameters. Overrides win over what is made small; those of a
    part of the configuration are a dict."""
    config_class = CONFIG_MAPPING[family]
    chosen = {**OVERRIDES.get(family, {}), **overrides}
    return config_class(**_small(config_class, chosen))


def _small(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the configuration class."""
    default = _default(config_class, overrides)
    layers = _chosen_layers(default)
    small: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            asked = overrides.get(name) or {}
            kind = CONFIG_MAPPING[asked["model_type"]] if "model_type" in asked else type(value)
            of_part = {**OVERRIDES.get(kind.model_type, {}), **asked}
            small[name] = {"model_type": kind.model_type, **_small(kind, of_part)}
        elif name in overrides:
            small[name] = overrides[name]
        elif name in _parameters(config_class):
            smaller = _smaller(name, value, default, layers)
            if smaller != value or isinstance(value, list):
                small[name] = smaller
    depth = next((name for name in _DEPTHS if name in small), None)
    if depth is not None and not {depth, "layer_types"} & overrides.keys() and len(layers) > LAYERS:
        small[depth] = len(layers)
    return {**overrides, **small}


def _smaller(name: str, value: Any, default: PretrainedConfig, layers: list[int]) -> Any:
    """What stands in for the value of an attribute of a configuration by default."""
    latent = "qk_rope_head_dim" in vars(default)
    if name in ("head_dim", "qk_head_dim") and latent:
        return value  # follows from the dimensions with and without rotary embedding
    if name == "num_key_value_heads" and latent and value == vars(default).get("num_attention_heads"):
        return SMALL["num_attention_heads"]  # latent attention: keys and values for every head
    if name == "head_dim" and value is None:
        return SMALL[name]
    if name.removesuffix("_token_id") in _SPECIAL_TOKENS:
        return _within_vocabulary(value, _SPECIAL_TOKENS[name.removesuffix("_token_id")])
    if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and 10 <= value < VOCABULARY:
        return 9 if name.startswith("image") else 8  # Prompts are drawn from 10 on and must contain no image.
    if name == "rope_parameters":
        return _short_rope(value, vars(default))
    if isinstance(value, (list, tuple)) and len(value) == _num_layers(default) and len(value) > LAYERS:
        return type(value)(value[index] for index in layers)
    if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
        return min(value, SMALL[name])
    if name.endswith(_DROPOUTS) and isinstance(value, float):
        return 0.0
    return value


def _default(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    """With the defaults of its class; some classes have none that are allowed."""
    try:
        return config_class()
    except StrictDataclassClassValidationError:
        return config_class(**overrides)


@cache
def _parameters(config_class: type[PretrainedConfig]) -> frozenset[str]:
    return frozenset(inspect.signature(config_class.__init__).parameters)


def _num_layers(config: PretrainedConfig) -> int:
    return int(getattr(config, "num_hidden_layers", 0) or 0)


def _chosen_layers(config: PretrainedConfig) -> list[int]:
    """Indices of layers of the default model, among them one of each kind where attributes tell kinds apart."""
    count = _num_layers(config)
    per_layer = [
        value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and name in _parameters(type(config))
    ]
    kinds = [tuple(str(values[index]) for values in per_layer) for index in range(count)]
    first_of_kind = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first_of_kind.values())[: LAYERS + 2]
    others = [index for index in range(count) if index not in chosen]
    return sorted(chosen + others[: max(0, LAYERS - len(chosen))])


def _within_vocabulary(token: Any, otherwise: int) -> Any:
    if isinstance(token, (list, tuple)):
        return [otherwise]
    return token if token is None or 0 <= token < VOCABULARY else otherwise


def _short_rope(rope: Any, attributes: dict[str, Any]) -> Any:
    """Rotary parameters whose thresholds lie below the lengths of the sequences, for small heads."""
    if not isinstance(rope, dict):
        return rope
    short = copy.deepcopy(rope)
    for value in (short, *short.values()):
        if not isinstance(value, dict):
            continue
        if value.get("original_max_position_embeddings"):
            value["original_max_position_embeddings"] = 16
        if value.get("mrope_section"):
            pairs = int(SMALL["head_dim"] * (value.get("partial_rotary_factor") or 1.0)) // 2
            if "head_dim" not in attributes:
                pairs = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
            third = pairs // 3
            value["mrope_section"] = [pairs - 2 * third, third, third]
    return short


@dataclass(frozen=True, slots=True)
class Family:
    """A model type, or a variant of it."""

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PretrainedConfig:
        return tiny_config(self.model_type, **self.overrides)


def all_families() -> list[Family]:
    """Registered families, each with its defaults; variants of them; and variants of published checkpoints."""
    return [
        *(Family(name, name) for name in causal_families()),
        *(
            Family(f"{model_type}-{variant}", model_type, overrides)
            for model_type, variants in VARIANTS.items()
            for variant, overrides in variants.items()
        ),
        *(Family(published.row, published.model_type, published.overrides) for published in OF_ANOTHER_KIND),
        *(Family(name, name) for name in other_families()),
    ]
