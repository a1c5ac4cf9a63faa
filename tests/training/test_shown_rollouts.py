"""The rollouts that a record shows: episodes with all of their token sequences, turns and branches, within bounds."""

from dataclasses import replace

import numpy as np
import pytest
from made_batches import make_group

from inflight.core.rollout import Rollout, Turn
from inflight.observability.events import Sample, Samples, decode, encode
from inflight.training import shown_rollouts
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.shown_rollouts import ShownRollouts

MS = 1_000_000


class Words:
    def of_tokens(self, ids: list[int]) -> list[str]:
        return [f"<{token}>" for token in ids]


def sequence(request: int, *turns: Turn, sample: int = 0, **more: object) -> Rollout:
    """A token sequence of an episode. Its tokens are 100 · request, and the following numbers."""
    length = turns[-1].end
    [like] = make_group(np.random.default_rng(request), 1, 1, 3)
    return replace(
        like,
        request_id=request,
        sample=sample,
        token_ids=np.arange(length, dtype=np.int32) + 100 * request,
        logprobs=np.full(length, -1.0, np.float32),
        weight_versions=np.full(length, request),
        sampled_at_ns=np.zeros(length, np.int64),
        turns=turns,
        prompt=f"prompt {request}",
        **more,
    )


def observed(shown: ShownRollouts, *batches: PackedBatch) -> list[Sample]:
    """The rollouts that are shown after these batches. log ρ of each token is its id."""
    for batch in batches:
        assert shown.observe(batch, batch.drawn, batch.input_ids[batch.drawn].float().numpy()) is None
    event = shown.take()
    assert isinstance(event, Samples)
    assert decode(encode(event)) == event
    return event.rollouts


def episode(sample: int = 0) -> list[Rollout]:
    """Three turns and two branches."""
    first, number = Turn(0, 2, True, 0.5, "stop", 1000 * MS, 1200 * MS), 10 * sample
    return [
        sequence(
            number + 1, first, Turn(2, 4, False), Turn(4, 6, True, 1.0, "length", 1700 * MS, 1800 * MS), sample=sample
        ),
        sequence(
            number + 2, Turn(0, 3, True, -1.0, "stop", 2000 * MS, 2500 * MS), sample=sample, forked_from=(number + 1, 1)
        ),
        sequence(number + 3, Turn(0, 1, True), sample=sample, forked_from=(number + 2, 2), adapter="solver"),
    ]


def test_an_episode_is_shown_with_its_turns_and_branches():
    shown = observed(ShownRollouts(Words()), pack(episode(), [1.0] * 3))
    assert [one.request_id for one in shown] == [1, 2, 3]
    assert [one.forked_from for one in shown] == [None, (1, 1), (2, 2)]
    assert [one.adapter for one in shown] == ["", "", "solver"]
    assert [one.prompt for one in shown] == ["prompt 1", "", ""]
    assert {(one.group_id, one.sample, one.num_sequences) for one in shown} == {(1, 0, 3)}
    first = shown[0]
    assert [(t.drawn, t.num_tokens, t.num_left_out) for t in first.turns] == [(True, 2, 0), (False, 2, 0), (True, 2, 0)]
    assert [turn.reward for turn in first.turns] == [0.5, None, 1.0]
    assert [turn.finish_reason for turn in first.turns] == ["stop", "", "length"]
    assert [(turn.began_s, turn.ended_s) for turn in first.turns] == [(0.0, 0.2), (None, None), (0.7, 0.8)]
    assert [(turn.began_s, turn.ended_s) for turn in shown[1].turns] == [(1.0, 1.5)]
    assert first.tokens == [f"<{token}>" for token in range(100, 106)]
    assert first.versions == [1, 1, None, None, 1, 1]
    assert first.log_ratios == [100, 101, None, None, 104, 105]


def test_an_episode_is_whole_if_its_sequences_are_in_several_micro_batches():
    batch = pack([*episode(0), *episode(1)], [1.0] * 6)
    parts = batch.micro_batches(12)
    first = parts[0].rollouts[0].sample
    assert sum(first in {rollout.sample for rollout in part.rollouts} for part in parts) > 1
    shown = observed(ShownRollouts(Words()), parts[0], *parts)
    of_first = [one for one in shown if one.sample == first]
    assert sorted(one.request_id % 10 for one in of_first) == [1, 2, 3]
    assert all(one.log_ratios[0] == 100 * one.request_id for one in shown)


