"""Each measure follows from a script of events."""

import pytest
from truth_tokens import LOGPROBS, drawn

from inflight.observability import staleness_meter
from inflight.tools.bench.served_tokens import Answer, Piece, ServedTokens, Update

MS = 1_000_000


def answer(*arrivals, reason="length", labels=None):
    """arrivals: (time in ms, the (token, log-probability) pairs that came then)."""
    pieces = [Piece(round(ms * MS), [t for t, _ in pairs], [lp for _, lp in pairs]) for ms, *pairs in arrivals]
    return Answer(pieces, labels, reason)


def update(seen, version, called_ms, answered_ms):
    seen.called(version, round(called_ms * MS))
    seen.updates.append(Update(version, round(called_ms * MS), round(answered_ms * MS)))


@pytest.fixture
def seen(monkeypatch):
    monkeypatch.setattr(staleness_meter, "now_ns", lambda: 0)
    return ServedTokens(exact=True)


def test_a_pause_is_a_stall_and_a_swap_ends_with_the_first_new_token(seen):
    before = [(10.0 * i, drawn(0)) for i in range(1, 11)]  # every 10 ms until 100
    after = [(230.0 + 10 * i, drawn(1)) for i in range(5)]
    seen.answers.append(answer(*before, *after))
    update(seen, 1, 104, 226)
    result = seen.result()
    assert result["stall_ms"] == {"p50": 120.0, "p90": 120.0, "p99": 120.0, "max": 120.0}  # 130 less the usual 10
    assert result["swap_ms"]["max"] == 126.0
    assert result["update_ms"]["max"] == 122.0
    assert result["gap_across_ms"]["max"] == 130.0
    assert result["gap_ms"] == dict.fromkeys(("p50", "p90", "p99", "max"), 10.0)
    assert result["num_requests_across_updates"] == 1


def test_other_requests_that_go_on_are_no_stall(seen):
    """One request waits over the update, another draws every 10 ms."""
    seen.answers.append(answer((100, drawn(0)), (300, drawn(1))))
    seen.answers.append(answer(*[(10.0 * i, drawn(int(i >= 20))) for i in range(1, 40)]))
    update(seen, 1, 150, 200)
    result = seen.result()
    assert result["stall_ms"]["max"] == 0.0
    assert result["swap_ms"]["max"] == 50.0
    assert result["gap_across_ms"]["max"] == 200.0


def test_ages_are_those_of_the_meter(seen):
    update(seen, 1, 100, 110)
    update(seen, 2, 200, 210)
    taken = answer((150, drawn(0)), (160, drawn(1)), (250, drawn(1)), (260, drawn(2, second=True)))
    seen.answers.append(taken)
    seen.consumed([taken], time_ns=300 * MS, trainer_version=2)
    result = seen.result()
    assert result["weight_lag_ms"]["p99"] == pytest.approx(50, rel=0.01)  # 50, 0, 50, 0
    assert result["weight_lag_ms"]["p50"] == 0
    assert result["policy_age_ms"]["p99"] == pytest.approx(150, rel=0.01)  # 150, 60, 150, 60
    assert result["token_age_ms"]["p99"] == pytest.approx(150, rel=0.01)
    assert result["version_lag"] == {"p50": 1.0, "max": 2.0}


def test_an_update_that_another_overtakes_ends_with_the_newer_tokens(seen):
    seen.answers.append(answer((90, drawn(0)), (230, drawn(2))))
    update(seen, 1, 100, 110)
    update(seen, 2, 120, 220)
    assert seen.result()["swap_ms"] == {"p50": 120.0, "p90": 128.0, "p99": 129.8, "max": 130.0}


def test_requests_that_the_server_ended_are_counted_and_those_that_go_on_are_not(seen):
    seen.answers += [
        answer((1, drawn(0)), (2, drawn(0))),
        answer((1, drawn(0)), (2, drawn(0)), (3, drawn(0)), reason="abort"),
        answer(reason="error"),
        answer((1, drawn(0)), reason=""),
    ]
    result = seen.result()
    assert (result["num_aborted_requests"], result["num_tokens_thrown_away"]) == (2, 3)
    assert (result["num_requests"], result["num_tokens"]) == (4, 6)


def test_what_the_server_says_of_versions_is_compared_with_what_the_tokens_say(seen):
    seen.answers.append(answer((1, drawn(0), drawn(1)), (2, drawn(1)), labels=["0", "0", "1"]))
    seen.answers.append(answer((1, drawn(4)), (2, drawn(4)), labels=["4"]))
    seen.answers.append(answer((1, drawn(4))))
    assert seen.result()["num_mislabeled_tokens"] == 2  # one of another version, one without


def test_servers_that_say_nothing_of_versions_mislabel_nothing(seen):
    seen.answers.append(answer((1, drawn(4))))
    assert seen.result()["num_mislabeled_tokens"] is None


def test_log_probabilities_of_other_versions_and_torn_tokens_are_counted(seen):
    stale = drawn(3, logprob=LOGPROBS[1][0])  # computed with the weights of another version
    seen.answers.append(answer((1, drawn(3), drawn(3, second=True), stale, (0, -0.5))))
    result = seen.result()
    assert (result["num_foreign_logprobs"], result["num_torn_tokens"]) == (2, 1)


def test_nothing_seen_is_no_measure(seen):
    result = seen.result()
    assert result["swap_ms"] == result["stall_ms"] == result["gap_ms"] == {}
    assert result["num_tokens"] == 0
