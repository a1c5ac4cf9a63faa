"""Episodes are compared with their own turns, drawn as plain requests."""

import pytest

from inflight.tools.bench import episodes
from inflight.tools.bench.options import EpisodesOptions

SMALL = EpisodesOptions(
    device="cpu", episodes=4, sequences=2, tokens=5, prompt_tokens=40, tool_s=(0.01, 0.02), publish_s=0.25, pairs=1
)
"""A prefix is reused across 8 versions: with publishes in quick succession, a slow machine would reuse none."""


@pytest.mark.medium
def test_every_turn_is_drawn_twice_from_the_same_tokens(monkeypatch):
    runs, measured = [], episodes._measured

    def record(groups, in_progress, totals):
        runs.append(groups)
        return measured(groups, in_progress, totals)

    monkeypatch.setattr(episodes, "_measured", record)
    shares = []
    result = episodes.measure(SMALL, lambda text, share=None: shares.append(share))
    with_tools, plain = runs[-2:]
    assert len(with_tools) == len(plain) == 12
    for group, requests in zip(with_tools, plain, strict=True):
        [rollout] = group
        drawn = [turn for turn in rollout.turns if turn.drawn]
        whole = [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]
        begins = [len(rollout.prompt_token_ids) + turn.begin for turn in drawn]
        assert [request.prompt_token_ids.tolist() for request in requests] == [whole[:begin] for begin in begins]
        assert [len(request.token_ids) for request in requests] == [5, 5, 5]
        drawn_tokens = rollout.token_ids[rollout.drawn].tolist()
        assert drawn_tokens == [token for request in requests for token in request.token_ids.tolist()]
    assert result["dropped"] == 0
    assert result["ratio"] == result["ratios"][0] > 0
    assert 0 < result["prefix_hit_share"] <= result["prefix_known_share"] < 1
    assert 0 < result["plain_prefix_hit_share"] <= result["prefix_known_share"]
    assert 0 < result["render_share"] < result["render_thread_share"]
    assert 24 < result["token_bytes"] < 40
    assert result["num_swaps"] >= 1
    assert shares[-1] == 0.0
