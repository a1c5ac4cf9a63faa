"""Families with latent attention keep one latent per token, and their log-probabilities equal a whole forward pass."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_check
import numpy as np
import pytest
import torch
from family_configs import Family
from family_overrides import VARIANTS
from full_forward import full_forward_logprobs, ragged_prompts
from hybrids import model_of as model_of_family
from inflight_kernels import latent
from live_engine import live, worst_error
from tiny_adapters import error, publish_adapters, with_adapters
from tiny_models import publish, run
from transformers import PreTrainedModel
from waiting import wait_until

import inflight
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

TOLERANCE = 1e-4
"""Nats. Largest difference of a token's log-probability."""
WIDE = Family(
    "deepseek_v3-wide",
    "deepseek_v3",
    {**VARIANTS["deepseek_v3"]["yarn"], "qk_rope_head_dim": 16, "first_k_dense_replace": 4},
)
"""Its latents have a length that the C kernel supports. PyTorch computes the other tiny models."""
CHANGED = {
    WIDE.name: WIDE,
    # Its distributions have more than one token then.
    "minicpm3": Family("minicpm3", "minicpm3", {"dim_model_base": 16}),
    # All experts are chosen: the scores of two of them differ by 6e-8 for one of the drawn tokens.
    "glm4_moe_lite": Family("glm4_moe_lite", "glm4_moe_lite", {"num_experts_per_tok": 4}),
    # Its prompts contain no image.
    "mistral_large4": Family("mistral_large4", "mistral_large4", {"image_token_id": 198}),
}
FUSED = (
    "deepseek_v3-wide", "deepseek_v3-yarn", "deepseek_v3", "deepseek_v3-uninterleaved",
    "deepseek_v3-published-moonlight", "deepseek_v2",
    "deepseek_v2-published-lite", "glm4_moe_lite", "minicpm3", "youtu", "axk1", "kimi_k25",
    "deepseek_v32", "deepseek_v32-published", "glm_moe_dsa", "glm_moe_dsa-shared",
)  # fmt: skip
UNFUSED = ("longcat_flash", "kimi_linear", "bailing_hybrid", "axk2", "mistral_large4")
"""Two attention layers in a layer; layers with a state; a gate after attention; the last two have sparse attention."""
FAMILIES = FUSED + UNFUSED
QUICK = ("deepseek_v3-wide",)
OF_EACH_KIND = ("deepseek_v3-wide", "deepseek_v2", "minicpm3", "longcat_flash", "glm_moe_dsa-shared")
MODES = {
    "whole": {"max_prefill_tokens": 1000},
    "chunked": {"max_prefill_tokens": 5},
    "preempted": {"kv_cache_tokens": 128, "max_prefill_tokens": 9},
    "overlap": {"overlap": True, "max_prefill_tokens": 9},
    "uncached": {"prefix_caching": False},
    "torch": {"attention": "torch", "max_prefill_tokens": 9},
}
TWO_KINDS = pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])


def model_of(name: str, version: int = 0) -> PreTrainedModel:
    return model_of_family(CHANGED.get(name, name), version)


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, Path] = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            model_of(name).save_pretrained(made[name])
        return str(made[name])

    return get


@pytest.fixture
def make_family_engine(make_engine, family_dir) -> Callable[..., Engine]:
    return lambda name=WIDE.name, **options: make_engine(family_dir(name), **options)


def some(names: tuple[str, ...]) -> list[Any]:
    marks = {name: pytest.mark.medium if name in OF_EACH_KIND else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=() if name in QUICK else marks[name]) for name in names]


# ---- against whole forward passes ---------------------------------------------------------------------------------


def marks(name: str, mode: str) -> list[pytest.MarkDecorator]:
    if mode == "chunked":
        return [] if name in QUICK else [pytest.mark.medium if name in OF_EACH_KIND else pytest.mark.slow]
    return [pytest.mark.medium if name in QUICK else pytest.mark.slow if name in OF_EACH_KIND else pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "mode"), [pytest.param(name, mode, marks=marks(name, mode)) for name in FAMILIES for mode in MODES]
)
def test_recorded_logprobs_equal_a_full_forward_whatever_happens(make_family_engine, name, mode):
    engine = make_family_engine(name, **MODES[mode])
    assert (engine.runner.unfused_reason is None) == (name in FUSED)
    assert all(layer.latent for layer in engine.memory._layers)
    assert worst_error(model_of(name), live(engine)) < TOLERANCE
    assert (engine.scheduler.preemption.count > 0) == (mode == "preempted")
    assert (engine.cache.num_reused_tokens > 0) == (mode != "uncached")


@pytest.mark.parametrize("name", some(FAMILIES))
def test_greedy_tokens_are_those_of_generate(make_family_engine, name):
    model: Any = model_of(name)
    prompts = [[(7 * i + k) % 190 + 5 for i in range(length)] for k, length in enumerate((3, 19, 1, 11))]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    rollouts = run(make_family_engine(name, max_prefill_tokens=7), [Prompt(ids, params) for ids in prompts])
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        generated = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert rollout.token_ids.tolist() == generated.tolist()


