"""Lengths up to which the other sequences of a batch do not change how a sequence is computed."""

from typing import Any

from transformers import PretrainedConfig


def length_limit(config: PretrainedConfig, *, sparse: bool = False) -> tuple[int, str] | None:
    """Return a number of tokens and the reason of the limit; None if there is no limit. sparse: ignore the limit of
    sparse attention, since its choice of keys is computed.

    The frequencies of the rotary embeddings "longrope" and "dynamic" depend on the longest sequence of a batch once one
    is longer than the original training length, so that sequences would change each other. Chunked attention (Llama 4)
    is full attention up to the end of the first chunk, and sparse attention while a query chooses all keys.
    """
    limits: list[tuple[int, str]] = []
    positions = getattr(config, "max_position_embeddings", None)
    trained = getattr(config, "original_max_position_embeddings", None)
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        if kind == "longrope" and (end := rope.get("original_max_position_embeddings") or trained or positions):
            limits.append((int(end), "longrope"))
        if "dynamic" in kind and positions:
            limits.append((int(positions), f"{kind} rotary embeddings"))
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append((int(chunk), "chunked attention"))
    if chooses_keys(config) and not sparse:
        limits.append((int(config.index_topk), f"sparse attention (index_topk={config.index_topk})"))
    if (row := row_limit(config)) is not None:
        limits.append(row)
    return min(limits) if limits else None


def chooses_keys(config: PretrainedConfig) -> bool:
    """Return True for sparse attention in which an indexer chooses `index_topk` keys for each query. GLM-5.3 chooses
    pools of `index_kpool` keys."""
    layer_types, count, pool = (getattr(config, name, None) for name in ("layer_types", "index_topk", "index_kpool"))
    return "indexed_attention" in (layer_types or ()) and isinstance(count, int) and pool is None


def row_limit(config: PretrainedConfig) -> tuple[int, str] | None:
    """Return the largest number of tokens in a row of packed sequences, and the reason; None if rows are not limited.
    Llama 4 scales queries by their index in the row, whatever their positions are, from `floor_scale` on."""
    if getattr(config, "attn_temperature_tuning", None) and getattr(config, "floor_scale", None):
        return int(config.floor_scale) - 1, "a query scale that counts the tokens of a row"
    return None


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of all rotary embeddings. Some models have one set per type of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]
