"""A finished sample, with everything that the trainer needs to correct each of its tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight.core.sampling import SamplingParams


@dataclass(slots=True)
class Rollout:
    """One finished sample of a prompt. All arrays but the prompt have one entry per drawn token."""

    request_id: int
    group_id: int
    sample: int
    """Index within the group, 0 … params.n − 1."""
    params: SamplingParams
    metadata: dict[str, Any]
    """What the submitter attached to the prompt."""
    prompt_token_ids: np.ndarray
    """i32[P]"""
    token_ids: np.ndarray
    """i32[T], the stop token included where one was drawn."""
    logprobs: np.ndarray
    """f32[T], behavior log-probabilities as recorded when each token was drawn."""
    weight_versions: np.ndarray
    """i64[T], the weights that drew each token."""
    sampled_at_ns: np.ndarray
    """i64[T], CLOCK_MONOTONIC."""
    finish_reason: str
    """stop | length | cancelled | error, or "" while the sample is unfinished"""
    entropies: np.ndarray | None = None
    """f32[T], in nats; where params.return_entropy asked for it, as below."""
    top_token_ids: np.ndarray | None = None
    """i32[T, params.top_logprobs], the most likely tokens first."""
    top_logprobs: np.ndarray | None = None
    """f32[T, params.top_logprobs]"""
    mask_offsets: np.ndarray | None = None
    """i64[T + 1]: token t was drawn from mask_token_ids[mask_offsets[t] : mask_offsets[t + 1]]."""
    mask_token_ids: np.ndarray | None = None
    """i32[…]"""
    mask_cut_from: np.ndarray | None = None
    """i32[T]: 0, or where most of a large vocabulary was kept its size; the ids are then those that were cut from it.
    None: 0 everywhere."""
    routed_experts: np.ndarray | None = None
    """u8 or u16[P + T − 1, layers, k]: the experts of every token but the last, where the engine records them."""
    forked_from: tuple[int, int] | None = None
    """(request id, k) if the prompt is another request's prompt and its first k tokens."""
    prefix_tokens: int = 0
    """Prompt tokens whose keys and values were not computed for this sample: the prefix cache had them, or the sample
    that it was forked from."""
    prefix_version: int | None = None
    """The oldest weights that computed some of them; None where all were computed for this sample."""
    prompt: str = ""
    """The prompt as text, where a tokenizer is at hand."""
    text: str = ""
    """The drawn tokens as text without special tokens, where a tokenizer is at hand."""
    reward: float | None = None
    """What the score function said."""
