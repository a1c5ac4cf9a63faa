"""An engine that goes on with groups of another draws what that one would have drawn, and nothing twice."""

import msgspec
import numpy as np
import pytest
from tiny_models import make_model, publish, run

from inflight.core.errors import InvalidRequestError
from inflight.core.messages import Ids, Prompt, Unfinished
from inflight.core.sampling import SamplingParams
from inflight.stream.assembler import Assembler

PROMPTS = [
    Prompt([3, 1, 4, 1, 5], SamplingParams(n=3, max_tokens=30, seed=1, ignore_eos=True)),
    Prompt([9, 2, 6], SamplingParams(n=2, max_tokens=44, seed=2, top_p=0.8, return_sampling_mask=True, min_tokens=44)),
    Prompt([5, 3, 5, 8], SamplingParams(n=2, max_tokens=25, seed=3, repetition_penalty=1.4, min_tokens=20)),
    Prompt([7] * 20, SamplingParams(max_tokens=40, temperature=0.0, top_logprobs=2, return_entropy=True)),
]


def hand_over(assembler: Assembler, prompts: dict[int, Prompt]) -> list[Unfinished]:
    """What is unfinished, as a trainer knows it."""
    groups = []
    for group_id, prompt in prompts.items():
        if (group := assembler.groups.get(group_id)) is not None:
            groups.append(Unfinished(group_id, prompt, group.start.first_request_id, group.drawn()))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(groups), type=list[Unfinished])


def drive(engine, assembler: Assembler, steps: int = 10**6) -> list:
    rollouts = []
    while engine.has_work and steps:
        if (frame := engine.step()) is not None:
            rollouts += [rollout for group in assembler.add(frame) for rollout in group]
        steps -= 1
    return rollouts


