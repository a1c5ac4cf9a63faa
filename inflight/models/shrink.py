"""Configurations made small: a few layers of each kind, narrow, with windows and thresholds of a few tokens.

What a field means is told by its name. Numbers that belong together are divided by the same number, so that the ratios
that decide how a model computes stay what they are: query heads to KV heads, hidden size to heads, the rotated part of
a head to the whole.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 96
WINDOW = 6
"""Tokens: sliding windows, attention chunks, steps of a query's scale."""
ORIGINAL_CONTEXT = 16
"""Tokens up to which positions are not scaled."""
CONTEXT = 64
"""Positions."""
_MAX_LAYERS = 8
_MAX_EXPERTS = 8
_SOFTCAP = 2.0
_MIN_HEAD_DIM = 8

_HEAD_COUNT = re.compile(
    r"(?!.*(dim|size))(.*(num|n|attention)_(attention_|key_value_|kv_|query_|global_|swa_|linear_)*(key_value_|kv_|q_|query_)?"
    r"(attention_)?heads?(_per_layer)?|n_head(_kv)?|kv_n_heads|.*_num_(key|value)_heads|(en|de)coder_attention_heads)$"
)
_HEAD_DIM = re.compile(
    r".*(head_dim|head_size|kv_channels|rotary_dim|rotary_ndims|mrope_section|d_kv|d_head|dim_head|head_width)$"
)
_WIDTH = re.compile(
    r"(.*hidden_size|.*intermediate_size(_mlp)?|.*ffn_dim|.*ffn_hidden_size|.*_rank|n_embd|n_inner|d_model|d_inner|d_ff|dff|dim|"
    r"emb_dim|embed_dim|embedding_dim|embedding_size|word_embed_proj_dim|ple_embed_dim|.*hidden_size_per_layer_input|"
    r".*expansion_dim|shared_intermediate_size|feed_forward_size|.*_embd)$"
)
_LAYER_COUNT = re.compile(r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers)$")
_EXPERT_COUNT = re.compile(r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)$")
_CHOSEN_EXPERTS = re.compile(
    r"(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|experts_per_tok(en)?|moe_num_active_.*)$"
)
_WINDOW = re.compile(
    r"(?!.*(pattern|layers|every))(.*sliding_window(_size)?|.*attention_window(_size)?|window_size|.*attention_chunk_size|"
    r"local_attention|.*floor_scale|log_scaling_n_floor)$"
)
_POSITIONS = re.compile(
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_target_positions|context_length|"
    r"model_max_length|seq_length)$"
)
_LAYER_PATTERN = re.compile(
    r"dense_replace|num_dense_layers|start_index|interleave|interval|period|every|pattern|step$"
)
_LAYER_LIST = re.compile(r"(_layers|_idxs|layer_ids|layer_indices|_index)$")
_VOCABULARY = re.compile(r".*vocab_size(_per_layer_input)?$")


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a configuration, and of those inside it, that is small in every respect."""
    return _changed(config, _rules(config), _kept_layers(config))


def shrink_lengths(config: PretrainedConfig) -> PretrainedConfig:
    """A copy that is as wide as the original, with a small vocabulary, windows and thresholds."""
    return _changed(config, _length_rules, None)


def config_numbers(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration that hold one number, or one per layer."""
    for name, value in vars(config).items():
        if not name.startswith("_") and _is_count(value[0] if isinstance(value, (list, tuple)) and value else value):
            yield name, value


def _changed(
    config: PretrainedConfig, rule: Callable[[str, int | float], int | float], layers: list[int] | None
) -> PretrainedConfig:
    small = copy.deepcopy(config)
    count = _num_layers(config)
    for name, value in list(vars(small).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, PretrainedConfig):
            inner = shrink(value) if layers is not None else shrink_lengths(value)
            vars(small)[name] = inner
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            vars(small)[name] = _shorter_rope(value, rule, config)
        elif _is_number(value):
            vars(small)[name] = rule(name, value)
        elif isinstance(value, (list, tuple)):
            chosen = [value[i] for i in layers] if layers is not None and len(value) == count else list(value)
            vars(small)[name] = type(value)(rule(name, x) if _is_number(x) else x for x in chosen)
    if layers is not None:
        _renumber(small, config, layers)
    return small


def _length_rules(name: str, value: int | float) -> int | float:
    if isinstance(value, float) or not _is_count(value):
        return min(value, _SOFTCAP) if "softcap" in name and value > 0 else value
    if "original_max_position" in name:
        return min(value, ORIGINAL_CONTEXT)
    if _POSITIONS.match(name):
        return min(value, CONTEXT)
    if _WINDOW.match(name):
        return min(value, WINDOW)
    if _VOCABULARY.match(name):
        return min(value, VOCABULARY)
    if name.endswith(("_token_id", "_token_index")):
        return _special_token(name, value)
    return value


