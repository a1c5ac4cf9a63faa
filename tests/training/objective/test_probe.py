"""Two causes of an importance ratio, told apart."""

import numpy as np
import pytest
import torch
from made_batches import make_batch
from tiny_models import make_model, publish

from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.stream.assembler import Assembler
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.probe import VersionProbe


def train(model: torch.nn.Module, seed: int, scale: float = 0.02) -> None:
    """Move the weights, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def test_mismatch_and_staleness_are_measured_apart(make_engine):
    """An engine in bf16 draws under version 0 and, its weights swapped half-way, under version 1."""
    model = make_model("qwen3")
    engine = make_engine("qwen3", dtype="bfloat16")
    probe = VersionProbe(model, keep=3)
    probe.remember(0)
    prompts = [Prompt([5, 9, i], SamplingParams(max_tokens=30, ignore_eos=True, seed=i)) for i in range(8)]
    engine.requests.submit(prompts[:4])
    assembler, rollouts = Assembler(), []
    for step in range(200):
        if step == 12:
            train(model, 1)
            publish(engine, model)
            probe.remember(1)
            engine.requests.submit(prompts[4:])
        frame = engine.step() if engine.has_work else None
        rollouts += [r for group in (assembler.add(frame) if frame else []) for r in group]
    train(model, 2)
    probe.remember(2)
    batch = pack(rollouts, [1.0] * len(rollouts), trainer_version=2)
    assert set(batch.weight_versions[batch.loss_mask].tolist()) == {0, 1}

    causes = probe.causes(batch)
    assert causes.total.num_tokens == batch.num_drawn
    assert 0 < causes.mismatch.logprob_diff < 0.3 * causes.staleness.logprob_diff
    old, own = make_model("qwen3"), make_model("qwen3")
    train(own, 1)
    versions, behavior = batch.weight_versions[batch.loss_mask], batch.behavior_logprobs[batch.loss_mask]
    with torch.no_grad():
        drawn_by = torch.where(versions == 0, token_logprobs(old, batch), token_logprobs(own, batch))
        now = token_logprobs(model, batch)
    assert causes.mismatch.logprob_diff == pytest.approx((drawn_by - behavior).abs().mean().item(), rel=1e-4)
    assert causes.staleness.kl == pytest.approx(((now - drawn_by).exp() - 1 - (now - drawn_by)).mean().item(), rel=1e-3)


def test_statistics_of_the_loss_tell_the_trainers_own_version_from_older_ones():
    model, batch = make_model("qwen3"), make_batch()
    drawn = batch.loss_mask
    with torch.no_grad():
        exact = token_logprobs(model, batch)
    noise = torch.where(batch.weight_versions[drawn] == 4, 0.01, 1.0) * torch.randn(
        len(exact), generator=torch.Generator().manual_seed(0)
    )
    batch.behavior_logprobs[drawn] = exact + noise
    batch.trainer_version = 4
    _, stats = policy_loss(model, batch)
    own = (batch.weight_versions[drawn] == 4).sum().item()
    assert (stats.mismatch.num_tokens, stats.stale.num_tokens) == (own, len(exact) - own)
    assert stats.mismatch.logprob_diff < 0.02 < 0.3 < stats.stale.logprob_diff
    assert stats.ratios.mean == pytest.approx(torch.exp(-noise).mean().item(), rel=1e-3)
    batch.trainer_version = None
    _, unknown = policy_loss(model, batch)
    assert (unknown.mismatch.num_tokens, unknown.stale.num_tokens) == (0, 0)
    assert unknown.ess == pytest.approx(stats.ess)


def test_a_probe_forgets_what_is_too_old_and_touches_neither_model_nor_batch():
    model, batch = make_model("qwen3"), make_batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe = VersionProbe(model, keep=2)
    assert probe.causes(batch) is None
    for version in (2, 3, 4):
        probe.remember(version)
    assert probe.versions == [3, 4]
    model.train()
    model.model.layers[0].eval()
    causes = probe.causes(batch)
    assert model.model.layers[1].training
    assert not model.model.layers[0].training
    known = np.isin(batch.weight_versions[batch.loss_mask].numpy(), (3, 4)).sum()
    assert causes.total.num_tokens == known
    assert causes.staleness.logprob_diff == 0  # the weights did not move
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="keep must be at least 1"):
        VersionProbe(model, keep=0)


def test_micro_batches_bound_the_forward_passes_and_give_the_same_ratios():
    model, batch = make_model("qwen3"), make_batch()
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args, given: sizes.append(given["input_ids"].numel()), with_kwargs=True)
    probe = VersionProbe(model)
    for version in range(1, 4):
        probe.remember(version)
        train(model, version)
    whole = probe.causes(batch)
    assert max(sizes) > 60
    sizes.clear()
    parts = probe.causes(batch, micro_batch_tokens=60)
    assert 0 < max(sizes) <= 60
    for name in ("mismatch", "staleness", "total"):
        one, other = getattr(parts, name), getattr(whole, name)
        assert one.num_tokens == other.num_tokens > 0
        assert one.kl == pytest.approx(other.kl, rel=1e-3)
        assert one.logprob_diff == pytest.approx(other.logprob_diff, rel=1e-3)
