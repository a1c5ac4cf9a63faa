"""A packed forward pass computes what whole sequences, one at a time, compute."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import make_batch, make_branches, one_by_one
from peft import LoraConfig, get_peft_model
from tiny_models import COMMON, CONFIGS, SOME_AT_ONCE, make_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Starcoder2Config

from inflight.core.rollout import Rollout, Turn
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model.forward import TokenScores, bf16_on_gpu, score_tokens, token_logprobs
from inflight.training.model.forward_mode import scoring_way
from inflight.training.model.packing import pack_input
from inflight.training.model.values import token_values, value_model
from inflight.training.objective.loss import loss_of_scores, policy_loss
from inflight.training.objective.objective import resolve


@pytest.mark.medium
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_forward_and_its_gradient_are_those_of_the_sequences(name, checkpointing):
    batch = make_batch()
    reference, model = make_model(name), make_model(name).train()
    reference.set_attn_implementation("eager")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, entropies = one_by_one(reference, batch)
    scores = score_tokens(model, batch, entropy=True)
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-4, rtol=1e-4)
    upstream = torch.randn(2, len(expected), generator=torch.Generator().manual_seed(0))
    (scores.logprobs @ upstream[0] + scores.entropies @ upstream[1]).backward()
    (expected @ upstream[0] + entropies @ upstream[1]).backward()
    for (key, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        scale = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() <= 1e-3 * scale, key


def of_branches(seed: int = 0, **shape) -> PackedBatch:
    rollouts = make_branches(seed, **shape)
    return pack(rollouts, np.random.default_rng(seed).normal(size=len(rollouts)).tolist())


@pytest.mark.parametrize("name", SOME_AT_ONCE)
def test_branches_have_the_scores_and_the_gradient_of_whole_sequences(name):
    batch, reference, model = of_branches(), make_model(name), make_model(name)
    assert pack_input(batch).input_ids.shape[1] < 0.7 * len(batch.input_ids)
    reference.set_attn_implementation("eager")
    expected, entropies = one_by_one(reference, batch)
    scores = score_tokens(model, batch, entropy=True)
    assert scoring_way(model, batch, None) == "fused"
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(2, len(expected), generator=torch.Generator().manual_seed(0))
    (scores.logprobs @ upstream[0] + scores.entropies @ upstream[1]).backward()
    (expected @ upstream[0] + entropies @ upstream[1]).backward()
    for (key, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max(), key


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [None, 8])
def test_branches_are_exact_in_float64(window, seed):
    """Values of all tokens, also before a branch, and the gradient. RMSNorms would compute in fp32."""
    config = Starcoder2Config(intermediate_size=96, sliding_window=window, **COMMON)
    torch.manual_seed(seed)
    batch, model = of_branches(seed), AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.set_output_embeddings(torch.nn.Linear(64, 1, dtype=torch.float64))
    parts = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
    expected = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0, :, 0] for ids in parts])
    upstream = torch.randn(len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients, values = [], token_values(model, batch)
    assert scoring_way(model, batch, None) == "fused"
    for result in (expected, values):
        (result @ upstream).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "gemma2", "gpt-oss", "qwen3-moe"])
def test_under_autocast_a_packed_forward_is_as_near_to_fp32_as_the_model_alone(name):
    batch = make_batch()
    reference, model = make_model(name), make_model(name)
    exact, _ = one_by_one(reference, batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = one_by_one(reference, batch)
        scores = score_tokens(model, batch).logprobs
    assert scoring_way(model, batch, None) == "fused"  # the way that was found without autocast
    scores.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    rounding = (expected.float() - exact).abs().mean()
    assert 0 < (scores - exact).abs().mean() < 3 * rounding


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "gemma2", "gpt-oss", "qwen3-moe"])
def test_on_the_gpu_an_update_computes_in_bf16_unless_it_is_told_not_to(name):
    batch = make_batch()
    expected, model = token_logprobs(make_model(name), batch), make_model(name).cuda()
    errors = []
    for autocast in (True, False):
        with bf16_on_gpu(model, autocast):
            scores = token_logprobs(model, batch)
        scores.sum().backward()
        assert all(p.dtype == torch.float32 and (p.grad is None or p.grad.isfinite().all()) for p in model.parameters())
        errors.append(float((scores.detach().cpu() - expected).abs().mean().detach()))
    assert 10 * errors[1] < errors[0] < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "gemma2", "gpt-oss", "qwen3-moe"])
def test_a_packed_forward_and_its_gradient_on_the_gpu_are_those_of_the_cpu(name):
    batch = make_batch()
    reference, model = make_model(name), make_model(name).cuda()
    expected, _ = policy_loss(reference, batch, objective="ppo_clip")
    expected.backward()
    loss, _ = policy_loss(model, batch.to("cuda"), objective="ppo_clip")
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        assert (ours.grad.cpu() - theirs.grad).abs().max() <= 1e-2 * scale, key


def test_a_compiled_model_is_scored_uncompiled():
    model, batch = make_model("qwen3"), make_batch()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(score_tokens(compiled, batch).logprobs, score_tokens(model, batch).logprobs)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_model_compiled_in_place_is_scored_uncompiled_and_stays_compiled(has_adapter):
    def refuse(*_: object) -> None:
        raise AssertionError("the model was compiled")

    model, batch = make_model("qwen3"), make_batch()
    expected, values = score_tokens(model, batch).logprobs, token_values(value_model(model), batch)
    compiled = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if has_adapter else model
    compiled.compile(backend=refuse)
    torch.testing.assert_close(score_tokens(compiled, batch).logprobs, expected)
    if not has_adapter:
        of_values = value_model(model)
        of_values.compile(backend=refuse)
        torch.testing.assert_close(token_values(of_values, batch), values)
    with pytest.raises(Exception, match="the model was compiled"):
        compiled(input_ids=batch.input_ids[None, :4])


@pytest.mark.medium
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "gpt-oss"])
def test_a_model_that_was_packed_does_what_it_did(name, attention):
    """Our attention stays in place after a forward pass with gradient; for other inputs it is the model's own."""
    model = make_model(name)
    model.set_attn_implementation("eager" if name == "gpt-oss" else attention)
    before = model.config._attn_implementation
    ids = torch.arange(20).reshape(2, 10)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 10])

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        drawn = model.generate(ids, attention_mask=padding, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return model(input_ids=ids, attention_mask=padding).logits[padding.bool()], drawn

    with torch.no_grad():
        expected = outputs()
        score_tokens(model, make_batch())
        assert model.config._attn_implementation == before
    assert "forward" not in vars(model.get_output_embeddings())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy_loss(model.train(), make_batch())[0].backward()
    model.eval()
    with torch.no_grad():
        logits, drawn = outputs()
    assert torch.equal(drawn, expected[1])
    torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["wrapper", "by hand"])