def _rules(config: PretrainedConfig) -> Callable[[str, int | float], int | float]:
    """What becomes of each number of this configuration."""
    heads = [n for name, value in config_numbers(config) if _HEAD_COUNT.match(name) for n in _flat(value) if n > 0]
    dims = [n for name, value in config_numbers(config) if _HEAD_DIM.match(name) for n in _flat(value) if n > 0]
    hidden, num_heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if isinstance(hidden, int) and isinstance(num_heads, int) and num_heads and not getattr(config, "head_dim", None):
        dims.append(hidden // num_heads)
    by_heads = _divisor(heads, smallest=2)
    by_dims = next((k for k in (16, 8, 4, 2) if dims and _divides(k, dims)), 1)
    by_width = by_heads * by_dims
    groups = getattr(config, "n_group", None) or getattr(config, "num_expert_group", None) or 1

    def rule(name: str, value: int | float) -> int | float:
        if isinstance(value, float) or not _is_count(value) or value <= 0:
            return _length_rules(name, value)
        if _HEAD_COUNT.match(name):
            return value // by_heads
        if _HEAD_DIM.match(name):
            return value // by_dims
        if _WIDTH.match(name):
            return _width(value, by_width, num_heads // by_heads if isinstance(num_heads, int) else 1)
        if _EXPERT_COUNT.match(name):
            return min(value, max(_MAX_EXPERTS, 2 * groups if isinstance(groups, int) else 0))
        if _CHOSEN_EXPERTS.match(name):
            return min(value, 2)
        return _length_rules(name, value)

    return rule


def _width(value: int, divisor: int, heads: int) -> int:
    """Exact where heads lie side by side in it, else a multiple of 4 numbers: grouped products want 16 bytes."""
    exact = value // divisor
    if value % divisor == 0 and exact >= 8 and (exact % 4 == 0 or (exact % heads == 0 and exact % 2 == 0)):
        return exact
    return max(8, 4 * math.ceil(value / divisor / 4))


def _divisor(counts: list[int], smallest: int) -> int:
    """The largest number that divides all counts and leaves at least `smallest` of each that has as many."""
    common = math.gcd(*counts) if counts else 1
    fitting = [k for k in range(1, common + 1) if common % k == 0 and all(n // k >= min(n, smallest) for n in counts)]
    return max(fitting)


def _divides(k: int, dims: list[int]) -> bool:
    """Whether dimensions of heads stay even where they are, and large enough to hold several frequencies."""
    return all(n % k == 0 and n // k >= _MIN_HEAD_DIM and (n // k) % 2 == n % 2 for n in dims)


# ---- layers ---------------------------------------------------------------------------------------------------------


def _num_layers(config: PretrainedConfig) -> int:
    count = getattr(config, "num_hidden_layers", 0)
    return count if isinstance(count, int) else 0


def _kept_layers(config: PretrainedConfig) -> list[int] | None:
    """Layers of every kind, the first ones where these are enough: patterns that count from the first hold then."""
    count = _num_layers(config)
    if not count:
        return None
    lists = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == count]
    kinds = [str([v[i] for v in lists]) for i in range(count)]
    first = {kind: kinds.index(kind) for kind in kinds}
    needed = max(first.values()) + 1
    for name, value in config_numbers(config):  # the first dense layers, every n-th layer
        if re.search(
            r"dense_replace|num_dense_layers|start_index|interleave|interval|period|every|pattern|step$", name
        ):
            needed = max([needed, *(n + 1 for n in _flat(value) if 0 < n < count)])
    needed = min(count, max(needed, 3))
    if needed <= _MAX_LAYERS:
        return list(range(needed))
    chosen = {kinds.index(kind) for kind in kinds} | {count - 1 - kinds[::-1].index(kind) for kind in kinds}
    return sorted(chosen)[: 2 * _MAX_LAYERS]


def _renumber(small: PretrainedConfig, config: PretrainedConfig, layers: list[int]) -> None:
    """Counts of layers, and lists of the layers that are of one kind."""
    count, kept = _num_layers(config), len(layers)
    for name, value in list(vars(small).items()):
        if _LAYER_COUNT.match(name) and value == count:
            vars(small)[name] = kept
        elif name in ("num_kv_shared_layers",) and isinstance(value, int) and value:
            vars(small)[name] = max(1, kept - max(1, round(kept * (count - value) / count)))
        elif re.search(r"dense_replace|num_dense_layers|max_window_layers", name) and isinstance(value, int):
            vars(small)[name] = sum(i < value for i in layers)
        elif _LAYER_LIST.search(name) and isinstance(value, (list, tuple)):
            indices = getattr(config, name)
            if len(indices) != count and all(map(_is_count, indices)):
                vars(small)[name] = type(value)(layers.index(i) for i in indices if i in layers)


# ---- numbers --------------------------------------------------------------------------------------------------------


def _shorter_rope(
    rope: dict[str, Any], rule: Callable[[str, int | float], int | float], config: PretrainedConfig
) -> dict[str, Any]:
    short: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):  # by type of layer
            short[name] = _shorter_rope(value, rule, config)
        elif name in ("short_factor", "long_factor") and isinstance(value, (list, tuple)):
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            short[name] = list(value)[:: max(1, head_dim // int(rule("head_dim", head_dim)))]
        elif isinstance(value, (list, tuple)):
            short[name] = [rule(name, x) if _is_number(x) else x for x in value]
        elif _is_number(value):
            short[name] = rule(name, value)
        else:
            short[name] = value
    return short


def _special_token(name: str, value: int) -> int:
    """Ordinary ones are low, those of images and sounds, which no probe may hold, the last of the vocabulary."""
    ordinary = ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start")
    kind = next((i for i, word in enumerate(ordinary) if name.startswith(word)), None)
    return min(value, kind if kind is not None else VOCABULARY - 1) if value >= 0 else value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flat(value: Any) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
