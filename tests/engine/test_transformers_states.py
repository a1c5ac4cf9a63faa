"""Families of Transformers whose layers keep a state per sequence. `test_ladder.py` has their log-probabilities."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from full_forward import worst_error
from hybrids import FAMILIES, OF_EACH_KIND, model_of
from inflight_kernels import layer_states
from ladder import STATES
from live_engine import live
from tiny_adapters import publish_adapters, with_adapters
from tiny_models import run
from transformers import PretrainedConfig

from inflight.core.errors import LayoutMismatchError, UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.cache import classify, transformers_states
from inflight.engine.loop.engine import Engine
from inflight.model_checks import mixers

REFUSED = {
    "jamba": "JambaForCausalLM cannot be run: where sequences share a pass or go",
    "minimax": r"MiniMaxForCausalLM has layers that the engine cannot run: model.layers.1 \(MiniMaxLightningAtten",
    "recurrent_gemma": r"RecurrentGemmaForCausalLM has layers that the engine cannot run: model.layers.0 \(Recur",
    "zaya": "ZayaForCausalLM cannot be run: ZayaCCAProjection does not return one hidden state per token",
    "inkling_text": "InklingForCausalLM cannot be run: InklingShortConvolution does not say its hidden size",
}


@pytest.fixture
def family_dir(directory_of) -> Callable[[str], str]:
    return partial(directory_of, STATES)


@pytest.fixture
def make_family_engine(make_kind_engine) -> Callable[..., Engine]:
    return partial(make_kind_engine, STATES)


@pytest.mark.medium
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_recorded_logprobs_equal_a_full_forward_without_kernels(make_family_engine, monkeypatch, name):
    compute_with_copies(monkeypatch)
    assert worst_error(model_of(name), live(make_family_engine(name, max_prefill_tokens=5))) < STATES.tolerance


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernels_mix_the_tokens(make_family_engine, monkeypatch, name):
    """None of these families computes with copies."""
    monkeypatch.setattr(transformers_states, "_advance", lambda *_: pytest.fail("states are copied"))
    run(make_family_engine(name), [Prompt([5, 7, 9], SamplingParams(max_tokens=3, ignore_eos=True))])


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


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_an_adapter_of_a_layer_with_a_state_is_refused_by_name(make_family_engine):
    engine = make_family_engine("olmo_hybrid", lora_rank=4)
    model = with_adapters("olmo_hybrid", "default", targets=["q_proj"], base=model_of)
    with pytest.raises(LayoutMismatchError, match=r"no adapter default\.model\.layers\.0\.linear_attn\.q_proj"):
        publish_adapters(engine, model)


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
