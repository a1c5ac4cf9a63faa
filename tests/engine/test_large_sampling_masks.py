"""Sampling masks that are most of a large vocabulary: recorded by what was cut, and the same to the trainer."""

import dataclasses

import numpy as np
import pytest
import torch
from made_frames import make_frame
from tiny_models import run
from transformers import AutoModelForCausalLM, Qwen3Config

from inflight.core.errors import FrameError
from inflight.core.frames import TokenFrame
from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout, SamplingMask
from inflight.core.sampling import SamplingParams
from inflight.engine.loop import sampler
from inflight.engine.loop.engine import Engine
from inflight.engine.loop.sampler import _all, _ranks
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model.forward import score_tokens
from inflight.training.model.sampling_mask import PackedSamplingMask

VOCABULARY = 50_000
FILTERS = {"top_p": {"top_p": 0.9}, "min_p": {"min_p": 1e-6}, "top_k": {"top_k": 20}, "most": {"top_k": 40_000}}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> str:
    """A model that finds all tokens about equally likely."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    directory = tmp_path_factory.mktemp("untrained")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return str(directory)


def prompts() -> list[Prompt]:
    """One for each filter, one for a filter that is not told, and one without."""
    asked = [SamplingParams(max_tokens=3, seed=7, return_sampling_mask=True, **options) for options in FILTERS.values()]
    others = [
        SamplingParams(max_tokens=3, seed=7, top_p=0.9),
        SamplingParams(max_tokens=3, seed=7, return_sampling_mask=True),
    ]
    return [Prompt([5, 6], params) for params in (*asked, *others)]


@pytest.fixture(scope="module")
def rollouts(untrained) -> list[Rollout]:
    from inflight.core.options import EngineOptions

    engine = Engine(EngineOptions(model=untrained, device="cpu", max_sequences=8, max_context=32))
    try:
        return run(engine, prompts())
    finally:
        engine.close()


@pytest.fixture(scope="module")
def listed(untrained) -> list[Rollout]:
    """The same rollouts with every mask as its ids."""
    from inflight.core.options import EngineOptions

    engine = Engine(EngineOptions(model=untrained, device="cpu", max_sequences=8, max_context=32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_LARGE_MASK", VOCABULARY)
        try:
            return run(engine, prompts())
        finally:
            engine.close()


def cut_from(rollout: Rollout) -> set[int] | None:
    mask = rollout.sampling_mask
    return None if mask is None or mask.cut_from is None else set(mask.cut_from.tolist())


def with_mask(rollout: Rollout, mask: SamplingMask) -> Rollout:
    return dataclasses.replace(rollout, sampling_mask=mask)


def test_what_was_cut_takes_the_place_of_what_was_left(rollouts, listed):
    top_p, min_p, top_k, most, *_ = rollouts
    assert [cut_from(r) for r in rollouts] == [
        {VOCABULARY},
        {VOCABULARY},
        None,
        {VOCABULARY},
        None,
        None,
    ]
    assert np.diff(min_p.sampling_mask.offsets).tolist() == [0, 0, 0], "all were left"
    assert np.diff(top_k.sampling_mask.offsets).tolist() == [20, 20, 20]
    assert np.diff(most.sampling_mask.offsets).tolist() == [10_000] * 3
    assert 0 < len(top_p.sampling_mask.token_ids) < 3 * 0.2 * VOCABULARY
    for told, whole in zip(rollouts, listed, strict=True):
        assert told.token_ids.tolist() == whole.token_ids.tolist()
        assert told.logprobs.tolist() == whole.logprobs.tolist()
        assert cut_from(whole) is None


def masks_of(batch: PackedBatch) -> list[set[int]]:
    if batch.sampling_mask is None:
        return []
    offsets, ids = batch.sampling_mask.expand()
    return [set(part.tolist()) for part in ids.split(offsets.diff().tolist())]


def test_the_trainer_reads_the_same_masks(rollouts, listed):
    """Whatever part of the batch it takes; where all tokens were left, the mask is empty."""
    asked = [[rollout for rollout in batch if rollout.params.return_sampling_mask] for batch in (rollouts, listed)]
    told, whole = (pack(batch, [1.0] * len(batch)) for batch in asked)
    expected = [left if len(left) < VOCABULARY else set() for left in masks_of(whole)]
    assert masks_of(told) == expected
    order = [3, 0, 4, 2]
    rows = [3 * sequence + token for sequence in order for token in range(3)]
    assert masks_of(told.select(order)) == [expected[row] for row in rows]
    micro = told.micro_batches(10)
    assert sorted(len(left) for part in micro for left in masks_of(part)) == sorted(map(len, expected))
    assert masks_of(told.to("cpu")) == expected


def test_the_ratio_is_1_on_policy(rollouts, untrained):
    model = AutoModelForCausalLM.from_pretrained(untrained)
    drawn_with_masks = [r for r in rollouts if r.params.return_sampling_mask]
    batch = pack(drawn_with_masks, [1.0] * len(drawn_with_masks))
    with torch.no_grad():
        logprobs = score_tokens(model, batch).logprobs
    assert (logprobs - batch.behavior_logprobs[batch.drawn]).abs().max() < 1e-5


def test_masks_that_cannot_be_are_named(rollouts):
    top_p = rollouts[0]
    mask = top_p.sampling_mask
    ids = mask.token_ids.copy()
    ids[0] = top_p.token_ids[0]
    with pytest.raises(ValueError, match=r"token 0 .* is not in the sampling mask"):
        pack([with_mask(top_p, dataclasses.replace(mask, token_ids=ids))], [1.0])
    with pytest.raises(ValueError, match="token ids that are not in a vocabulary of 100"):
        pack([with_mask(top_p, dataclasses.replace(mask, cut_from=np.full(3, 100, np.int32)))], [1.0])


def test_expanding_keeps_the_order_of_rows():
    offsets = torch.tensor([0, 2, 3, 3, 5, 5])
    ids = torch.tensor([4, 1, 0, 2, 9])
    of = torch.tensor([0, 4, 0, 0, 7], dtype=torch.int32)  # two left, one cut of 4, all, two left, none cut of 7
    after, expanded = PackedSamplingMask(ids, offsets, of).expand()
    assert after.tolist() == [0, 2, 5, 5, 7, 7]
    assert expanded.tolist() == [4, 1, 1, 2, 3, 2, 9]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (np.array([0, 0, 5, 0], np.int32), "mask_cut_from has shape .4., expected 3 tokens"),
        (np.array([0, 0, -1], np.int32), "without a remaining token"),
        (np.array([0, 0, 2], np.int32), "without a remaining token"),
    ],
)
def test_frames_with_masks_that_cannot_be_are_refused(of, message):
    frame = make_frame(3)
    extras = {
        "mask_offsets": np.array([0, 0, 1, 3]),
        "mask_token_ids": np.array([1, 2, 3], np.int32),
        "mask_cut_from": of,
    }
    with pytest.raises(FrameError, match=message):
        TokenFrame.decode(dataclasses.replace(frame, extras=extras).encode())
    with pytest.raises(FrameError, match="mask_cut_from comes without mask_offsets"):
        TokenFrame.decode(dataclasses.replace(frame, extras={"mask_cut_from": np.zeros(3, np.int32)}).encode())


def test_a_whole_vocabulary_is_sorted_as_pytorch_sorts_its_ranks():
    scores = torch.randn(3, 5000)
    scores[0, :100] = scores[0, 100]  # ties
    scores[1, 7], scores[2, 9] = -torch.inf, torch.nan
    scores[1, 20:30] = -0.0
    assert torch.equal(_all(scores), _ranks(scores).sort(descending=True).indices)