def assert_same(rollout, expected) -> None:
    assert rollout.token_ids.tolist() == expected.token_ids.tolist()
    assert rollout.finish_reason == expected.finish_reason
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=2e-5)
    assert rollout.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        np.testing.assert_allclose(rollout.columns[name], column, atol=2e-4)
    assert (rollout.sampling_mask is None) == (expected.sampling_mask is None)
    if expected.sampling_mask is not None:
        for mine, theirs in zip(rollout.sampling_mask.split(), expected.sampling_mask.split(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("other", "first"), [(7, 3), (8, 2)])
def test_groups_of_one_call_have_different_ids(make_engine, other, first):
    engine = make_engine()
    params = SamplingParams(n=2, max_tokens=3, seed=1)
    groups = [
        Unfinished(group_id, Prompt([1, 2], params), request_id, {request_id: [], request_id + 1: []})
        for group_id, request_id in ((7, 1), (other, first))
    ]
    with pytest.raises(InvalidRequestError, match=f"group {other} cannot go on: its ids are taken"):
        engine.requests.adopt(groups, 10, 10)
    assert not engine.has_work
    assert engine.requests.next_ids == Ids(0, 0)


def test_ids_may_be_chosen_by_who_submits(make_engine):
    engine, assembler = make_engine(), Assembler()
    assert engine.requests.submit(PROMPTS[:2], [Ids(40, 100), Ids(7, 20)]) == [40, 7]
    assert engine.requests.submit(PROMPTS[2:3]) == [41]
    engine.step()
    assert engine.requests.fork(100, 0, ids=Ids(3, 60)) == 3
    rollouts = drive(engine, assembler)
    assert {r.request_id for r in rollouts if r.group_id in (40, 7)} == set()  # whose start no frame has told here
    assert {r.request_id for r in rollouts} == {60, 61, 62}


def test_ids_that_are_taken_are_refused_and_nothing_is_accepted(make_engine):
    engine = make_engine()
    engine.requests.submit(PROMPTS[:1], [Ids(4, 10)])
    for ids in ([Ids(4, 20)], [Ids(5, 12)], [Ids(5, 9)], [Ids(5, 2**62 + 1)]):
        with pytest.raises(InvalidRequestError, match="its ids are taken, or too large"):
            engine.requests.submit(PROMPTS[1:2], ids)
    with pytest.raises(InvalidRequestError, match="group 6 cannot begin"):
        engine.requests.submit(PROMPTS[1:3], [Ids(5, 20), Ids(6, 21)])
    with pytest.raises(InvalidRequestError, match="group 4 cannot begin"):
        engine.requests.fork(10, 0, ids=Ids(4, 90))
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1 ids"):
        engine.requests.submit(PROMPTS[1:3], [Ids(5, 20)])
    assert set(engine.requests.unfinished) == {10, 11, 12}


@pytest.mark.medium
@pytest.mark.parametrize("deaths", [(0,), (1,), (7,), (26,), (4, 5, 11), (43,)])
def test_rollouts_outlive_their_engines(make_engine, deaths):
    """With the same weights and seeds they are, token for token, those of an engine that lived; fewer rows than
    samples leave some of them waiting, and others not begun, when it dies."""
    expected = {r.request_id: r for r in run(make_engine(max_sequences=5), PROMPTS)}
    engine, assembler = make_engine(max_sequences=5), Assembler()
    prompts = dict(zip(engine.requests.submit(PROMPTS), PROMPTS, strict=True))
    rollouts = []
    for steps in deaths:
        rollouts += drive(engine, assembler, steps)
        engine = make_engine(max_sequences=5)
        groups = hand_over(assembler, prompts)
        known = {group.group_id for group in groups}
        announced = [group.first_request_id + group.prompt.params.n for group in groups]
        following = max([*announced, *(rollout.request_id + 1 for rollout in rollouts)], default=0)
        ended = {rollout.group_id for rollout in rollouts}
        for group_id in prompts.keys() - known - ended:  # accepted, and no frame told of it
            groups.append(Unfinished(group_id, prompts[group_id]))
        assert engine.requests.adopt(groups, 4, following) == {}
        drawn = sum(len(tokens) for group in groups for tokens in group.drawn.values())
    rollouts += drive(engine, assembler)
    assert sorted(r.group_id for r in rollouts) == [0] * 3 + [1] * 2 + [2] * 2 + [3]
    if deaths[0]:
        for rollout in rollouts:
            assert_same(rollout, expected[rollout.request_id])
        total = sum(len(rollout.token_ids) for rollout in rollouts)
        assert engine.num_tokens == total - drawn - sum(len(r.token_ids) for r in rollouts if r.group_id in ended)
    else:  # the ids of their requests may be others
        for rollout in rollouts:
            [twin] = [r for r in expected.values() if (r.group_id, r.sample) == (rollout.group_id, rollout.sample)]
            assert_same(rollout, twin)
    [new] = engine.requests.submit([PROMPTS[0]])
    assert new == 4
    assert {r.request_id for r in drive(engine, assembler)}.isdisjoint(expected)


def test_what_was_drawn_keeps_its_version_and_time(make_engine):
    engine, assembler = make_engine(), Assembler()
    publish(engine, make_model("qwen3", 1))
    engine.requests.submit(PROMPTS[:1])
    drive(engine, assembler, 6)
    before = {r.request_id: r for r in assembler.partial(0)}
    successor = make_engine()
    for seed in (1, 2):
        publish(successor, make_model("qwen3", seed))
        successor._swap()
    successor.requests.adopt(hand_over(assembler, {0: PROMPTS[0]}), 1, 3)
    for rollout in drive(successor, assembler):
        earlier = before[rollout.request_id]
        count = len(earlier.token_ids)
        assert count >= 5
        for name in ("token_ids", "logprobs", "weight_versions", "sampled_at_ns"):
            np.testing.assert_array_equal(getattr(rollout, name)[:count], getattr(earlier, name))
        assert rollout.weight_versions.tolist() == [1] * count + [2] * (30 - count)


def test_samples_that_have_all_their_tokens_end(make_engine):
    engine, assembler = make_engine(), Assembler()
    prompt = Prompt([1, 2], SamplingParams(max_tokens=3, seed=5, ignore_eos=True))
    engine.requests.adopt([Unfinished(0, prompt, 0, {0: [7, 8, 9]})], 1, 1)
    frame = engine.step()
    assert [(f.request_id, f.reason, f.num_tokens) for f in frame.header.finishes] == [(0, "length", 3)]
    assert frame.header.num_tokens == 0
    [[rollout]] = assembler.add(frame)
    assert rollout.finish_reason == "error"  # of the tokens nothing came here


@pytest.mark.medium
@pytest.mark.parametrize(
    ("group", "message"),
    [
        (Unfinished(0, PROMPTS[0], 0, {3: [1]}), "do not fit"),
        (Unfinished(0, PROMPTS[0], 0, {}), "do not fit"),
        (Unfinished(0, PROMPTS[0], None, {0: [1]}), "do not fit"),
        (Unfinished(2, PROMPTS[0]), "do not fit"),
        (Unfinished(0, PROMPTS[0], 50, {50: [1]}), "do not fit"),
    ],
)
def test_groups_whose_ids_cannot_be_are_refused_whole(make_engine, group, message):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        engine.requests.adopt([Unfinished(1, PROMPTS[1]), group], 2, 20)
    assert not engine.has_work
    engine.requests.submit(PROMPTS[:1])
    with pytest.raises(InvalidRequestError, match="taken"):
        engine.requests.adopt([Unfinished(0, PROMPTS[0], 0, {0: [1]})], 5, 5)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("group", "message"),
    [
        (Unfinished(0, PROMPTS[0], 0, {0: [10**6]}), "token id 1000000"),
        (Unfinished(0, PROMPTS[0], 0, {0: [1] * 31}), "more than the 30 tokens"),
        (Unfinished(0, Prompt([], PROMPTS[0].params)), "is empty"),
        (Unfinished(0, msgspec.structs.replace(PROMPTS[0], version=7)), "pinned to version 7"),
    ],
)
def test_a_group_that_this_engine_cannot_draw_is_named_and_others_go_on(make_engine, group, message):
    engine, assembler = make_engine(), Assembler()
    refused = engine.requests.adopt([group, Unfinished(1, PROMPTS[1])], 2, 20)
    assert list(refused) == [0]
    assert message in refused[0]
    assert {rollout.group_id for rollout in drive(engine, assembler)} == {1}


def test_samples_with_tokens_continue_while_no_prompt_is_admitted(make_engine):
    """Bounds such as max_unconsumed_tokens hold back what has not begun, and another engine has begun these."""
    engine = make_engine()
    engine.scheduler.admits = False
    prompt = Prompt([1, 2], SamplingParams(n=2, max_tokens=9, seed=5, ignore_eos=True))
    engine.requests.adopt([Unfinished(0, prompt, 0, {0: [7, 8, 9], 1: []})], 1, 2)
    frames = [engine.step() for _ in range(8)]
    drew = {int(i) for frame in frames if frame is not None for i in frame.request_ids}
    assert drew == {0}
    assert [i for frame in frames if frame is not None for i in frame.header.starts] == [0]
    assert engine.scheduler.held_back
