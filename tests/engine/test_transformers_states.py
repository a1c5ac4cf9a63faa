"""Families of Transformers whose layers keep a state per sequence compute in the engine what they compute in a whole
forward pass."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_forward import full_forward_logprobs, ragged_prompts
from hybrids import FAMILIES, OF_EACH_KIND, model_of
from inflight_kernels import layer_states
from live_engine import live, worst_error
from tiny_adapters import error, publish_adapters, with_adapters
from tiny_models import publish, run
from transformers import AutoModelForCausalLM, PretrainedConfig
from waiting import wait_until

import inflight
from inflight.core.errors import LayoutMismatchError, UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.cache import classify, transformers_states
from inflight.engine.loop.engine import Engine
from inflight.model_checks import mixers
from inflight.stream.assembler import Assembler

TOLERANCE = 1e-4
"""Nats. Largest difference of a token's log-probability."""
REFUSED = {
    "jamba": "JambaForCausalLM cannot be run: where sequences share a pass or go",
    "minimax": r"MiniMaxForCausalLM has layers that the engine cannot run: model.layers.1 \(MiniMaxLightningAtten",
    "recurrent_gemma": r"RecurrentGemmaForCausalLM has layers that the engine cannot run: model.layers.0 \(Recur",
    "zaya": "ZayaForCausalLM cannot be run: ZayaCCAProjection does not return one hidden state per token",
    "inkling_text": "InklingForCausalLM cannot be run: InklingShortConvolution does not say its hidden size",
}
MODES = {
    "whole": {"max_prefill_tokens": 1000},
    "chunked": {"max_prefill_tokens": 5},
    "preempted": {"kv_cache_tokens": 128, "max_prefill_tokens": 9},
    "overlap": {"overlap": True, "max_prefill_tokens": 9},
    "uncached": {"prefix_caching": False},
}


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
    return lambda name, **options: make_engine(family_dir(name), **options)


def marks(name: str, mode: str) -> list[pytest.MarkDecorator]:
    if mode == "chunked":
        return [] if name == "qwen3_5_text" else [pytest.mark.medium if name in OF_EACH_KIND else pytest.mark.slow]
    return [pytest.mark.slow if name in OF_EACH_KIND else pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(name, mode, marks=marks(name, mode)) for name in FAMILIES for mode in MODES],
)
def test_recorded_logprobs_equal_a_full_forward_whatever_happens(make_family_engine, name, mode):
    engine = make_family_engine(name, **MODES[mode])
    assert worst_error(model_of(name), live(engine)) < TOLERANCE
    assert engine.memory.states
    if engine.memory.groups:
        assert (engine.scheduler.preemption.count > 0) == (mode == "preempted")
        assert (engine.cache.num_reused_tokens > 0) == (mode != "uncached")


