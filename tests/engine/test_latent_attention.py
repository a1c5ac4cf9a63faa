"""Families with latent attention keep one latent per token. `test_ladder.py` has their log-probabilities."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from full_forward import full_forward_logprobs
from inflight_kernels import latent
from ladder import LATENT, WIDE
from tiny_models import publish
from transformers import PreTrainedModel

from inflight.core.errors import UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model import fused
from inflight.engine.model.attention import paged
from inflight.engine.model.attention.latent import LatentHeads
from inflight.stream.assembler import Assembler

TWO_KINDS = pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])


model_of = LATENT.model_of


@pytest.fixture
def family_dir(directory_of) -> Callable[[str], str]:
    return partial(directory_of, LATENT)


@pytest.fixture
def make_family_engine(make_kind_engine) -> Callable[..., Engine]:
    return lambda name=WIDE.name, **options: make_kind_engine(LATENT, name, **options)


# ---- swaps ----------------------------------------------------------------------------------------------------------


def swapped_in_flight(engine: Engine, model: PreTrainedModel) -> Rollout:
    """Draw 30 tokens. The model's weights are published after some of them."""
    assembler, rollouts = Assembler(), []
    engine.requests.submit([Prompt(list(range(20, 40)), SamplingParams(max_tokens=30, seed=3, ignore_eos=True))])
    steps = 0
    while engine.has_work:
        frame = engine.step()
        rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
        steps += 1
        if steps == 12:
            publish(engine, model)
    return rollouts[0]


@torch.no_grad()
def logprobs_over_old_latents(old: Any, new: Any, rollout: Rollout) -> np.ndarray:
    """Log-probabilities of the drawn tokens. The new model continues from the latents in the cache of the old one."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()[None]
    start = len(rollout.prompt_token_ids) - 1
    swap = start + int((rollout.weight_versions == 0).sum())
    before = old(ids[:, :swap], use_cache=True)
    after = new(ids[:, swap:-1], cache=before.cache, use_cache=True)
    logits = torch.cat((before.logits[0, start:], after.logits[0])).double()
    drawn = torch.from_numpy(rollout.token_ids).long()
    return torch.log_softmax(logits, -1)[torch.arange(len(drawn)), drawn].numpy()


@TWO_KINDS
def test_after_a_swap_new_weights_read_the_latents_of_old_ones(make_family_engine, fuse):
    old, new = model_of(WIDE.name), model_of(WIDE.name, 1)
    rollout = swapped_in_flight(make_family_engine(fused=fuse), new)
    assert set(rollout.weight_versions) == {0, 1}
    expected = logprobs_over_old_latents(old, new, rollout)
    assert np.abs(expected - rollout.logprobs).max() < LATENT.tolerance
    alone = np.abs(full_forward_logprobs(new, rollout) - rollout.logprobs)[rollout.weight_versions == 1]
    assert alone.mean() > 0.001


# ---- memory ---------------------------------------------------------------------------------------------------------


@TWO_KINDS
def test_the_cache_has_one_latent_per_token_and_layer(make_family_engine, fuse):
    engine = make_family_engine(fused=fuse)
    config: Any = model_of(WIDE.name).config
    token_dim = config.kv_lora_rank + config.qk_rope_head_dim
    blocks = sum(group.num_blocks for group in engine.memory.groups)
    assert engine.memory.nbytes == config.num_hidden_layers * blocks * 16 * token_dim * 4
    for keys, values in zip(engine.memory.keys, engine.memory.values, strict=True):
        assert keys.numel() == blocks * 16 * token_dim
        assert values.data_ptr() == keys.data_ptr()


def test_absorbed_matrices_are_views_of_the_slot(make_family_engine):
    engine = make_family_engine()
    for decoder, slot in zip(engine.runner._decoders, engine.slot_table.slots, strict=True):
        begin = slot.buffer.data_ptr()
        for layer in decoder._layers:
            heads = layer.attention.heads
            assert all(begin <= half.data_ptr() < begin + slot.buffer.nbytes for half in heads)
            assert heads.keys_HPL.untyped_storage().data_ptr() == slot.buffer.untyped_storage().data_ptr()


# ---- planted mistakes -----------------------------------------------------------------------------------------------


def scale_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args, scale, **options):
        return latent.latent_attention(*args, scale=scale * 1.05, **options)

    monkeypatch.setattr(paged, "latent_attention", wrong)


def mix_up_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    of = LatentHeads.of
    monkeypatch.setattr(LatentHeads, "of", lambda module: (heads := of(module)) and LatentHeads(*reversed(heads)))


@pytest.mark.parametrize("plant", [scale_wrongly, mix_up_halves])
def test_a_wrong_absorption_is_refused_at_load(family_dir, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="its logits are off by"):
        Engine(EngineOptions(model=family_dir(WIDE.name), device="cpu"))


@pytest.mark.parametrize(
    "name",
    [
        WIDE.name,
        pytest.param("deepseek_v3-uninterleaved", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", marks=pytest.mark.medium),
    ],
)
def test_a_wrong_rotation_is_not_fused(make_family_engine, monkeypatch, name):
    right = fused.latents_rotate_neighbours
    monkeypatch.setattr(fused, "latents_rotate_neighbours", lambda attention: not right(attention))
    engine = make_family_engine(name)
    assert engine.runner.unfused_reason == "the fused decoder and the Transformers model give different logits"


def test_absorbed_matrices_that_outlive_a_swap_show(make_family_engine, monkeypatch):
    of, made = LatentHeads.of, {}

    def stale(module):
        if module not in made:
            heads = of(module)
            made[module] = heads and LatentHeads(*(half.clone() for half in heads))
        return made[module]

    old, new = model_of(WIDE.name), model_of(WIDE.name, 1)
    monkeypatch.setattr(LatentHeads, "of", stale)
    rollout = swapped_in_flight(make_family_engine(), new)
    assert np.abs(logprobs_over_old_latents(old, new, rollout) - rollout.logprobs).max() > 0.01
