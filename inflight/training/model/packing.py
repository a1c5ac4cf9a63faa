"""Packed sequences inside Transformers models: no padding between them, and shared beginnings computed once.

Samples share their prompt, and branches of an episode the tokens before the branch.

The model sees one row of F fed tokens, [1, F]. Attention and layers with a state (`packed_states.py`) mix tokens; all
other layers process them one by one. The attention function, registered with `AttentionInterface`, lets every token
attend to its own sequence only: segments of similar length are padded to buckets and attend there. D head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inflight.core.errors import UnsupportedModelError
from inflight.model_checks.indexers import NoChoice
from inflight.model_checks.lengths import chooses_keys
from inflight.model_checks.masks import BOTH_SIDES, mask_note, noted
from inflight.model_checks.mixers import keeps_state
from inflight.training.data.batch import PackedBatch
from inflight.training.model.packed_states import Segment, StateLayout, mix, state_layout

ATTENTION_NAME = "inflight_packed"
_WASTE = 1.5
"""Maximum cost of a bucket as a multiple of the cost of its segments without padding."""


_packing: ContextVar[bool] = ContextVar("inflight_packing", default=False)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments that attend together: n of them, padded to Q queries and K keys. Prefix first, then the segment."""

    queries: torch.Tensor
    """i64[n, Q], rows of the fed tokens; 0 where padded."""
    keys: torch.Tensor
    """i64[n, K]"""
    is_query: torch.Tensor
    """bool[n, Q], false where padded."""
    prefixes: torch.Tensor
    """i64[n], tokens before the first query."""
    has_prefixes: bool
    _masks: dict[tuple[int | None, torch.dtype | None], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return bool[n, 1, Q, K] for layers with this sliding window, or None for plain causality. Then only padded
        queries see keys after a segment's end. dtype: return 0 or −∞ to add to scores instead, with a row stride that
        is a multiple of 16. Fused attention on a GPU would convert any other mask in every layer."""
        if (window, dtype) not in self._masks:
            mask = self._make_mask(window) if dtype is None else self.mask(window)
            if mask is not None and dtype is not None:
                n, _, q, k = mask.shape
                bias = mask.new_zeros((n, 1, q, -(-k // 16) * 16), dtype=dtype)[..., :k]
                mask = bias.masked_fill_(~mask, float("-inf"))
            self._masks[window, dtype] = mask
        return self._masks[window, dtype]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        (q, k), device = (self.queries.shape[1], self.keys.shape[1]), self.queries.device
        if not self.has_prefixes and (window is None or k <= window):
            return None
        q_nQ1 = (self.prefixes[:, None] + torch.arange(q, device=device))[:, :, None]
        k_11K = torch.arange(k, device=device)[None, None]
        seen = k_11K <= q_nQ1
        if window is not None:
            seen &= q_nQ1 - k_11K < window
        return (seen | ~self.is_query[:, :, None])[:, None]  # Padded queries see all keys, so that no row is NaN.


@dataclass(frozen=True, slots=True)
class PackedInput:
    """The model's inputs for a batch, and the layout of its attention."""

    input_ids: torch.Tensor
    """i64[1, F]"""
    position_ids: torch.Tensor
    """i64[1, F]"""
    source: torch.Tensor
    """i64[F], index in the batch of each fed token."""
    predicting: torch.Tensor
    """i64[n], the fed token whose logits each drawn token was drawn from."""
    rows: torch.Tensor
    """i64[T], the fed token of each token of the batch."""
    states: StateLayout | None
    """For layers with a state, or None for a model without them."""
    buckets: tuple[Bucket, ...]
    order: torch.Tensor
    """i64[F], index of each fed token among the queries of all buckets, padding included."""


def pack_input(batch: PackedBatch, device: torch.device | str = "cpu", *, states: bool = False) -> PackedInput:
    """Lay out a batch, on any device, for a packed forward pass on a device. Tokens before the first drawn token of a
    sequence are fed once if another sequence of its group begins with them: prompts of samples, and tokens before a
    branch. With recorded experts only whole prompts are shared. states: also for layers with a state."""
    drawn, ids = batch.loss_mask.cpu().numpy(), batch.input_ids.cpu().numpy()
    bounds, groups = batch.cu_seqlens.tolist(), batch.groups.tolist()
    source: list[np.ndarray] = []
    fed_row = np.empty(len(ids), np.int64)  # The index of the fed row of each token of the batch.
    segments: list[Segment] = []
    num_fed = 0

    def feed(start: int, begin: int, end: int) -> None:
        """Feed the tokens from `begin` to `end` of the sequence that starts at `start`."""
        nonlocal num_fed
        if begin < end:
            segments.append(Segment(num_fed, end - begin, fed_row[start:begin]))
            source.append(np.arange(begin, end))
            fed_row[begin:end] = np.arange(num_fed, num_fed + end - begin)
            num_fed += end - begin

    beginnings = _shared_beginnings(ids, drawn, bounds, groups, branches=batch.routed_experts is None)
    fed_at: dict[tuple[int, bytes], int] = {}  # The start of the sequence with which a beginning was fed.
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        begin = start
        for shared in beginnings[sequence]:
            at, key = start + len(shared) // ids.itemsize, (groups[sequence], shared)
            if key in fed_at:
                fed_row[start:at] = fed_row[fed_at[key] : fed_at[key] + at - start]
            else:
                fed_at[key] = start
                feed(start, begin, at)
            begin = at
        feed(start, begin, end)
    rows = torch.from_numpy(np.concatenate(source))
    input_ids, position_ids = (
        column[rows.to(column.device)][None].to(device) for column in (batch.input_ids, batch.position_ids)
    )
    # The token at position p was drawn from the logits at p − 1; a drawn token is never the first of its sequence.
    predicting, fed_rows = (torch.from_numpy(fed_row[i]).to(device) for i in (np.flatnonzero(drawn) - 1, slice(None)))
    groups = _groups(segments)
    layout = state_layout(groups, num_fed, device) if states else None
    return PackedInput(input_ids, position_ids, rows.to(device), predicting, fed_rows, layout, *_bucket(groups, device))


def _shared_beginnings(
    ids: np.ndarray, drawn: np.ndarray, bounds: Sequence[int], groups: Sequence[int], *, branches: bool
) -> list[list[bytes]]:
    """Return for each sequence its beginnings that are fed once, the shortest first. A sequence leaves the others of
    its group where its tokens differ from theirs, or earlier where its first drawn token is. branches: also sequences
    with other tokens before the first drawn one."""
    families: dict[tuple[int, bytes], list[tuple[bytes, int, int]]] = {}
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        text = ids[start:end].tobytes()
        context = int(next(iter(np.flatnonzero(drawn[start:end])), end - start)) * ids.itemsize
        family = (groups[sequence], b"" if branches else text[:context])
        families.setdefault(family, []).append((text, sequence, context))
    found: list[list[bytes]] = [[] for _ in groups]
    for members in families.values():
        members.sort()  # Neighbours have the longest common beginnings.
        common = [0, *(_num_common(one[0], other[0], ids.dtype) for one, other in pairwise(members)), 0]
        left = (max(pair) for pair in pairwise(common))
        beginnings = {text[: min(context, place)] for (text, _, context), place in zip(members, left, strict=True)}
        nested: list[bytes] = []
        for text, sequence, _ in sorted([*members, *((beginning, -1, 0) for beginning in beginnings if beginning)]):
            while nested and not text.startswith(nested[-1]):
                nested.pop()
            if sequence < 0:
                nested.append(text)
            else:
                found[sequence] = list(nested)
    return found


def _num_common(one: bytes, other: bytes, dtype: np.dtype) -> int:
    """Return the size of the common beginning of two sequences of tokens, in bytes."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(np.frombuffer(one[:size], dtype) != np.frombuffer(other[:size], dtype))
    return int(differ[0]) * dtype.itemsize if len(differ) else size


def _groups(segments: list[Segment]) -> list[list[Segment]]:
    """Return groups of segments of similar size."""
    members: list[list[Segment]] = []
    needed = longest_query = longest_key = 0
    for segment in sorted(segments, key=lambda s: (s.has_prefix, s.num_keys, s.size)):
        longest_query, longest_key = max(longest_query, segment.size), max(longest_key, segment.num_keys)
        needed += segment.size * segment.num_keys
        fits = bool(members) and members[-1][0].has_prefix == segment.has_prefix
        if fits and longest_query * longest_key * (len(members[-1]) + 1) <= _WASTE * needed:
            members[-1].append(segment)
        else:
            members.append([segment])
            longest_query, longest_key = segment.size, segment.num_keys
            needed = longest_query * longest_key
    return members


def _bucket(members: list[list[Segment]], device: torch.device | str) -> tuple[tuple[Bucket, ...], torch.Tensor]:
    """Return a bucket for each group of segments, and the index of each fed token among their queries."""
    buckets: list[Bucket] = []
    order = np.empty(sum(segment.size for chosen in members for segment in chosen), np.int64)
    num_padded = 0
    for chosen in members:
        starts, sizes, prefixes = np.array([(s.start, s.size, len(s.prefix)) for s in chosen]).T[:, :, None]
        q = np.arange(sizes.max())[None]
        is_query = q < sizes
        queries = np.where(is_query, starts + q, 0)
        keys = np.zeros((len(chosen), (sizes + prefixes).max()), np.int64)
        for row, segment in zip(keys, chosen, strict=True):
            row[: segment.num_keys] = segment.keys
        order[queries[is_query]] = num_padded + np.flatnonzero(is_query)
        num_padded += is_query.size
        tensors = (torch.from_numpy(array).to(device) for array in (queries, keys, is_query, prefixes[:, 0]))
        buckets.append(Bucket(*tensors, has_prefixes=bool(prefixes.max())))
    return tuple(buckets), torch.from_numpy(order).to(device)


def is_packable(model: nn.Module) -> bool:
    """Return True if the model declares that only attention through Transformers' interface and layers with a state
    mix its tokens. `scoring_way` tests the declaration."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return False
    if has_states(model):  # few of these models declare the interface of their attention
        return True
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    attention = {"full_attention", "sliding_attention", "chunked_attention"}
    attention |= {"indexed_attention"} if chooses_keys(config.get_text_config()) else set()
    return getattr(model, "_supports_attention_backend", False) and set(layer_types) <= attention


def has_states(model: nn.Module) -> bool:
    """Return True if some layers of the model keep a state."""
    return any(keeps_state(module) for module in model.modules())


_replaced: dict[int, str | None] = {}
"""The replaced attention, by the id of the configuration. Entries exist during forward and backward."""


@contextmanager
def packed_attention(model: nn.Module) -> Iterator[Callable[[torch.Tensor], None]]:
    """Make the model's attention and layers with a state accept `packed=PackedInput` within the context. Afterwards the
    model and its configuration are as before.

    The yielded function takes the output. Backward can run forward passes again (activation checkpointing), so the
    configuration also has our attention during a backward pass through that output. For any other input our attention
    calls the model's own.
    """
    engine = torch.autograd.Variable._execution_engine

    def in_backward_too(out: torch.Tensor) -> None:
        if out.requires_grad:  # The hook is called when backward begins, and the queued call when backward ends.
            out.register_hook(lambda _: engine.queue_callback(_replace(model)))

    restore = _replace(model)
    token = _packing.set(True)
    try:
        yield in_backward_too
    finally:
        _packing.reset(token)
        restore()


def _replace(model: Any) -> Callable[[], None]:
    """Set our attention in the model's configuration and those inside it, pack layers with a state, and let sparse
    attention attend to all keys. Returns a function that restores the original settings."""
    config = model.config
    configs, mixers = _with_inner(config), [module for module in model.modules() if keeps_state(module)]
    for mixer in mixers:
        if not isinstance(vars(mixer).get("forward"), _PackedForward):
            mixer.forward = _PackedForward(mixer, vars(mixer).get("forward"))
    NoChoice.begin(model)
    _replaced.update((id(c), c._attn_implementation) for c in configs if c._attn_implementation != ATTENTION_NAME)
    config._attn_implementation = ATTENTION_NAME

    def restore() -> None:
        NoChoice.end(model)
        for each in configs:  # Outer ones are first, because setting one sets those inside it.
            if id(each) in _replaced:
                each._attn_implementation = _replaced.pop(id(each))
        for mixer in mixers:
            if isinstance(packed := vars(mixer).get("forward"), _PackedForward):
                packed.end()

    return restore


class _PackedForward:
    """The forward pass of a layer with a state while sequences are packed."""

    def __init__(self, module: nn.Module, replaced: Any):
        """replaced: the layer's attribute `forward`, which another program has set, or None."""
        self._module, self._replaced = module, replaced
        self._own = replaced or type(module).forward.__get__(module)

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, packed: PackedInput | None = None, **options: Any
    ) -> Any:
        if packed is not None:
            assert packed.states is not None, "the model has layers with a state"
            return mix(self._module, packed.states, hidden_states)
        if _packing.get():
            raise UnsupportedModelError(
                f"{type(self._module).__name__} receives no keyword arguments of its model, so that packed sequences "
                "would share a state"
            )
        return self._own(hidden_states, *args, **options)

    def end(self) -> None:
        """Restore the layer's own forward pass."""
        del self._module.forward
        if self._replaced is not None:
            self._module.forward = self._replaced