@pytest.mark.parametrize("name", some(FAMILIES))
def test_in_bf16_recorded_logprobs_are_as_close_to_fp32_as_those_of_transformers(make_family_engine, family_dir, name):
    rollouts = live(make_family_engine(name, dtype="bfloat16", max_prefill_tokens=9))
    assert (
        family_check._wrong_in_bf16(family_dir(name), model_of(name), [r for r in rollouts if len(r.token_ids)]) is None
    )


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
    old, new = model_of(WIDE.name), model_of(WIDE.name, version=1)
    rollout = swapped_in_flight(make_family_engine(fused=fuse), new)
    assert set(rollout.weight_versions) == {0, 1}
    expected = logprobs_over_old_latents(old, new, rollout)
    assert np.abs(expected - rollout.logprobs).max() < TOLERANCE
    alone = np.abs(full_forward_logprobs(new, rollout) - rollout.logprobs)[rollout.weight_versions == 1]
    assert alone.mean() > 0.001


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=pytest.mark.medium if name in OF_EACH_KIND else pytest.mark.slow)
        for name in FAMILIES
        for policy in ("keep", "recompute")
    ],
)
def test_each_token_is_of_the_version_that_it_records(make_family_engine, name, policy):
    engine, models = make_family_engine(name, kv_on_swap=policy, max_prefill_tokens=20), [model_of(name)]
    assembler, rollouts, steps = Assembler(), [], 0
    engine.requests.submit(ragged_prompts(8, [SamplingParams(max_tokens=40, ignore_eos=True, n=2)]))
    while engine.has_work:
        frame = engine.step()
        rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
        steps += 1
        if steps in (15, 40, 42):  # the last one while sequences are still computed again
            models.append(model_of(name, version=len(models)))
            publish(engine, models[-1])
    late = run(engine, ragged_prompts(4, [SamplingParams(max_tokens=8, ignore_eos=True)], seed=2))
    errors: dict[int, list[float]] = {version: [] for version in range(len(models))}
    for rollout in rollouts:
        for version, model in enumerate(models):
            drawn = rollout.weight_versions == version
            errors[version] += np.abs(full_forward_logprobs(model, rollout) - rollout.logprobs)[drawn].tolist()
    assert max(errors[0]) < TOLERANCE
    assert worst_error(models[-1], late) < TOLERANCE, "prefixes of earlier versions are not reused"
    if policy == "recompute":
        assert max(errors[1] + errors[2] + errors[3]) < TOLERANCE
    else:
        assert np.mean(errors[1]) > 0.001


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


def test_a_sleeping_engine_frees_its_latents(make_family_engine):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, n=2)
    engine, assembler = make_family_engine(), Assembler()
    engine.requests.submit([Prompt([4, 5], params)])
    for _ in range(6):
        assembler.add(engine.step())
    engine.sleep()
    assert engine.memory.keys == engine.memory.values == []
    engine.wake()
    rollouts = []
    while not engine.idle:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    assert worst_error(model_of(WIDE.name), rollouts) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_samples_of_an_engine_that_died_continue_exactly(family_dir, name):
    options = {"device": "cpu", "threads": 1, "max_context": 128, "max_sequences": 6}
    prompts = [[(7 * i + k) % 190 + 5 for i in range(18)] for k in range(2)]
    with inflight.launch(family_dir(name), restarts=1, **options) as engine:
        first = engine.pid
        engine.submit(prompts, SamplingParams(n=3, max_tokens=100, seed=1, ignore_eos=True))
        wait_until(lambda: engine.stream.num_tokens >= 60)
        os.kill(first, signal.SIGKILL)
        rollouts = [rollout for group in engine.stream.groups() for rollout in group]
        assert engine.pid != first
    assert [len(rollout.token_ids) for rollout in rollouts] == [100] * 6
    assert worst_error(model_of(name), rollouts) < TOLERANCE


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


@pytest.mark.parametrize("name", some((WIDE.name, "deepseek_v3-uninterleaved", "deepseek_v2")))
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

    old, new = model_of(WIDE.name), model_of(WIDE.name, version=1)
    monkeypatch.setattr(LatentHeads, "of", stale)
    rollout = swapped_in_flight(make_family_engine(), new)
    assert np.abs(logprobs_over_old_latents(old, new, rollout) - rollout.logprobs).max() > 0.01


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@TWO_KINDS
def test_adapters_next_to_latent_attention_are_those_of_peft(make_family_engine, fuse):
    name = "deepseek_v3-noqlora"
    model = with_adapters(name, "default", targets=r".*self_attn\.(q|o)_proj", base=model_of)
    engine = make_family_engine(name, lora_rank=4, max_prefill_tokens=7, fused=fuse)
    assert (engine.runner.unfused_reason is None) == fuse
    publish_adapters(engine, model)
    adapters = ["default", None, "default", None]
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2, seed=1)
    prompts = [Prompt([13 + i] * (3 * i + 1), params, adapter=adapter) for i, adapter in enumerate(adapters)]
    for rollout in run(engine, prompts):
        assert error(model, rollout, adapters[rollout.group_id]) < TOLERANCE
