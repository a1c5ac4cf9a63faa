"""Small configurations: a few narrow layers of each kind, with windows and thresholds of a few tokens.

The name of a field decides its meaning. Related numbers are divided by the same number. This keeps the ratios that
decide how a model computes: query heads to KV heads, hidden size to heads, the rotated part of a head to the whole.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeGuard

from transformers import PretrainedConfig

_Rule = Callable[[str, int | float], int | float]
"""Maps the name and the number of a field to its new number."""

VOCABULARY = 96
_MAX_LAYERS = 8
_MAX_EXPERTS = 8
_CAP = 2.0
_MIN_HEAD_DIM = 8
_HIDDEN = 64

_HEAD_COUNT = re.compile(
    r"(?!.*(dim|size))(.*(num|n|attention)_(attention_|key_value_|kv_|query_|global_|swa_|linear_)*(key_value_|kv_|q_|query_)?"
    r"(attention_)?heads?(_per_layer)?|n_head(_kv)?|kv_n_heads|.*_num_(key|value)_heads|(en|de)coder_attention_heads)$"
)
_HEAD_DIM = re.compile(r".*(head_dim|head_size|kv_channels|rotary_dim|rotary_ndims|d_kv|d_head|dim_head|head_width)$")
_WIDTH = re.compile(
    r"(.*hidden_size|.*intermediate_size(_mlp)?|.*ffn_dim|.*ffn_hidden_size|.*_rank|n_embd|n_inner|d_model|d_inner|d_ff|dff|dim|"
    r"emb_dim|embed_dim|embedding_dim|embedding_size|word_embed_proj_dim|ple_embed_dim|.*hidden_size_per_layer_input|"
    r".*expansion_dim|lru_width|shared_intermediate_size|feed_forward_size|.*_embd)$"
)
_LAYER_COUNT = re.compile(r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers)$")
_SECTION = re.compile(r"n(um)?_(?!kv_shared)\w+_layers$")
_EXPERT_COUNT = re.compile(r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)$")
_CHOSEN_EXPERTS = re.compile(
    r"(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|experts_per_tok(en)?|moe_num_active_.*)$"
)
_MAMBA_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_expand", "mamba_d_ssm"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_expand", ""),
    ("num_heads", "head_dim", "n_groups", "expand", ""),
)
"""Fields of Mamba-2: heads, their size and groups, the ratio of their width to the hidden size, and that width."""
_LAYER_PATTERN = re.compile(
    r"dense_replace|num_dense_layers|start_index|interleave|interval|period|every|pattern|step$"
)
_LAYER_LIST = re.compile(r"(_layers|_idxs|layer_ids|layer_indices|_index)$")
_CAPPED = re.compile(r".*(soft_?cap|logit_cap)|clip_qkv|swiglu_limit")
"""Names of bounds, soft or hard, beyond which values are changed. Values of a twin exceed `_CAP`."""
_LIMITS = {
    # Number of tokens up to which positions are not scaled, and numbers of positions.
    r".*original_max_position": 16,
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_target_positions|context_length|"
    r"model_max_length|seq_length)$": 64,
    # Tokens of sliding windows and steps of a query's scale; of a chunk, and so of any sequence (`length_limit`).
    r"(?!.*(pattern|layers|every))(.*sliding_window(_size)?|.*attention_window(_size)?|window_size|"
    r"local_attention|log_scaling_n_floor)$": 6,
    r".*attention_chunk_size$": 24,
    r".*vocab_size(_per_layer_input)?$": VOCABULARY,
}
"""Maps names of lengths to their largest remaining number. The first match is used."""


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration, and of the configurations in it, that is small in every respect."""
    small = _changed(config, _rules(config), _kept_layers(config), shrink)
    for names in _MAMBA_HEADS:
        _match_mamba(vars(small), *names)
    return small


