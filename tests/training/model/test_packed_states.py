"""Packed sequences in layers with a state, or with sparse attention, are scored like whole sequences, one at a time."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hybrids import FAMILIES, OF_EACH_KIND, model_of
from made_batches import make_batch, make_branches, make_group, one_by_one
from torch.nn.utils.stateless import _reparametrize_module

from inflight.training.data.batch import pack
from inflight.training.model import packed_states, packing
from inflight.training.model.forward import score_tokens, try_way
from inflight.training.model.forward_mode import scoring_way
from inflight.training.model.packed_states import StateLayout, mix
from inflight.training.model.packing import pack_input
from inflight.training.model.short_convolution import Predecessors

PADDED = ("mamba2",)
"""Its model hands no keyword arguments to its layers."""
SPARSE = ("deepseek_v32", "glm_moe_dsa-shared", "axk2", "dots3_note_text", "hy_v4")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return (
        []
        if name in ("lfm2", "glm_moe_dsa-shared")
        else [pytest.mark.medium if name in OF_EACH_KIND else pytest.mark.slow]
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAMILIES + SPARSE])
def test_scores_and_gradients_are_those_of_the_sequences(name, checkpointing):
    batch = make_batch()
    reference, model = model_of(name), model_of(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, entropies = one_by_one(reference, batch)
    scores = score_tokens(model, batch, entropy=True)
    assert scores.entropies is not None
    assert scoring_way(model, batch, try_way) == ("rows" if name in PADDED else "fused")
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-4, rtol=1e-4)
    upstream = torch.randn(2, len(expected), generator=torch.Generator().manual_seed(0))
    (scores.logprobs @ upstream[0] + scores.entropies @ upstream[1]).backward()
    (expected @ upstream[0] + entropies @ upstream[1]).backward()
    for (key, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if ours.grad is not None and theirs.grad is not None:
            assert (ours.grad - theirs.grad).abs().max() <= 1e-3 * theirs.grad.abs().max(), key
    assert not any("forward" in vars(module) for module in model.modules()), "a loss leaves the model as it was"


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in OF_EACH_KIND])
@pytest.mark.parametrize("seed", range(2))
def test_branches_continue_from_the_state_before_them(name, seed):
    rollouts = make_branches(seed)
    batch = pack(rollouts, np.random.default_rng(seed).normal(size=len(rollouts)).tolist())
    assert pack_input(batch).input_ids.shape[1] < 0.8 * len(batch.input_ids)
    reference, model = model_of(name), model_of(name)
    expected, scores = one_by_one(reference, batch)[0], score_tokens(model, batch).logprobs
    assert scoring_way(model, batch, try_way) == "fused"
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    upstream = torch.randn(len(expected), generator=torch.Generator().manual_seed(0))
    (scores @ upstream).backward()
    (expected @ upstream).backward()
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if ours.grad is not None and theirs.grad is not None:
            assert (ours.grad - theirs.grad).abs().max() <= 1e-3 * theirs.grad.abs().max(), key


@pytest.mark.medium
def test_a_single_token_continues_its_prompt():
    """Transformers would compute it in place, and its gradient would fail."""
    rollouts = make_group(np.random.default_rng(0), 0, samples=2, prompt=6)
    for rollout in rollouts:
        for name in ("token_ids", "logprobs", "weight_versions", "sampled_at_ns"):
            setattr(rollout, name, getattr(rollout, name)[:1])
    batch = pack(rollouts, [1.0, -1.0])
    model = model_of("nemotron_h")
    scores = score_tokens(model, batch).logprobs
    scores.sum().backward()
    torch.testing.assert_close(scores, one_by_one(model_of("nemotron_h"), batch)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])
def test_gated_norms_keep_only_their_inputs(monkeypatch, name):
    """With the tensors that they keep by themselves, the gradients are the same."""
    model, batch = model_of(name), make_batch()

    def kept_bytes():
        found = {}

        def remember(x):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
            scores = score_tokens(model, batch).logprobs
        scores.sum().backward()
        return sum(found.values()), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    kept, grads = kept_bytes()
    monkeypatch.setattr(packed_states, "_gates_recomputed", nullcontext)
    kept_before, grads_before = kept_bytes()
    assert kept <= 0.95 * kept_before
    for key, grad in grads.items():
        torch.testing.assert_close(grad, grads_before[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])
def test_gated_norms_are_computed_again_with_the_parameters_of_the_forward_pass(name):
    model, batch = model_of(name), make_batch(0, ((3, 12), (1, 1)))
    others = {key: (1.3 * p).detach().requires_grad_() for key, p in model.named_parameters()}
    grads = []
    for ends_inside in (True, False):
        with _reparametrize_module(model, others):  # as torch.func.functional_call does
            loss = score_tokens(model, batch).logprobs.sum()
            if ends_inside:
                grads.append(torch.autograd.grad(loss, list(others.values()), allow_unused=True))
    grads.append(torch.autograd.grad(loss, list(others.values()), allow_unused=True))
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_parameters_of_inference_mode_are_scored():
    batch = make_batch()
    with torch.inference_mode():
        model = model_of("qwen3_5_text")
        scores = score_tokens(model, batch).logprobs
    torch.testing.assert_close(scores, one_by_one(model_of("qwen3_5_text"), batch)[0], atol=1e-4, rtol=1e-4)


def test_changed_parameters_of_gated_norms_are_an_error():
    model = model_of("qwen3_5_text").requires_grad_(False)
    norms = [module for module in model.modules() if "RMSNormGated" in type(module).__name__]
    for norm in norms:
        norm.requires_grad_()
    batch = make_batch()
    loss = score_tokens(model, batch).logprobs.sum()
    with torch.no_grad():
        norms[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.backward()
    score_tokens(model, batch).logprobs.sum().backward()
    assert norms[0].weight.grad is not None
    assert not packing._replaced, "the model is as before"


def whole_row(module, layout, hidden):
    return type(module).forward(module, hidden)


def without_prompts(module, layout, hidden):
    """Sequences start after their prompts."""
    starts = [rows[0] for batch in layout.batches if batch.prefixes for rows in batch.rows]
    previous = layout.predecessors.previous.index_fill(0, torch.stack(starts), -1)
    batches = [batch._replace(prefixes=()) for batch in layout.batches]
    return mix(module, StateLayout(batches, Predecessors(previous)), hidden)


@pytest.mark.parametrize("wrong", [whole_row, without_prompts])
def test_a_planted_mistake_is_seen_and_the_sequences_are_padded(monkeypatch, caplog, wrong):
    monkeypatch.setattr(packing, "mix", wrong)
    model = model_of("lfm2")
    model.config.planted = wrong.__name__  # so that its twin is not the one of other tests
    batch = make_batch()
    scores = score_tokens(model, batch).logprobs
    assert scoring_way(model, batch, try_way) == "rows"
    assert "results are off by" in caplog.text
    torch.testing.assert_close(scores, one_by_one(model_of("lfm2"), batch)[0], atol=1e-4, rtol=1e-4)