def test_activations_checkpointed_by_torch_give_the_same_gradient(kind):
    """Backward runs the layers again, when the forward pass of the loss is long over."""
    batch, plain, model = make_batch(), make_model("qwen3"), make_model("qwen3")
    policy_loss(plain, batch)[0].backward()
    if kind == "wrapper":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        layer = type(model.model.layers[0])
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    else:
        for layer in model.model.layers:
            own = layer.forward
            layer.forward = partial(_reentrant, own)
    policy_loss(model, batch)[0].backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def _reentrant(forward, hidden, **options):
    return checkpoint(lambda x: forward(x, **options), hidden, use_reentrant=True)


def test_a_loss_under_autocast_multiplies_in_its_dtype():
    model, batch = make_model("qwen3"), make_batch()
    expected, _ = policy_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, stats = policy_loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.1)
    assert stats.loss != pytest.approx(expected.item(), rel=1e-6)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("objective", ["tis", "gspo", "sequence_mask", "m2po", "second_moment"])
def test_tokens_that_take_no_part_have_no_gradient_and_no_statistics(objective):
    """The gradient to the log-probability of a token that is left out is 0, also where a ratio is a sequence's."""
    model, batch = make_model("qwen3"), make_batch()
    batch.included = batch.loss_mask & (torch.rand(len(batch.loss_mask), generator=torch.manual_seed(0)) < 0.6)
    scores = score_tokens(model, batch)
    logprobs = scores.logprobs.detach().requires_grad_()
    objective = dataclasses.replace(resolve(objective), kl_weight=0.3)
    batch = batch.with_column("reference_logprobs", torch.full_like(logprobs, -3.0))
    loss, stats = loss_of_scores(objective, batch, TokenScores(logprobs, None))
    loss.backward()
    out = ~batch.included[batch.drawn]
    assert 0 < out.sum() < len(out)
    assert (logprobs.grad[out] == 0).all()
    assert (logprobs.grad[~out] != 0).any()
    assert stats.num_tokens == (~out).sum()


def test_without_gradient_the_loss_is_the_same():
    model, batch = make_model("qwen3"), make_batch()
    for objective in ("tis", "gspo"):
        with torch.no_grad():
            alone, _ = policy_loss(model, batch, objective=objective)
        assert alone.item() == pytest.approx(policy_loss(model, batch, objective=objective)[0].item(), rel=1e-6)


def test_a_prompt_that_samples_have_in_common_is_fed_once():
    batch = make_batch()
    packed = pack_input(batch)
    drawn = batch.num_drawn
    assert packed.input_ids.shape[1] == drawn + 12 + 5 + 30 + 1
    batch.groups = torch.arange(batch.num_sequences)
    assert pack_input(batch).input_ids.shape[1] == drawn + 3 * 12 + 5 + 4 * 30 + 2