def _match_mamba(fields: dict[str, Any], heads: str, dim: str, groups: str, expand: str, width: str) -> None:
    """Make heads of Mamba-2 as wide together as their layer, if the configuration has these fields."""
    if not all(_is_number(fields.get(name)) for name in (heads, dim, groups, expand, "hidden_size")):
        return
    if _is_count(fields.get(width)):
        fields[width] = fields[heads] * fields[dim]
        return
    inner = int(fields[expand] * fields["hidden_size"])
    if fields[heads] * fields[dim] == inner:
        return
    size = math.gcd(inner, fields[dim])
    fields[dim] = size // 2 if size == inner and size % 2 == 0 else size
    fields[heads] = inner // fields[dim]
    fields[groups] = math.gcd(fields[groups], fields[heads])


def shrink_lengths(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of the original width, with a small vocabulary, windows and thresholds."""
    return _changed(config, _length_rules, None, shrink_lengths)


def _counts(config: PretrainedConfig) -> Iterator[tuple[str, int]]:
    """Yield names and whole numbers of fields. Some fields contain one number per layer."""
    for name, value in vars(config).items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if not name.startswith("_"):
            yield from ((name, n) for n in numbers if _is_count(n))


def _changed(
    config: PretrainedConfig,
    rule: _Rule,
    layers: list[int] | None,
    inner: Callable[[PretrainedConfig], PretrainedConfig],
) -> PretrainedConfig:
    """Return a copy with numbers mapped by `rule`, these layers (None: all), and inner configurations by `inner`.
    The copy bypasses the checks of single fields, since the fields belong together."""
    small = copy.deepcopy(config)
    count = _num_layers(config)
    fields = vars(small)
    for name, value in list(fields.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, PretrainedConfig):
            fields[name] = inner(value)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            fields[name] = _shorter_rope(value, rule, config)
        elif layers is not None and _are_indices(name, value):
            fields[name] = type(value)(layers.index(i) for i in value if i in layers)
        elif layers is not None and isinstance(value, (list, tuple)) and len(value) == count:
            fields[name] = _map_numbers(rule, name, type(value)(value[i] for i in layers))
        else:
            fields[name] = _map_numbers(rule, name, value)
    if layers is not None:
        _renumber(small, count, layers, _sections(config, count))
    return small


def _map_numbers(rule: _Rule, name: str, value: Any) -> Any:
    """Return the value of a field with its numbers mapped by `rule`."""
    if isinstance(value, (list, tuple)):
        return type(value)(rule(name, x) if _is_number(x) else x for x in value)
    return rule(name, value) if _is_number(value) else value


def _length_rules(name: str, value: int | float) -> int | float:
    if _CAPPED.match(name) and value > 0:
        return min(value, _CAP)
    if not _is_count(value):
        return value
    if name.endswith(("_token_id", "_token_index")):
        return _special_token(name, value)
    return min(value, next((limit for pattern, limit in _LIMITS.items() if re.match(pattern, name)), value))


def _rules(config: PretrainedConfig) -> _Rule:
    """Return the rule for all numbers of this configuration."""
    heads = [n for name, n in _counts(config) if _HEAD_COUNT.match(name) and n > 0]
    dims = [n for name, n in _counts(config) if _HEAD_DIM.match(name) and n > 0]
    hidden, num_heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    text = vars(config).get("text_config")
    width = hidden or (_number(text, "hidden_size") if text is not None else 0)  # projectors are as wide as the text
    head_dim = vars(config).get("head_dim") or (hidden // num_heads if hidden and num_heads else 0)
    if head_dim and head_dim not in dims:
        dims.append(head_dim)
    pairs = [sum(section) for section in _mrope_sections(config)]
    pairs += [rotated // 2 for share in _rotated_shares(config) if (rotated := int(head_dim * share)) % 2 == 0]
    by_heads = _divisor(heads)
    by_dims = next((k for k in (16, 8, 4, 2) if dims and _divides(k, dims) and not any(n % k for n in pairs)), 1)
    if 0 < hidden == num_heads * head_dim:
        by_width, multiple = by_heads * by_dims, 1
    else:
        by_width, multiple = max(1, width // _HIDDEN), math.lcm(4, max(1, num_heads // by_heads))
    groups = getattr(config, "n_group", None) or getattr(config, "num_expert_group", None) or 1

    def rule(name: str, value: int | float) -> int | float:
        if not _is_count(value) or value <= 0:
            return _length_rules(name, value)
        if _HEAD_COUNT.match(name):
            return value // by_heads
        if _HEAD_DIM.match(name):
            return value // by_dims
        if _WIDTH.match(name):  # grouped products need rows of 16 bytes, or 4 numbers
            unit = multiple if value == hidden else 4
            return max(8, unit * math.ceil(value / by_width / unit))
        if _EXPERT_COUNT.match(name):
            return min(value, max(_MAX_EXPERTS, 2 * groups if isinstance(groups, int) else 0))
        if _CHOSEN_EXPERTS.match(name):
            return min(value, 2)
        return _length_rules(name, value)

    return rule


def _number(config: PretrainedConfig, name: str) -> int:
    """Return a field by the name that Transformers uses in all configurations; 0 if it is missing."""
    value = vars(config).get(config.attribute_map.get(name, name))
    return value if _is_count(value) else 0


def _divisor(counts: list[int]) -> int:
    """Return the largest number that divides all counts and leaves at least 2 of each count of 2 or more."""
    common = math.gcd(*counts)
    fitting = (k for k in range(1, common + 1) if common % k == 0 and all(n // k >= min(n, 2) for n in counts))
    return max(fitting, default=1)


def _divides(k: int, dims: list[int]) -> bool:
    """Return whether dimensions of heads that are even stay even, and large enough to contain several frequencies."""
    return all(n % k == 0 and n // k >= _MIN_HEAD_DIM and (n // k) % 2 == n % 2 for n in dims)


# ---- layers ---------------------------------------------------------------------------------------------------------


def _num_layers(config: PretrainedConfig) -> int:
    named = [n for name, n in _counts(config) if _LAYER_COUNT.match(name)]
    if count := _number(config, "num_hidden_layers") or max(named, default=0):
        return count
    derived = getattr(config, "num_hidden_layers", 0)  # a property (Nemotron-H)
    return derived if _is_count(derived) else 0


def _kept_layers(config: PretrainedConfig) -> list[int] | None:
    """Return layers of every kind: the first ones if they suffice, so that patterns counted from there hold."""
    count = _num_layers(config)
    if not count:
        return None
    lists = [(n, v) for n, v in vars(config).items() if isinstance(v, (list, tuple))]
    members: list[list[Any]] = [[i in v for i in range(count)] for n, v in lists if _are_indices(n, v)]
    members += [list(v) for n, v in lists if len(v) == count and not _are_indices(n, v)]
    members.append(_sections(config, count))
    kinds = [str([v[i] for v in members]) for i in range(count)]
    needed = max(kinds.index(kind) for kind in kinds) + 1
    multiple = 1
    for name, n in _counts(config):
        if _LAYER_PATTERN.search(name) and 0 < n < count:  # the first dense layers, every n-th layer
            needed = max(needed, n + 1)
        if _LAYER_COUNT.match(name) and 0 < n < count and count % n == 0:  # several layers to a block
            multiple = max(multiple, count // n)
    needed = min(count, multiple * math.ceil(max(needed, 3) / multiple))
    if needed <= _MAX_LAYERS:
        return list(range(needed))
    chosen = {kinds.index(kind) for kind in kinds} | {count - 1 - kinds[::-1].index(kind) for kind in kinds}
    return sorted(chosen)[: 2 * _MAX_LAYERS]


def _sections(config: PretrainedConfig, count: int) -> list[str]:
    """Return, for each layer, the name of the field that counts the layers of its part of the decoder, or ""."""
    fields = [(n, v) for n, v in vars(config).items() if _SECTION.match(n) and _is_count(v)]
    others = (_LAYER_COUNT, _LAYER_PATTERN)
    sections = [name for name, value in fields if not any(o.search(name) for o in others) for _ in range(value)]
    return sections if len(sections) == count and len(set(sections)) > 1 else [""] * count


def _are_indices(name: str, value: Any) -> bool:
    """Return whether a field lists the layers of one kind, instead of a value for every layer."""
    if not _LAYER_LIST.search(name) or not isinstance(value, (list, tuple)) or not all(map(_is_count, value)):
        return False
    return list(value) == sorted(set(value))


def _renumber(small: PretrainedConfig, count: int, layers: list[int], sections: list[str]) -> None:
    """Set the counts of layers. sections: the counting field of each original layer."""
    fields, kept = vars(small), len(layers)
    for name in dict.fromkeys(filter(None, sections)):
        fields[name] = sum(sections[i] == name for i in layers)
    for name, value in list(fields.items()):
        if not _is_count(value) or value <= 0 or name in sections:
            continue
        if _LAYER_COUNT.match(name) and count % value == 0:
            fields[name] = max(1, kept * value // count)
        elif name == "num_kv_shared_layers":
            fields[name] = max(1, kept - max(1, round(kept * (count - value) / count)))
        elif re.search(r"dense_replace|num_dense_layers|max_window_layers", name):
            fields[name] = sum(i < value for i in layers)


# ---- numbers --------------------------------------------------------------------------------------------------------


def _shorter_rope(rope: dict[str, Any], rule: _Rule, config: PretrainedConfig) -> dict[str, Any]:
    short: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):  # by type of layer
            short[name] = _shorter_rope(value, rule, config)
        elif name in ("short_factor", "long_factor") and isinstance(value, (list, tuple)):
            head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
            short[name] = list(value)[:: max(1, head_dim // int(rule("head_dim", head_dim)))]
        elif name == "mrope_section" and _is_section(value):
            short[name] = _apportion(value, int(rule("head_dim", 2 * sum(value))) // 2)
        else:
            short[name] = _map_numbers(rule, name, value)
    return short


def _mrope_sections(config: PretrainedConfig) -> list[list[int]]:
    """Return rotated pairs per axis of multimodal positions. Some models have a list per layer type."""
    return [rope["mrope_section"] for rope in _ropes(config) if _is_section(rope.get("mrope_section"))]


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the settings of rotations, also the ones by layer type."""
    found = [vars(config).get(name) for name in ("rope_parameters", "rope_scaling")]
    ropes = [rope for rope in found if isinstance(rope, dict)]
    return ropes + [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]


def _rotated_shares(config: PretrainedConfig) -> list[float]:
    """Return the shares of heads that are rotated. Some models have one per layer type."""
    shares = [holder.get("partial_rotary_factor") for holder in (vars(config), *_ropes(config))]
    return [share for share in shares if isinstance(share, float) and 0 < share < 1]


def _is_section(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_count(n) and n > 0 for n in value)


def _apportion(section: list[int], total: int) -> list[int]:
    """Return whole numbers of this total in about the proportions of `section`, none 0 if there are enough. Equal ones
    stay equal if that is possible: some models interleave two axes."""
    exact = [n * total / sum(section) for n in section]
    least = int(total >= len(section))
    near = product(*(range(max(least, math.floor(n) - 1), math.ceil(n) + 2) for n in exact))
    fitting = [list(counts) for counts in near if sum(counts) == total]
    return min(
        fitting,
        key=lambda counts: (
            len(set(zip(section, counts, strict=True))),
            sum((one - other) ** 2 for one, other in zip(counts, exact, strict=True)),
        ),
        default=list(section),
    )


def _special_token(name: str, value: int) -> int:
    """Return a small id for ordinary special tokens, and a last one for image and sound, which probes avoid."""
    ordinary = ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start")
    kind = next((i for i, word in enumerate(ordinary) if name.startswith(word)), None)
    return min(value, kind if kind is not None else VOCABULARY - 1) if value >= 0 else value


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_count(value) or isinstance(value, float)
