"""A packed forward pass computes what whole sequences, one at a time, compute."""

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCABULARY, make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.training.batch import PackedBatch, pack
from inflight.training.forward import score_tokens
from inflight.training.loss import policy_loss
from inflight.training.packing import pack_input


def make_group(rng: np.random.Generator, group: int, samples: int, prompt: int, **columns: object) -> list[Rollout]:
    """Samples of one prompt with 1 to 20 tokens each."""
    prompt_ids = rng.integers(0, VOCABULARY, prompt).astype(np.int32)
    lengths = rng.integers(1, 21, samples)
    return [
        Rollout(
            request_id=100 * group + sample,
            group_id=group,
            sample=sample,
            params=SamplingParams(n=samples, temperature=float(rng.uniform(0.5, 1.5))),
            metadata={},
            prompt_token_ids=prompt_ids,
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            logprobs=rng.uniform(-8, -0.5, length).astype(np.float32),
            weight_versions=rng.integers(0, 5, length),
            sampled_at_ns=rng.integers(0, 10**9, length),
            finish_reason="length",
        )
        for sample, length in enumerate(lengths)
    ]


def make_batch(seed: int = 0, shape: tuple[tuple[int, int], ...] = ((3, 12), (1, 5), (4, 30), (2, 1))) -> PackedBatch:
    """Groups of (samples, prompt tokens), with advantages."""
    rng = np.random.default_rng(seed)
    rollouts = [r for group, (samples, prompt) in enumerate(shape) for r in make_group(rng, group, samples, prompt)]
    return pack(rollouts, rng.normal(size=len(rollouts)).tolist())


def one_by_one(model: torch.nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the drawn tokens, each sequence in a forward pass of its own."""
    logprobs, entropies = [], []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, drawn = batch.input_ids[start:end], batch.loss_mask[start:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / batch.temperatures[start + 1 : end, None]
        log = torch.log_softmax(logits, -1)[drawn[1:]]
        logprobs.append(log.gather(1, ids[drawn][:, None])[:, 0])
        entropies.append(-(log.exp() * log).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


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


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_a_model_that_was_packed_is_as_it_was(name):
    """Also with checkpointing, which leaves the attention in place: it is plain attention for other inputs."""
    model = make_model(name)
    ids = torch.arange(12).reshape(2, 6)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    before = model(input_ids=ids, attention_mask=padding).logits
    attention = model.config._attn_implementation
    score_tokens(model, make_batch())
    assert model.config._attn_implementation == attention
    assert "forward" not in vars(model.get_output_embeddings())
    assert torch.equal(model(input_ids=ids, attention_mask=padding).logits, before)
    model.gradient_checkpointing_enable()
    score_tokens(model.train(), make_batch())
    after = model.eval()(input_ids=ids, attention_mask=padding).logits
    torch.testing.assert_close(after[padding.bool()], before[padding.bool()], atol=1e-4, rtol=1e-4)


def test_a_prompt_that_samples_have_in_common_is_fed_once():
    batch = make_batch()
    packed = pack_input(batch)
    drawn = batch.num_drawn
    assert packed.input_ids.shape[1] == drawn + 12 + 5 + 30 + 1
    assert pack_input(batch, share_prompts=False).input_ids.shape[1] == drawn + 3 * 12 + 5 + 4 * 30 + 2


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=6),
    seed=st.integers(0, 50),
    share=st.booleans(),
)
def test_every_token_sees_its_own_sequence_in_order(shape, seed, share):
    batch = make_batch(seed, tuple(shape))
    packed = pack_input(batch, share_prompts=share)
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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("correction", ["tis", "gspo", "sequence_mask"])
def test_losses_and_gradients_of_micro_batches_add_up(correction):
    batch = make_batch()
    whole, parts = make_model("qwen3"), make_model("qwen3")
    loss, stats = policy_loss(whole, batch, correction=correction)
    loss.backward()
    summed = None
    for micro in batch.micro_batches(70):
        part, part_stats = policy_loss(parts, micro, correction=correction)
        part.backward()
        summed = part_stats if summed is None else summed + part_stats
    assert summed.num_tokens == stats.num_tokens
    assert summed.loss == pytest.approx(stats.loss, rel=1e-4)
    assert (summed.ess, summed.clipped) == pytest.approx((stats.ess, stats.clipped), rel=1e-4)
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3)