def _with_inner(config: Any) -> list[Any]:
    inner = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(found for each in inner if each is not None for found in _with_inner(each))]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedInput | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention when Transformers calls it: query [1, Hq, F, D] → output [1, F, Hq, Dv]."""
    if packed is None:
        if _packing.get():
            raise UnsupportedModelError(
                f"{type(module).__name__} does not hand keyword arguments on to its attention function, so that packed "
                "sequences would see one another"
            )
        own = ALL_ATTENTION_FUNCTIONS.get(_replaced.get(id(module.config)))
        if own is not None:
            return own(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    if torch.is_autocast_enabled(query.device.type):  # Norms of queries and keys can return fp32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    softcap, sinks_H, window = (options.get(name) for name in ("softcap", "s_aux", "sliding_window"))
    if packed is None:  # Each model has a different "eager" function.
        causal = attention_mask is None and query.shape[2] > 1
        out_BHQD = _attention(query, key, value, attention_mask, causal, scale, dropout, softcap, sinks_H)
        return out_BHQD.transpose(1, 2).contiguous(), None
    note = noted(attention_mask, type(module).__name__)
    if note is not None:  # The window in the mask takes precedence, as in the attention of Transformers.
        window = note or None
    if note == BOTH_SIDES:
        raise UnsupportedModelError(f"{type(module).__name__} lets tokens see later ones")
    q_FHD, k_FHD, v_FHD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    parts = []
    for bucket in packed.buckets:
        q_nHQD, k_nHKD, v_nHKD = (
            tensor[rows].transpose(1, 2)
            for tensor, rows in ((q_FHD, bucket.queries), (k_FHD, bucket.keys), (v_FHD, bucket.keys))
        )
        by_sdpa = softcap is None and sinks_H is None
        mask = bucket.mask(window, query.dtype if query.is_cuda and by_sdpa else None)
        out_nHQD = _attention(q_nHQD, k_nHKD, v_nHKD, mask, mask is None, scale, dropout, softcap, sinks_H)
        parts.append(out_nHQD.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, packed.order)[None], None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention, [n, Hq, Q, D], [n, Hk, K, D] → [n, Hq, Q, Dv]. mask: bool, true for visible keys, or for SDPA
    numbers to add."""
    groups = query.shape[1] // key.shape[1]
    # Flash attention does not support masks or float32, and the other fused kernel does not support groups. Otherwise
    # all scores are materialized.
    if query.is_cuda and groups > 1 and (mask is not None or query.dtype == torch.float32):
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    if softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores_nHQK = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores_nHQK = softcap * torch.tanh(scores_nHQK / softcap)
    if causal:
        mask = torch.ones(scores_nHQK.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores_nHQK = scores_nHQK.masked_fill(~mask, torch.finfo(scores_nHQK.dtype).min)
    if sinks_H is not None:
        sinks = sinks_H[None, :, None, None].expand(*scores_nHQK.shape[:3], 1).to(scores_nHQK.dtype)
        scores_nHQK = torch.cat([scores_nHQK, sinks], -1)
    precise = torch.promote_types(query.dtype, torch.float32)
    probs_nHQK = torch.softmax(scores_nHQK, -1, dtype=precise)[..., : key.shape[2]].to(query.dtype)
    return F.dropout(probs_nHQK, dropout) @ value


def _make_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return only a note of the mask for packed inputs, and the mask of the model's own attention for other inputs."""
    if _packing.get():
        return mask_note(*args, **kwargs)
    own = _replaced.get(id(kwargs["config"]))
    make = ALL_MASK_ATTENTION_FUNCTIONS[own] if own in ALL_ATTENTION_FUNCTIONS else sdpa_mask
    return make(*args, **kwargs)


AttentionInterface.register(ATTENTION_NAME, attend)
AttentionMaskInterface.register(ATTENTION_NAME, _make_mask)
