"""Fused Gemma 4: layers that attend to the keys of earlier ones, values that are keys, and inputs per layer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import RIGHT, VOCABULARY, make_model
from full_forward import full_forward_logprobs, ragged_prompts, worst_error
from live_engine import live
from tiny_models import publish, run
from transformers import AutoModelForCausalLM

from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.stream.assembler import Assembler

NAMES = ("gemma4_text", "gemma4_text-large")
MODES = {
    "chunked": {"max_prefill_tokens": 5},
    "preempted": {"kv_cache_tokens": 128, "max_prefill_tokens": 9},
    "overlap": {"overlap": True, "max_prefill_tokens": 9},
    "uncached": {"prefix_caching": False},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    def get(name: str) -> str:
        path: Path = tmp_path_factory.getbasetemp() / name
        if not path.exists():
            make_model(RIGHT[name]()).save_pretrained(path)
        return str(path)

    return get


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_recorded_logprobs_equal_a_full_forward_whatever_happens(make_engine, saved, name, mode):
    engine = make_engine(saved(name), **MODES[mode])
    assert engine.runner.unfused_reason is None
    assert worst_error(make_model(RIGHT[name]()), live(engine)) < 2e-4
    assert (engine.scheduler.preemption.count > 0) == (mode == "preempted")
    if mode != "chunked":  # blocks of a prompt in small chunks leave the window before it ends
        assert (engine.cache.num_reused_tokens > 0) == (mode != "uncached")


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_every_token_is_of_its_version_across_swaps(make_engine, saved, name):
    models = [make_model(RIGHT[name](), seed) for seed in range(3)]
    with torch.no_grad():
        for model in models[1:]:
            for tensor in model.parameters():
                tensor.mul_(1.05)
    engine = make_engine(saved(name), kv_on_swap="recompute")
    engine.requests.submit(ragged_prompts(4, [SamplingParams(max_tokens=30, ignore_eos=True, n=2)]))
    assembler, rollouts, step = Assembler(), [], 0
    while engine.has_work:
        if step in (12, 24):
            publish(engine, models[step // 12])
        if (frame := engine.step()) is not None:
            rollouts += [rollout for group in assembler.add(frame) for rollout in group]
        step += 1
    assert {version for rollout in rollouts for version in rollout.weight_versions.tolist()} == {0, 1, 2}
    for rollout in rollouts:
        errors = np.abs([full_forward_logprobs(model, rollout) - rollout.logprobs for model in models])
        tokens = np.arange(len(rollout.token_ids))
        assert errors[rollout.weight_versions, tokens].max() < 5e-4
        assert np.median(errors[(rollout.weight_versions + 1) % 3, tokens]) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate(make_engine, saved, name):
    prompts = [[(7 * place + start) % VOCABULARY for place in range(20)] for start in range(3)]
    model = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32).eval()
    engine = make_engine(saved(name))
    drawn = run(engine, [Prompt(p, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)) for p in prompts])
    ids = torch.tensor(prompts)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert [rollout.token_ids.tolist() for rollout in drawn] == expected[:, 20:].tolist()
