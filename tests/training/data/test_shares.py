"""A batch is split over ranks in whole groups, alike in tokens, so that the average of the gradients is the batch's."""

import copy
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from made_batches import make_group, make_rollouts
from safetensors.numpy import load, save
from tiny_models import VOCABULARY, make_model

from inflight.core.errors import InvalidRequestError, ProtocolError
from inflight.core.rollout import PromptScores, Rollout, SamplingMask
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped, ScoredGroups
from inflight.training.data.shares import Share, decode_share, encode_share, split
from inflight.training.data.staleness_filter import StalenessRule
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective


def make_scored(seed: int, num_groups: int, **options) -> PackedBatch:
    """A batch as `RolloutStream.batches` makes it."""
    rng = np.random.default_rng(seed)
    scored = ScoredGroups()
    for group in range(num_groups):
        rollouts = make_group(rng, group, int(rng.integers(1, 6)), int(rng.integers(1, 30)))
        for rollout in rollouts:
            rollout.reward = float(rng.normal())
        scored.add(rollouts)
    batch = scored.pack(trainer_version=3, **options)
    assert batch is not None
    return batch


def split_plainly(batch: PackedBatch, num_ranks: int) -> list[Share]:
    return split(batch, num_ranks, dropped=Dropped())


def tokens_of(share: Share) -> int:
    return 0 if share.info.is_filler else sum(len(r.prompt_token_ids) + len(r.token_ids) for r in share.rollouts)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_shares_are_whole_groups_disjoint_complete_and_alike(seed, num_ranks):
    batch = make_scored(seed, num_groups=5 + seed)
    shares = split_plainly(batch, num_ranks)
    assert len(shares) == num_ranks
    groups = [{r.group_id for r in share.rollouts} for share in shares if not share.info.is_filler]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 5 + seed
    ids = [r.request_id for share in shares if not share.info.is_filler for r in share.rollouts]
    assert sorted(ids) == sorted(r.request_id for r in batch.rollouts)
    sizes: dict[int, int] = {}
    for rollout in batch.rollouts:
        size = len(rollout.prompt_token_ids) + len(rollout.token_ids)
        sizes[rollout.group_id] = sizes.get(rollout.group_id, 0) + size
    tokens = [tokens_of(share) for share in shares]
    assert sum(tokens) == len(batch.input_ids)
    assert max(tokens) - min(tokens) <= max(sizes.values())
    assert sum(share.info.is_filler for share in shares) == max(0, num_ranks - 5 - seed)


def test_a_rank_without_a_group_gets_a_step_without_a_part_in_the_loss():
    batch = make_scored(0, num_groups=1)
    own, *others = [share.batch() for share in split_plainly(batch, 3)]
    assert own.num_sequences == batch.num_sequences
    model = make_model("qwen3")
    for filler in others:
        assert (filler.num_sequences, filler.rollouts) == (1, ())
        loss, stats = policy_loss(model, filler)
        loss.backward()
        assert stats.ratios.num_tokens == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


OBJECTIVES = {
    "token": Objective(aggregation="token"),
    "sequence": Objective(aggregation="sequence"),
    "group": Objective(aggregation="group"),
    "constant": Objective(aggregation="constant", max_tokens=20),
    "entropy": Objective(aggregation="token", entropy_weight=0.1),
}
RULE = StalenessRule(max_version_lag=1, unit="token")
KINDS = {"plain": {}, "stale": {"staleness": (RULE,)}, "uniform": {"skip_uniform": True}}


def gradient(model: torch.nn.Module, batches: list[PackedBatch], objective: Objective) -> tuple[float, torch.Tensor]:
    """Means over batches of losses and of gradients, as ranks average them."""
    model = copy.deepcopy(model)
    losses = [policy_loss(model, batch, objective=objective)[0] for batch in batches]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 7])
def test_the_average_gradient_of_the_shares_is_that_of_the_batch(num_ranks, objective, kind):
    batch = make_scored(1, num_groups=5, **KINDS[kind])
    model = make_model("qwen3").double()
    shares = [decode_share(encode_share(share)).batch() for share in split_plainly(batch, num_ranks)]
    expected_loss, expected = gradient(model, [batch], OBJECTIVES[objective])
    loss, found = gradient(model, shares, OBJECTIVES[objective])
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    wrong = [replace(share, totals=batch.totals) for share in shares]  # as if one rank were all
    _, without_ranks = gradient(model, wrong, OBJECTIVES[objective])
    assert not torch.allclose(without_ranks, expected, rtol=0.1, atol=1e-4)


