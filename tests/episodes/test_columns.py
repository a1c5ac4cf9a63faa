"""What an engine records per token survives several turns: sampling masks, entropies, own versions, and experts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_model

import inflight
from inflight.core.rollout import SamplingMask
from inflight.episodes.segment import _joined_masks
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs


async def talk(session, row):
    tokens = list(row)
    for length in (3, 0, 4):
        reply = await session.complete(tokens)
        tokens += [*reply.token_ids, *range(10, 10 + length)]
    await session.complete([*row, *tokens[len(row) : len(row) + 2]])  # a branch within the first turn
    return 1.0


def collect(engine, params):
    with inflight.Episodes(engine, talk) as episodes:
        return engine.stream.collect(episodes.submit([[1, 2, 3], [4]], params, train=False), timeout_s=60)


def scored_alike(rollouts, model):
    batch = pack(rollouts, [1.0] * len(rollouts))
    with torch.no_grad():
        scored = token_logprobs(model, batch)
    torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=1e-4, rtol=0)
    return batch


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.99}])
def test_sampling_masks_and_entropies_are_those_of_the_turns(engine, filters):
    params = inflight.SamplingParams(
        n=2, max_tokens=5, ignore_eos=True, return_sampling_mask=True, return_entropy=True, **filters
    )
    rollouts = [rollout for group in collect(engine, params) for rollout in group]
    assert len(rollouts) == 8
    batch = scored_alike(rollouts, make_model("qwen3"))
    assert batch.sampling_mask is not None
    for rollout in rollouts:
        masks, drawn = rollout.sampling_mask.split(), rollout.drawn
        assert len(masks) == len(rollout.token_ids)
        assert all(len(mask) == 0 for mask, is_drawn in zip(masks, drawn, strict=True) if not is_drawn)
        entropies = rollout.columns["entropies"]
        assert (entropies[~drawn] == 0).all()
        assert (entropies[drawn] > 0).any()
    assert batch.columns["entropies"].shape == batch.input_ids.shape


def test_experts_are_those_of_the_passes_that_drew(model_dir: Callable[[str], str]):
    model = make_model("qwen3-moe")
    options = {"device": "cpu", "threads": 1, "max_sequences": 8, "max_context": 96, "record_routed_experts": True}
    with inflight.launch(model_dir("qwen3-moe"), **options) as engine:
        groups = collect(engine, inflight.SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    for group in groups:
        for rollout in group:
            ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])
            assert rollout.routed_experts.shape[0] == len(ids) - 1
            with torch.no_grad():
                logits = model(torch.tensor(ids[None, :-1], dtype=torch.long), output_router_logits=True).router_logits
            k = rollout.routed_experts.shape[2]
            for layer, of_layer in enumerate(logits):
                expected = of_layer.topk(k).indices.sort(-1).values.numpy()
                assert (np.sort(rollout.routed_experts[:, layer], -1) == expected).mean() > 0.99
    scored_alike([rollout for group in groups for rollout in group], model)


def test_joined_masks_keep_removed_tokens_apart_from_kept_ones():
    kept = SamplingMask.join([np.array([3, 4], np.int32), np.empty(0, np.int32)])
    cut = SamplingMask.join([np.array([7], np.int32)], [99])
    turns: Any = [
        SimpleNamespace(sampling_mask=mask, token_ids=range(n)) for mask, n in ((kept, 2), (cut, 1), (None, 1))
    ]
    mask = _joined_masks([1, turns[0], 2, turns[1], turns[2]])
    assert mask is not None
    assert mask.cut_from is not None
    assert [ids.tolist() for ids in mask.split()] == [[], [3, 4], [], [], [], [7], []]
    assert mask.cut_from.tolist() == [0, 0, 0, 0, 0, 99, 0]
    assert _joined_masks([1, turns[2]]) is None
