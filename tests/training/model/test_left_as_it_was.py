"""A loss leaves a model unchanged: its configuration, its saved files and its outputs."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from made_batches import make_batch, one_by_one
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from inflight.training.model import packing
from inflight.training.model.forward import score_tokens
from inflight.training.objective.loss import policy_loss


def implementations(model) -> list[str]:
    return [config._attn_implementation for config in packing._with_inner(model.config)]


def gradients(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_configuration_is_the_models_own_after_forward_and_after_backward(implementation):
    model = make_model("qwen3")
    model.set_attn_implementation(implementation)
    before = implementations(model)
    loss, _ = policy_loss(model, make_batch())
    assert implementations(model) == before == [implementation]
    loss.backward()
    assert implementations(model) == before
    with torch.no_grad():
        score_tokens(model, make_batch())
    assert implementations(model) == before
    assert not packing._replaced


@pytest.mark.parametrize("kind", ["forward", "hook"])
def test_a_changed_head_is_used_and_kept(kind):
    model, batch = make_model("qwen3"), make_batch()
    plain = score_tokens(model, batch).logprobs
    head, seen = model.lm_head, []
    if kind == "forward":
        own = head.forward
        head.forward = replaced = lambda hidden: 2 * own(hidden)
    else:
        head.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits.shape[-1]) or 2 * logits)
    assert not torch.allclose(score_tokens(model, batch).logprobs, plain)
    assert set(seen) <= {head.out_features}
    assert kind == "hook" or head.forward is replaced


def test_another_loss_mask_needs_other_drawn_tokens():
    batch = make_batch()
    with pytest.raises(ValueError, match="drawn does not contain"):
        replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


def test_negative_ids_are_not_tokens():
    model, batch = make_model("qwen3"), make_batch()
    assert (score_tokens(model, batch, at=torch.full((batch.num_drawn, 1), -1)).at == -torch.inf).all()


@pytest.mark.parametrize("head", ["plain", "changed"])
def test_more_of_the_likeliest_tokens_than_there_are_are_refused(head):
    model, batch = make_model("qwen3"), make_batch()
    size = model.config.vocab_size
    if head == "changed":
        model.lm_head.register_forward_hook(lambda *_: None)
    assert score_tokens(model, batch, at=size).ids.shape == (batch.num_drawn, size)
    with pytest.raises(ValueError, match=f"the {size + 1} likeliest tokens cannot be scored: .* has {size} tokens"):
        score_tokens(model, batch, at=size + 1)


def test_it_is_so_after_an_exception_in_the_loss():
    model = make_model("qwen3")
    score_tokens(model, make_batch())  # the way is known
    handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy_loss(model, make_batch())
    handle.remove()
    assert implementations(model) == ["sdpa"]
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, make_model("qwen3")(ids).logits)


def test_a_backward_pass_that_failed_is_over_with_the_next_loss():
    model = make_model("qwen3")
    loss, _ = policy_loss(model, make_batch())
    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    score_tokens(model, make_batch())
    assert implementations(model) == ["sdpa"]


def test_inner_configurations_keep_attention_of_their_own():
    """That of a vision tower, for example."""
    model = make_model("qwen3")
    inner = copy.deepcopy(model.config)
    inner._attn_implementation = "eager"
    type(model.config).sub_configs, model.config.tower = {"tower": type(inner)}, inner
    try:
        policy_loss(model, make_batch())[0].backward()
        assert implementations(model) == ["sdpa", "eager"]
    finally:
        type(model.config).sub_configs = {}


@pytest.mark.medium
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_activations_that_are_computed_again_see_their_own_sequences(implementation, reentrant):
    """Backward runs the layers again, long after the configuration is the model's own."""
    plain, checkpointed = make_model("qwen3"), make_model("qwen3")
    checkpointed.set_attn_implementation(implementation)
    checkpointed.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    batches = [make_batch(0), make_batch(1)]
    score_tokens(checkpointed, batches[0])  # the way is known
    runs = []
    for layer in checkpointed.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: runs.append(1))
    sum(policy_loss(checkpointed, batch)[0] for batch in batches).backward()
    assert len(runs) == 2 * 2 * len(checkpointed.model.layers)  # each twice for both batches
    for batch in batches:
        logprobs, _ = one_by_one(plain, batch)
        ours = score_tokens(make_model("qwen3"), batch).logprobs
        torch.testing.assert_close(ours, logprobs, atol=1e-4, rtol=1e-4)
        policy_loss(plain, batch)[0].backward()
    torch.testing.assert_close(gradients(checkpointed), gradients(plain), atol=1e-6, rtol=1e-3)
    assert implementations(checkpointed) == [implementation]


@pytest.mark.medium
def test_what_is_copied_pickled_or_saved_after_a_loss_works_where_inflight_is_not(tmp_path):
    model = make_model("qwen3")
    ids = torch.tensor([[3, 1, 2, 5]])
    expected = model(ids).logits
    loss, _ = policy_loss(model, make_batch())
    twin = copy.deepcopy(model)  # between forward and backward
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    loss.backward()
    model.save_pretrained(tmp_path / "saved")
    assert implementations(twin) == ["sdpa"]
    assert torch.equal(twin(ids).logits, expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    torch.testing.assert_close(loaded(ids).logits, expected)
    code = (
        "import pickle, sys, torch; model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert 'inflight' not in sys.modules\n"
        "print(model(torch.tensor([[3, 1, 2, 5]])).logits.double().sum().item())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pickle"], capture_output=True, text=True, timeout=300
    )
    assert float(found.stdout) == pytest.approx(expected.double().sum().item(), abs=1e-3), found.stderr