def test_tokens_before_a_branch_are_fed_once():
    """One trunk of 9 + 10 tokens: a branch in its middle, a branch of that, and one with a given token at the end."""
    rollouts = make_branches(0, ((1, 9),))[:1]
    trunk = replace_tokens(rollouts[0], rollouts[0].prompt_token_ids, range(100, 110))
    first = replace_tokens(trunk, [*trunk.prompt_token_ids, *range(100, 104)], range(110, 120))
    second = replace_tokens(first, [*first.prompt_token_ids, *range(110, 113)], range(120, 130))
    last = replace_tokens(trunk, [*trunk.prompt_token_ids, *range(100, 110)], range(130, 140))
    last.turns = (Turn(0, 1, False), Turn(1, 10, True))
    batch = pack([second, trunk, last, first], [1.0] * 4)
    assert pack_input(batch).input_ids.shape[1] == 9 + 4 * 10
    assert pack_input(batch).predicting.shape[0] == batch.num_drawn == 39
    batch.groups = torch.arange(4)
    assert pack_input(batch).input_ids.shape[1] == len(batch.input_ids)
    batch.groups, batch.routed_experts = torch.zeros(4, dtype=torch.long), torch.zeros(len(batch.input_ids), 1, 1)
    assert pack_input(batch).input_ids.shape[1] == len(batch.input_ids), "each branch has recorded its own experts"


def replace_tokens(rollout: Rollout, prompt, tokens) -> Rollout:
    columns = {
        name: np.zeros(10, getattr(rollout, name).dtype) for name in ("logprobs", "weight_versions", "sampled_at_ns")
    }
    prompt, tokens = (np.array(list(ids), np.int32) for ids in (prompt, tokens))
    return dataclasses.replace(rollout, prompt_token_ids=prompt, token_ids=tokens, **columns)


@settings(max_examples=60)
@given(
    shape=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=6),
    seed=st.integers(0, 50),
    share=st.booleans(),
    branches=st.booleans(),
)
def test_every_token_sees_its_own_sequence_in_order(shape, seed, share, branches):
    batch = of_branches(seed, shape=shape) if branches else make_batch(seed, tuple(shape))
    if not share:
        batch.groups = torch.arange(batch.num_sequences)
    packed = pack_input(batch)
    ids, positions = packed.input_ids[0], packed.position_ids[0]
    seen: dict[int, list[int]] = {}
    for bucket in packed.buckets:
        for row, is_query, keys, prefix in zip(
            bucket.queries, bucket.is_query, bucket.keys, bucket.prefixes, strict=True
        ):
            for index in torch.nonzero(is_query).flatten().tolist():
                seen[int(row[index])] = keys[: int(prefix) + index + 1].tolist()
    assert sorted(seen) == list(range(len(ids)))
    sequences = batch.sequence_ids[batch.loss_mask]
    offsets = batch.position_ids[batch.loss_mask]
    for row, sequence, offset in zip(packed.predicting.tolist(), sequences.tolist(), offsets.tolist(), strict=True):
        start = int(batch.cu_seqlens[sequence])
        assert ids[seen[row]].tolist() == batch.input_ids[start : start + offset].tolist()
        assert positions[seen[row]].tolist() == list(range(offset))


@settings(max_examples=40)
@given(
    shape=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=8),
    seed=st.integers(0, 50),
    extra=st.integers(0, 200),
)
def test_micro_batches_hold_every_sequence_once_within_their_budget(shape, seed, extra):
    batch = make_batch(seed, tuple(shape))
    lengths = batch.cu_seqlens.diff().tolist()
    budget = max(lengths) + extra
    micro_batches = batch.micro_batches(budget)
    assert all(len(micro.input_ids) <= budget for micro in micro_batches)
    found = sorted(
        tuple(ids.tolist()) + tuple(advantages.tolist())
        for micro in micro_batches
        for ids, advantages in zip(
            micro.input_ids.split(micro.cu_seqlens.diff().tolist()),
            micro.advantages.split(micro.cu_seqlens.diff().tolist()),
            strict=True,
        )
    )
    assert found == sorted(
        tuple(ids.tolist()) + tuple(advantages.tolist())
        for ids, advantages in zip(batch.input_ids.split(lengths), batch.advantages.split(lengths), strict=True)
    )
    with pytest.raises(ValueError, match=f"allow at least {max(lengths)}"):
        batch.micro_batches(max(lengths) - 1)


def test_micro_batches_are_alike_in_cost():
    rng = np.random.default_rng(0)
    batch = make_batch(0, tuple((1, int(prompt)) for prompt in rng.integers(1, 400, 60)))
    sizes = [len(micro.input_ids) for micro in batch.micro_batches(3500)]
    assert len(sizes) == -(-len(batch.input_ids) // 3500)
    assert max(sizes) < 1.05 * min(sizes)


@pytest.mark.parametrize("objective", ["tis", "gspo", "sequence_mask"])
def test_losses_and_gradients_of_micro_batches_add_up(objective):
    batch = make_batch()
    whole, parts = make_model("qwen3"), make_model("qwen3")
    loss, stats = policy_loss(whole, batch, objective=objective)
    loss.backward()
    summed = None
    for micro in batch.micro_batches(70):
        part, part_stats = policy_loss(parts, micro, objective=objective)
        part.backward()
        summed = part_stats if summed is None else summed + part_stats
    assert summed.num_tokens == stats.num_tokens
    assert summed.loss == pytest.approx(stats.loss, rel=1e-4)
    assert (summed.ess, summed.clipped) == pytest.approx((stats.ess, stats.clipped), rel=1e-4)
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3)