@pytest.mark.medium
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_recorded_logprobs_equal_a_full_forward_without_kernels(make_family_engine, monkeypatch, name):
    compute_with_copies(monkeypatch)
    assert worst_error(model_of(name), live(make_family_engine(name, max_prefill_tokens=5))) < TOLERANCE


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernels_mix_the_tokens(make_family_engine, monkeypatch, name):
    """None of these families computes with copies."""
    monkeypatch.setattr(transformers_states, "_advance", lambda *_: pytest.fail("states are copied"))
    run(make_family_engine(name), [Prompt([5, 7, 9], SamplingParams(max_tokens=3, ignore_eos=True))])


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_generate(make_family_engine, name):
    """Without Transformers' cache: its decoding of Mamba-2 forgets the limits of time steps."""
    model: Any = model_of(name)
    engine = make_family_engine(name, max_prefill_tokens=7)
    prompts = [[(7 * i + k) % 190 + 5 for i in range(length)] for k, length in enumerate((3, 19, 1, 11))]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for rollout, prompt in zip(run(engine, [Prompt(ids, params) for ids in prompts]), prompts, strict=True):
        options = {"max_new_tokens": 12, "do_sample": False, "use_cache": False, "eos_token_id": None}
        generated = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert rollout.token_ids.tolist() == generated.tolist()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.medium if name in OF_EACH_KIND else pytest.mark.slow) for name in FAMILIES],
)
def test_in_bf16_recorded_logprobs_are_as_close_to_fp32_as_those_of_transformers(make_family_engine, family_dir, name):
    rounded = AutoModelForCausalLM.from_pretrained(family_dir(name), dtype=torch.bfloat16, attn_implementation="eager")
    exact = AutoModelForCausalLM.from_pretrained(family_dir(name), dtype=torch.bfloat16, attn_implementation="eager")
    exact.float()
    rollouts = [r for r in live(make_family_engine(name, dtype="bfloat16", max_prefill_tokens=9)) if len(r.token_ids)]
    expected = [full_forward_logprobs(exact, r) for r in rollouts]
    ours = np.concatenate([np.abs(e - r.logprobs) for e, r in zip(expected, rollouts, strict=True)])
    theirs = np.concatenate(
        [np.abs(e - full_forward_logprobs(rounded, r)) for e, r in zip(expected, rollouts, strict=True)]
    )
    assert ours.mean() <= 1.2 * theirs.mean()


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
    assert worst_error(models[-1], late) < TOLERANCE, "prefixes and states of earlier versions are not reused"
    if policy == "recompute":
        assert max(errors[1] + errors[2] + errors[3]) < TOLERANCE
    else:
        assert np.mean(errors[1]) > 0.001


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


