"""Attention of one forward pass over the KV cache, plugged into Transformers through `AttentionInterface`.

A pass is packed: decoding sequences first, one token each, then the prompts that join, one after another. The model
sees [1, T]; this function sees the queries, keys and values of each layer, writes keys and values to the cache and
returns the attention output. Letters: N decoding sequences, P prompts, S longest prompt, R rows 0 … highest used row,
L longest context, H key-value heads, G query heads per key-value head, D head size.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from inflight.core.errors import UnsupportedModelError
from inflight.engine.kv_cache import KVCache, LayerShape

ATTENTION_NAME = "inflight"

Recorder = dict[int, LayerShape]


@dataclass
class ForwardBatch:
    """Where the tokens of one forward pass belong.

    decode_rows i64[N], decode_positions i64[N]: cache row and position of each decoding sequence's token.
    prefill_rows i64[P], prefill_lengths i64[P]: cache row and token count of each prompt.
    """

    cache: KVCache
    decode_rows: torch.Tensor
    decode_positions: torch.Tensor
    prefill_rows: torch.Tensor
    prefill_lengths: torch.Tensor
    num_rows: int = 0
    """1 + the highest decoding row."""
    longest_context: int = 0
    """1 + the highest decoding position."""
    longest_prompt: int = 0
    _hidden: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _prefill_mask: dict[int, torch.Tensor] = field(default_factory=dict)
    _padding: torch.Tensor | None = None

    def hidden_RL(self, window: int | None) -> torch.Tensor:
        """True where a row's query must not look: later positions, and those that left the sliding window."""
        if window not in self._hidden:
            position_R = self.decode_positions.new_zeros(self.num_rows)
            position_R[self.decode_rows] = self.decode_positions
            key_L = torch.arange(self.longest_context, device=position_R.device)
            hidden_RL = key_L > position_R[:, None]
            if window is not None:
                hidden_RL |= key_L <= position_R[:, None] - window
            self._hidden[window] = hidden_RL
        return self._hidden[window]

    def prompt_mask_SS(self, window: int) -> torch.Tensor:
        """True where a prompt's query may look: causal within the sliding window."""
        if window not in self._prefill_mask:
            position_S = torch.arange(self.longest_prompt, device=self.prefill_lengths.device)
            distance_SS = position_S[:, None] - position_S[None, :]
            self._prefill_mask[window] = (distance_SS >= 0) & (distance_SS < window)
        return self._prefill_mask[window]

    def padding_PS(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed index of each prompt token (padding repeats the prompt's last), and which are real."""
        position_S = torch.arange(self.longest_prompt, device=self.prefill_lengths.device)
        if self._padding is None:
            start_P = torch.cumsum(self.prefill_lengths, 0) - self.prefill_lengths + len(self.decode_rows)
            self._padding = start_P[:, None] + torch.minimum(position_S, self.prefill_lengths[:, None] - 1)
        return self._padding, position_S < self.prefill_lengths[:, None]


_batch: ContextVar[ForwardBatch | None] = ContextVar("inflight_packed_batch", default=None)
_recorder: ContextVar[Recorder | None] = ContextVar("inflight_layer_recorder", default=None)


def run_with_batch(model: nn.Module, batch: ForwardBatch, **inputs: torch.Tensor) -> torch.Tensor:
    """The model's logits for the packed inputs, with attention over `batch`."""
    token = _batch.set(batch)
    try:
        return model(**inputs, use_cache=False).logits
    finally:
        _batch.reset(token)


def record_layers(model: nn.Module, **inputs: torch.Tensor) -> Recorder:
    """Run a probe forward and return what each attention layer asked to keep, by layer index."""
    recorder: Recorder = {}
    token = _recorder.set(recorder)
    try:
        model(**inputs, use_cache=False)
    finally:
        _recorder.reset(token)
    return recorder


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls: query [1, H·G, T, D] → output [1, T, H·G, D].

    Raises UnsupportedModelError for options that change the result and are not implemented.
    """
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} uses {option}, which the engine cannot run yet")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    recorder = _recorder.get()
    if recorder is not None:
        recorder[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], sliding_window, key.dtype)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    batch = _batch.get()
    assert batch is not None, "the engine's attention runs inside run_with_batch"
    q_TqD, k_THD, v_THD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    num_decoding = len(batch.decode_rows)
    out_TqD = q_TqD.new_empty(*q_TqD.shape[:2], v_THD.shape[-1])
    if num_decoding:
        out_TqD[:num_decoding] = _decode(
            batch, layer, q_TqD[:num_decoding], k_THD[:num_decoding], v_THD[:num_decoding], scale, sliding_window
        )
    if batch.longest_prompt:
        out_TqD[num_decoding:] = _prefill(batch, layer, q_TqD, k_THD, v_THD, scale, sliding_window)
    return out_TqD.unsqueeze(0), None


def _decode(
    batch: ForwardBatch,
    layer: int,
    q_NqD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """One query per sequence over its row. The query heads of a KV head fold into its query length."""
    rows, positions, num_rows = batch.decode_rows, batch.decode_positions, batch.num_rows
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    keys[rows, :, :, positions] = k_NHD
    values[rows, :, positions] = v_NHD
    n, num_kv_heads, _ = k_NHD.shape
    q_NHGD = (q_NqD * scale).reshape(n, num_kv_heads, -1, q_NqD.shape[-1])
    every_row_used = n == num_rows
    if every_row_used:  # the engine keeps decoding sequences in row order
        q_RHGD = q_NHGD
    else:
        q_RHGD = q_NHGD.new_zeros(num_rows, *q_NHGD.shape[1:])
        q_RHGD[rows] = q_NHGD
    context = batch.longest_context
    scores_RHGL = q_RHGD @ keys[:num_rows, :, :, :context]
    scores_RHGL.masked_fill_(batch.hidden_RL(window)[:, None, None, :], float("-inf"))
    weights_RHGL = torch.softmax(scores_RHGL, -1, dtype=torch.float32).to(q_RHGD.dtype)
    out_RHGD = weights_RHGL @ values[:num_rows, :, :context]
    out_NHGD = out_RHGD if every_row_used else out_RHGD[rows]
    return out_NHGD.reshape(n, -1, out_NHGD.shape[-1])


def _prefill(
    batch: ForwardBatch,
    layer: int,
    q_TqD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Whole prompts, padded on the right to the longest: causality keeps real tokens from seeing padding."""
    index_PS, real_PS = batch.padding_PS()
    q_PqSD, k_PHSD, v_PHSD = (x[index_PS].transpose(1, 2) for x in (q_TqD, k_THD, v_THD))
    longest = batch.longest_prompt
    batch.cache.keys[layer][batch.prefill_rows, :, :, :longest] = k_PHSD.transpose(-1, -2)
    batch.cache.values[layer][batch.prefill_rows, :, :longest] = v_PHSD
    mask = batch.prompt_mask_SS(window) if window is not None and window < longest else None
    out_PqSD = F.scaled_dot_product_attention(
        q_PqSD, k_PHSD, v_PHSD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out_PqSD.transpose(1, 2)[real_PS]


AttentionInterface.register(ATTENTION_NAME, attend)