def test_an_episode_is_whole_if_each_policy_has_its_own_loss():
    parts = pack(episode(), [1.0] * 3).by_adapter()
    shown = observed(ShownRollouts(Words()), parts["solver"], parts[None])
    assert {one.request_id: one.adapter for one in shown} == {3: "solver", 1: "", 2: ""}
    assert all(one.prompt == "" for one in shown if one.forked_from)


def test_the_first_loss_of_a_sequence_is_shown():
    shown, batch = ShownRollouts(Words()), pack(episode(), [1.0] * 3)
    for value in (0.5, 0.25):
        shown.observe(batch, batch.drawn, np.full(batch.num_drawn, value, np.float32))
    event = shown.take()
    assert event is not None
    assert {ratio for one in event.rollouts for ratio in one.log_ratios} == {0.5, None}


def test_another_choice_returns_the_one_before(monkeypatch):
    monkeypatch.setattr(shown_rollouts, "_EVERY_S", -1.0)
    shown, batch = ShownRollouts(Words()), pack(episode(), [1.0] * 3)
    rows = batch.drawn, np.zeros(batch.num_drawn, np.float32)
    assert shown.observe(batch, *rows) is None
    event = shown.observe(batch, *rows)
    assert event is not None
    assert len(event.rollouts) == 3
    assert shown.take() is not None
    assert shown.take() is None


def test_a_large_episode_is_cut_and_says_so():
    def turns(number: int) -> list[Turn]:
        return [Turn(100 * n, 100 * n + 100, n % 2 == 0, 1.0 if n % 2 == 0 else None) for n in range(number)]

    many = [sequence(n + 1, *turns(9), forked_from=(1, 50) if n else None) for n in range(20)]
    shown = observed(ShownRollouts(Words()), pack(many, [1.0] * 20))
    assert len(shown) == 16
    assert {(one.num_sequences, one.num_turns, one.num_tokens) for one in shown} == {(20, 9, 900)}
    assert {len(one.turns) for one in shown} == {4}
    assert {(turn.num_tokens, turn.num_left_out) for one in shown for turn in one.turns} == {(100, 84)}
    assert sum(len(one.tokens) for one in shown) == 1024
    assert shown[0].tokens[16] == "<200>"  # the second turn begins with its first token
    assert all(len(one.tokens) == len(one.versions) == len(one.log_ratios) for one in shown)

    [long] = observed(ShownRollouts(Words()), pack([sequence(1, *turns(201))], [1.0]))
    assert (len(long.turns), long.num_turns, len(long.tokens)) == (64, 201, 1024)
    assert len(encode(Samples(time=0.0, trainer_version=0, rollouts=[long]))) < 64_000


@pytest.mark.parametrize("length", [3, 400])
def test_a_rollout_without_turns_shows_its_first_tokens(length):
    [like, other] = make_group(np.random.default_rng(0), 1, 2, 3)
    rollout = replace(sequence(1, Turn(0, length, True)), turns=(), forked_from=(other.request_id, 0))
    shown = observed(ShownRollouts(Words()), pack([rollout, like], [1.0, 1.0]))
    assert [one.num_tokens for one in shown] == [length, len(like.token_ids)]
    assert len(shown[0].tokens) == min(length, 160)
    assert (shown[0].prompt, shown[0].turns, shown[0].num_turns, shown[0].num_sequences) == ("prompt 1", [], 0, 0)


def test_a_record_without_turns_is_read():
    line = (
        b'{"kind":"samples","time":1.5,"trainer_version":3,"rollouts":[{"prompt":"p","tokens":["a","b"],"versions":'
        b'[3,null],"log_ratios":[0.5,null],"reward":1.0,"finish_reason":"stop","num_tokens":2}]}'
    )
    event = decode(line)
    assert isinstance(event, Samples)
    [rollout] = event.rollouts
    assert (rollout.tokens, rollout.turns, rollout.forked_from, rollout.adapter) == (["a", "b"], [], None, "")
    assert encode(event) == line
