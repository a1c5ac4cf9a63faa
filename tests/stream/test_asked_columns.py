"""Every column that a request asked for arrives, or the request ends with an error that names it."""

import itertools

import numpy as np
import own_columns
import pytest
import torch
from made_frames import make_frame
from tiny_models import make_model, publish, run

from inflight.core import columns
from inflight.core.columns import COLUMNS, TOKENS, TokenColumn, asked_columns
from inflight.core.errors import TokenColumnError
from inflight.core.frames import Finish, GroupStart, TokenFrame
from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.sampler import Sampler
from inflight.stream.assembler import Assembler

OWN = (f"{own_columns.__file__}:margin", f"{own_columns.__file__}:rank")
SAMPLING = [
    {"temperature": 0.0},
    *(
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p} | adjusted
        for temperature, top_k, top_p, min_p in itertools.product((1.0, 0.7), (0, 5), (1.0, 0.8), (0.0, 0.05))
        for adjusted in ({}, {"repetition_penalty": 1.3}, {"logit_bias": {3: 2.0}, "min_tokens": 2})
    ),
]
ASKED = [
    {"return_entropy": True},
    {"top_logprobs": 3},
    {"return_sampling_mask": True},
    {"columns": ("margin",)},
    {"columns": ("rank", "margin"), "return_entropy": True, "top_logprobs": 2, "return_sampling_mask": True},
]


@pytest.mark.medium
@pytest.mark.parametrize("together", [False, True], ids=["alone", "among others"])
def test_asked_columns_arrive_under_every_way_of_sampling(make_engine, together):
    engine = make_engine(columns=OWN, max_sequences=16)
    prompts = [
        Prompt([1, 2, 3], SamplingParams(max_tokens=3, seed=1, ignore_eos=True, **sampling, **asked))
        for sampling, asked in itertools.product(SAMPLING, ASKED)
    ]
    others = [Prompt([4], SamplingParams(max_tokens=9, ignore_eos=True)) for _ in range(len(prompts) // 4)]
    groups = [[*prompts, *others]] if together else [[prompt] for prompt in prompts]
    for rollout in itertools.chain.from_iterable(run(engine, group) for group in groups):
        params = rollout.params
        assert rollout.finish_reason == "length"
        assert set(rollout.columns) == set(asked_columns(params))
        assert all(len(column) == len(rollout.token_ids) for column in rollout.columns.values())
        assert (rollout.sampling_mask is not None) == (params.return_sampling_mask and params.filtered)


@pytest.fixture
def built_in(monkeypatch):
    """A built-in column that is computed where plain rows are sampled, which `return_entropy` asks for."""
    monkeypatch.setitem(
        columns.COLUMNS, "twice", TokenColumn(("<f4",), (TOKENS,), lambda params: params.return_entropy)
    )
    plain = Sampler._sample

    def sample_plain(self, logits_MV, rows, positions):
        samples = plain(self, logits_MV, rows, positions)
        samples.columns["twice"] = 2 * samples.logprobs
        samples.columns.pop("entropies", None)
        return samples

    monkeypatch.setattr(Sampler, "_sample", sample_plain)
    monkeypatch.delitem(columns.COLUMNS, "entropies")


@pytest.mark.medium
@pytest.mark.parametrize("sampling", SAMPLING[::5], ids=str)
def test_a_new_built_in_column_arrives_under_every_way_of_sampling(make_engine, built_in, sampling):
    [rollout] = run(make_engine(), [Prompt([1, 2], SamplingParams(max_tokens=4, return_entropy=True, **sampling))])
    assert list(rollout.columns) == ["twice"]


def frames_that_lack(lacking: set[int], num_frames: int = 3) -> list[TokenFrame]:
    """Two requests that ask for entropies and draw a token in each frame. lacking: the frames without entropies."""
    asks = SamplingParams(return_entropy=True)
    starts = [GroupStart(0, 0, [1], asks), GroupStart(1, 1, [1], SamplingParams())]
    ends = [Finish(0, "stop", num_frames), Finish(1, "stop", num_frames)]
    frames = []
    for index in range(num_frames):
        frame = make_frame(
            2, index, groups=starts if index == 0 else [], finishes=ends if index == num_frames - 1 else []
        )
        extras = {} if index in lacking else {"entropies": np.ones(2, np.float32)}
        frames.append(TokenFrame(frame.header, frame.request_ids, frame.token_ids, frame.logprobs, extras))
    return frames


@pytest.mark.parametrize("lacking", [{0}, {1}, {2}, {0, 1, 2}])
def test_a_request_whose_tokens_lack_a_column_ends_as_an_error(lacking):
    assembler = Assembler()
    groups = [group for frame in frames_that_lack(lacking) for group in assembler.add(frame)]
    assert [(group[0].group_id, group[0].finish_reason) for group in groups] == [(0, "error"), (1, "stop")]
    assert assembler.faults.keys() == {0}
    assert "request 0 of group 0 asked for entropies" in str(assembler.faults[0])


@pytest.mark.medium
def test_a_sample_with_bad_numbers_ends_as_an_error_without_its_mask(make_engine):
    engine, model, assembler = make_engine(), make_model("qwen3"), Assembler()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    publish(engine, model)
    params = SamplingParams(max_tokens=3, top_k=4, return_sampling_mask=True)
    engine.requests.submit([Prompt([1, 2], params)])
    groups = []
    while engine.has_work:
        groups += assembler.add(engine.step())
    assert [rollout.finish_reason for group in groups for rollout in group] == ["error"]
    assert not assembler.faults


def test_whoever_waits_for_the_request_gets_the_error_and_others_get_theirs(wire):
    wire.stream.ledger.expect([0, 1])
    wire.send(*frames_that_lack({1}))
    with pytest.raises(TokenColumnError, match="request 0 of group 0 asked for entropies"):
        wire.stream.collect([0])
    [[other]] = wire.stream.collect([1])
    assert other.finish_reason == "stop"


def test_no_fault_is_found_in_whole_frames():
    assembler = Assembler()
    groups = [group for frame in frames_that_lack(set()) for group in assembler.add(frame)]
    assert [group[0].finish_reason for group in groups] == ["stop", "stop"]
    assert not assembler.faults
    assert COLUMNS.keys() >= {"entropies"}