@pytest.mark.medium
@torch.no_grad()
def test_limits_of_time_steps_hold_for_single_tokens(monkeypatch):
    """Transformers' own cache forgets them: a second truth would show."""
    mixer: Any = next(module for module in model_of("nemotron_h").modules() if mixers.keeps_state(module))
    mixer.time_step_limit = (0.05, 0.1)
    hidden = torch.randn(1, 12, mixer.hidden_size)

    def steps() -> torch.Tensor:
        carried = mixers.CarriedState()
        first = mixers.advance(mixer, carried, hidden[:, :5])
        carried = mixers.CarriedState(carried.state, in_place=True)
        return torch.cat([first, *(mixers.advance(mixer, carried, hidden[:, t : t + 1]) for t in range(5, 12))], 1)

    whole = mixer(hidden)
    torch.testing.assert_close(steps(), whole, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(mixers, "_SINGLE_STEP", "no function")
    assert (steps() - whole).abs().max() > 1e-3


# ---- planted mistakes -----------------------------------------------------------------------------------------------


def compute_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, or without a C compiler."""
    monkeypatch.setattr(transformers_states, "_has_kernels", lambda *_: False)


def keep_the_old_states(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("delta_rule", "selective_scan"):
        function = getattr(layer_states, name)

        def on_a_copy(*args: Any, function: Any = function, **kwargs: Any) -> torch.Tensor:
            return function(*args[:-2], args[-2].clone(), args[-1], **kwargs)

        monkeypatch.setattr(layer_states, name, on_a_copy)


def keep_the_old_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    function = layer_states.short_convolution

    def on_a_copy(x: Any, weight: Any, bias: Any, states: Any, chunks: Any, **kwargs: Any) -> torch.Tensor:
        return function(x, weight, bias, states.clone(), chunks, **kwargs)

    monkeypatch.setattr(layer_states, "short_convolution", on_a_copy)


def do_not_write_states(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_with_copies(monkeypatch)
    monkeypatch.setattr(transformers_states, "zip", lambda *_, **__: (), raising=False)


def forget_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_with_copies(monkeypatch)
    get = mixers.CarriedState.get_conv_state

    def get_zeros(self, layer_idx, state_idx=0):
        columns = get(self, layer_idx, state_idx)
        return columns if columns is None else torch.zeros_like(columns)

    monkeypatch.setattr(mixers.CarriedState, "get_conv_state", get_zeros)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (keep_the_old_states, "qwen3_5_text"),
        (keep_the_old_states, "nemotron_h"),
        (keep_the_old_columns, "lfm2"),
        (do_not_write_states, "qwen3_5_text"),
        (do_not_write_states, "nemotron_h"),
        (forget_the_columns, "lfm2"),
    ],
)
def test_a_planted_mistake_makes_the_model_refused(family_dir, monkeypatch, plant, name):
    plant(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="cached keys, values and states"):
        Engine(EngineOptions(model=family_dir(name), device="cpu"))


def test_a_state_that_leaks_into_another_sequence_shows(make_family_engine, monkeypatch):
    engine = make_family_engine("qwen3_5_text", max_prefill_tokens=9)
    take = engine.cache.copies.take
    monkeypatch.setattr(engine.cache.copies, "take", lambda: [*take()[:-1], {}])  # states of forks are not copied
    assert worst_error(model_of("qwen3_5_text"), live(engine)) > 0.01


# ---- adapters -------------------------------------------------------------------------------------------------------

PROJECTIONS = r".*(self_attn|mlp).*\.(q|k|v|o|gate|up|down)_proj"
"""Of attention and MLPs."""


@pytest.mark.medium
def test_adapters_of_attention_and_mlp_are_right_between_layers_with_a_state(make_family_engine):
    model = with_adapters("qwen3_5_text", "default", targets=PROJECTIONS, base=model_of)
    engine = make_family_engine("qwen3_5_text", lora_rank=4, max_prefill_tokens=7)
    publish_adapters(engine, model)
    adapters = ["default", None, "default", None]
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2, seed=1)
    prompts = [Prompt([13 + i] * (3 * i + 1), params, adapter=adapter) for i, adapter in enumerate(adapters)]
    for rollout in run(engine, prompts):
        assert error(model, rollout, adapters[rollout.group_id]) < TOLERANCE


@pytest.mark.medium
def test_an_adapter_of_a_layer_with_a_state_is_refused_by_name(make_family_engine):
    engine = make_family_engine("olmo_hybrid", lora_rank=4)
    model = with_adapters("olmo_hybrid", "default", targets=["q_proj"], base=model_of)
    with pytest.raises(LayoutMismatchError, match=r"no adapter default\.model\.layers\.0\.linear_attn\.q_proj"):
        publish_adapters(engine, model)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_with_a_state_are_refused_by_name(family_dir, name):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        Engine(EngineOptions(model=family_dir(name), device="cpu"))


class MixerOfOlderTransformers(torch.nn.Linear):
    """Reads its state from an argument with the name that Transformers 5.17 to 5.23 used."""

    def forward(self, hidden_states, cache_params=None):
        return hidden_states if cache_params is None else cache_params.update_conv_state(hidden_states, 0)


@pytest.mark.parametrize("version", ["5.17.0", "5.23.1", "5.24.0"])
def test_layers_of_older_transformers_are_refused_with_the_version_that_they_need(version, monkeypatch):
    monkeypatch.setattr(mixers.transformers, "__version__", version)
    model = torch.nn.Sequential(MixerOfOlderTransformers(4, 4))
    way_out = f"MixerOfOlderTransformers; layers with a state need Transformers 5.24 or newer; {version} is installed"
    with pytest.raises(UnsupportedModelError) as refused:
        classify.classify_layers(model)  # pyright: ignore[reportArgumentType]
    assert (way_out in str(refused.value)) == (version != "5.24.0")


@pytest.mark.parametrize("version", ["5.17.0", "5.18.0"])
def test_sparse_attention_of_older_transformers_is_refused_with_the_version_that_it_needs(version, monkeypatch):
    monkeypatch.setattr(mixers.transformers, "__version__", version)
    config = PretrainedConfig()
    config.layer_types = ["deepseek_sparse_attention"]
    way_out = "layers with sparse attention need Transformers 5.18 or newer; 5.17.0 is installed"
    with pytest.raises(UnsupportedModelError) as refused:
        classify.check_layer_types(config)
    assert (way_out in str(refused.value)) == (version == "5.17.0")