def rich_rollouts() -> list[Rollout]:
    """With everything that a rollout may hold."""
    rollouts = make_rollouts(6)
    for index, rollout in enumerate(rollouts):
        length = len(rollout.token_ids)
        rollout.columns = {
            "entropies": np.full(length, 0.5, np.float32),
            "top_token_ids": np.ones((length, 3), np.int32),
            "top_logprobs": np.zeros((length, 3), np.float32),
            "own": np.arange(length, dtype=np.int64),
        }
        left = [np.array([token, (token + 1) % VOCABULARY], np.int32) for token in rollout.token_ids]
        cut = [ids[1:] for ids in left]
        rollout.sampling_mask = SamplingMask.join(cut, [VOCABULARY] * length) if index else SamplingMask.join(left)
        rows = len(rollout.prompt_token_ids) + length - 1
        rollout.routed_experts = np.ones((rows, 2, 2), np.uint8) if index != 3 else None
        ids = np.full((len(rollout.prompt_token_ids) - 1, 2), 3, np.int32)
        scores = PromptScores(-ids[:, 0].astype(np.float32), ids[:, 0], ids, -ids.astype(np.float32))
        rollout.prompt_scores = scores if index == 2 else None
        rollout.metadata = {"answer": "4", "nested": [1, {"a": None}]}
        rollout.prompt, rollout.text, rollout.reward = "2 + 2 = ", "vier → 4", 0.25 * index
        rollout.forked_from = (7, 2) if index == 1 else None
        rollout.prefix_tokens, rollout.prefix_version = index, None if index else 4
    return rollouts


def assert_same(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
    elif isinstance(expected, Rollout | SamplingMask | PromptScores):
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    else:
        assert found == expected


def test_all_that_a_rollout_holds_travels():
    rollouts = rich_rollouts()
    shares = split_plainly(pack(rollouts, [0.5] * 6, trainer_version=2), 2)
    by_id = {rollout.request_id: rollout for rollout in rollouts}
    travelled = [r for share in shares for r in decode_share(encode_share(share)).rollouts]
    assert len(travelled) == 6
    for rollout in travelled:
        assert_same(rollout, by_id[rollout.request_id])


@pytest.mark.parametrize("kind", KINDS)
def test_the_only_rank_has_the_batch(kind):
    batch = make_scored(2, num_groups=4, **KINDS[kind])
    [share] = split_plainly(batch, 1)
    found = decode_share(encode_share(share)).batch()
    for name, column in batch._tensors().items():
        assert torch.equal(getattr(found, name), column), name
    assert found.trainer_version == 3
    assert found.taken_ns == batch.taken_ns > 0
    assert found.totals.num_tokens == batch.totals.num_tokens
    assert found.totals.num_groups == (batch.totals.num_groups or len(batch.totals.group_tokens))
    assert torch.equal(found.totals.group_tokens, batch.totals.group_tokens)


def test_a_rank_has_the_lags_of_its_policies():
    batch = make_scored(2, num_groups=4, foreign_versions=lambda adapter, versions: 2 - versions // 2)
    assert batch.foreign_versions.any()
    shares = [decode_share(encode_share(share)).batch() for share in split_plainly(batch, 2)]
    lags = torch.cat([share.version_lags[share.drawn] for share in shares])
    expected = 3 - batch.weight_versions - batch.foreign_versions
    assert torch.equal(lags.sort().values, expected[batch.drawn].sort().values)


def test_what_is_not_drawn_stays_context():
    rollouts = make_rollouts(4)
    drawn = [np.arange(len(r.token_ids)) % 2 == 0 for r in rollouts]
    batch = pack(rollouts, [1.0, 2.0, 3.0, 4.0], drawn=drawn)
    for share in split_plainly(batch, 2):
        found = decode_share(encode_share(share)).batch()
        assert found.num_drawn == sum(int((np.arange(len(r.token_ids)) % 2 == 0).sum()) for r in share.rollouts)


def test_metadata_that_is_not_json_like_is_named():
    rollouts = make_rollouts(2)
    rollouts[0].metadata = {"judge": object()}
    [share] = split_plainly(pack(rollouts, [0.0, 1.0]), 1)
    with pytest.raises(InvalidRequestError, match=r"metadata.*cannot be written down"):
        encode_share(share)


def test_broken_bytes_are_refused_by_name():
    data = encode_share(split_plainly(pack(make_rollouts(2), [0.0, 1.0]), 1)[0])
    rng = np.random.default_rng(0)
    for end in rng.integers(0, len(data), 50):
        with pytest.raises(ProtocolError, match="cannot be read"):
            decode_share(data[:end])
    refused = 0
    for at in rng.integers(0, len(data), 300):
        broken = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        try:
            decode_share(broken)
        except ProtocolError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("index", ["-1", "+0", " 0", "2", "x"])
def test_arrays_that_belong_to_no_rollout_are_refused(index):
    data = encode_share(split_plainly(pack(make_rollouts(2), [0.0, 1.0]), 1)[0])
    end = 4 + int.from_bytes(data[:4], "little")
    arrays = load(data[end:])
    arrays[f"{index}/token_ids"] = arrays.pop("1/token_ids")
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_share(data[:end] + save(arrays))
