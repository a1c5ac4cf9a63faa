"""The verdict on made runs: each sentence, the rate of false trends, and missing numbers."""

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np
import pytest

from inflight.observability.events import Began, Engine, Step
from inflight.tools.recorded_run import RecordedRun
from inflight.tools.verdict import ERRORS, Finding, verdict_of
from inflight.training.data.lead import Rule

HEALTHY = {"ratio/ess": 0.98, "clipped": 0.01, "truncated": 0.02, "num_groups": 64.0, "num_skipped": 0.0}
HEALTHY |= {"staleness/age_over_bound": 1.2, "staleness/token_age_ms": 250.0, "lead/rule": float(Rule.JUST_IN_TIME)}
BUSY = {"generating": 1.0}


def run_of(
    rewards: Sequence[float] | np.ndarray, *, wait: float = 0.01, states: dict[str, float] = BUSY, **numbers: Any
) -> RecordedRun:
    """A run of one step per second. numbers: of every step, or one for each step."""
    run = RecordedRun()
    run.add(Began(time=0.0, title="a made run"))
    for step, reward in enumerate(rewards, 1):
        given = {name: n[step - 1] if isinstance(n, list) else n for name, n in numbers.items()}
        told = HEALTHY | {"reward": float(reward)} | given
        run.add(
            Step(time=step, step=step, numbers=told, seconds=1.0, spans={"wait for rollouts": wait, "forward": 0.5})
        )
        run.add(Engine(time=step, states=states))
    return run


def noise(count: int, seed: int = 0) -> np.ndarray:
    return 0.05 * np.random.default_rng(seed).standard_normal(count)


def rising(count: int = 60) -> np.ndarray:
    return np.linspace(0.2, 0.8, count) + noise(count)


def finding(run: RecordedRun, topic: str) -> Finding:
    return next(one for one in verdict_of(run) if one.topic == topic)


FLAT = np.concatenate([np.linspace(0.1, 0.9, 30), np.full(60, 0.9)]) + noise(90)
SOON_LEARNED = np.concatenate([np.full(8, 0.1), np.linspace(0.1, 0.95, 8), np.full(24, 0.95)]) + noise(40)
"""A short run that ends with almost all rewards, so that no line fits it."""
FALLEN = np.concatenate([np.full(60, 0.8), np.linspace(0.8, 0.3, 40)]) + noise(100)


@pytest.mark.parametrize(
    ("rewards", "numbers", "level", "state", "said"),
    [
        (rising(), {}, "good", "learning", "Trend of 50 steps: +0.5"),
        (FLAT, {}, "note", "flat", "Take harder prompts."),
        (SOON_LEARNED, {}, "good", "learning", "0.116 at first, 0.956 at best"),
        (0.3 + noise(60), {}, "note", "not yet learning", "noise hides a rise. Raise `groups_per_step`."),
        (np.full(60, 0.1), {}, "note", "not yet learning", "Trend of 50 steps: +0 ± "),
        (0.6 - 0.5 * (np.arange(80) > 60) + noise(80), {}, "alarm", "the reward fell", "at best, 0."),
        (np.concatenate([rising(), np.zeros(100)]), {}, "alarm", "the reward fell", "at best, 0 now."),
        (FALLEN, {}, "alarm", "the reward fell", "updates are too large. Lower the learning rate."),
        (
            FALLEN,
            {"ratio/ess": 0.2},
            "alarm",
            "the reward fell",
            "The likeliest cause: few tokens carry the gradient.",
        ),
        (0.3 + noise(60), {"truncated": 0.9}, "note", "not yet learning", "cause: many answers are cut off. Raise it."),
        # A slow rise shows only in a window that grows with the run.
        (np.linspace(0.2, 0.6, 1000) + noise(1000), {}, "good", "learning", "Trend of 500 steps: +0.19"),
        (-50 + 1e3 * rising(), {}, "good", "learning", "Trend of 50 steps: +"),
    ],
)
def test_each_verdict_on_learning(rewards, numbers, level, state, said):
    found = finding(run_of(rewards, **numbers), "learning")
    assert (found.level, found.state) == (level, state)
    assert said in str(found)


@pytest.mark.parametrize(("reason", "in_step"), [("replaced", 16.0), ("uniform", 64.0)])
def test_the_share_of_equal_rewards_is_of_all_groups_that_were_drawn(reason, in_step):
    """Replaced groups are not among the groups of their step."""
    counts = [48.0 * step for step in range(1, 61)]
    found = finding(run_of(rising(), num_groups=in_step, **{f"dropped/num_{reason}_groups": counts}), "signal")
    assert "75% of the groups with equal rewards" in str(found)


def test_noise_is_called_learning_or_falling_in_less_than_one_window_in_a_hundred():
    for count in (20, 50, 120):
        states = [finding(run_of(0.3 + noise(count, seed)), "learning").state for seed in range(300)]
        called = sum(state in ("learning", "the reward fell") for state in states)
        # If 0.5 % of all windows are called so, more than 5 of 300 are with a probability of 0.4 %.
        assert called <= 5, (count, called)


def test_noise_whose_neighbors_resemble_each_other_is_no_trend():
    called = 0
    for seed in range(300):
        white, values = noise(70, seed), [0.0]
        for one in white:
            values.append(0.6 * values[-1] + one)
        called += finding(run_of(values[-50:]), "learning").state in ("learning", "the reward fell")
    assert called <= 15  # 2 % were simulated, and over 10 % without the correction


def test_a_rise_of_the_stated_error_is_mostly_seen():
    # A rise over 50 steps of six standard errors: seen unless noise hides half of it, with a probability of 0.1 %.
    rise = 2 * ERRORS * 0.05 * np.sqrt(12 / 50)
    seen = [finding(run_of(np.linspace(0, rise, 50) + noise(50, seed)), "learning").state for seed in range(60)]
    assert seen.count("learning") >= 55


@pytest.mark.parametrize(
    ("given", "level", "state", "said"),
    [
        ({}, "good", "nobody waits", "waits for rollouts in 1% of its time. The engine has no prompts in 0%."),
        ({"wait": 0.4}, "note", "the trainer waits", "The generator is slower. Launch more engines."),
        ({"states": {"generating": 0.5, "idle": 0.5}}, "note", "the engine waits", "Raise `replace_uniform_groups`."),
        ({"states": {"generating": 0.9, "silent": 0.1}}, "alarm", "the engine is away", "in 10% of the time"),
        ({"states": {"generating": 0.9, "restarting": 0.1}}, "alarm", "the engine is away", "Read its log."),
        (
            {"states": {"generating": 0.9, "waits for weights": 0.1}},
            "note",
            "the engine waits for weights",
            "`slots=2`",
        ),
        (
            {"states": {"generating": 0.8, "waits for the trainer": 0.2}},
            "note",
            "the engine is held back",
            "20% of its time. Raise `max_unconsumed_tokens`.",
        ),
    ],
)
def test_each_verdict_on_waits(given, level, state, said):
    found = finding(run_of(rising(), **given), "waits")
    assert (found.level, found.state) == (level, state)
    assert said in str(found)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (Rule.FIXED, 'Set `schedule="inflight", ahead="auto"`.'),
        (Rule.SCORES, "Score faster."),
        (Rule.BOUND, "Raise `groups_in_flight`."),
        (Rule.GROWING, "Set `ahead=1`."),
    ],
)
def test_the_rule_of_the_lead_decides_the_change_if_each_waits_for_the_other(rule, change):
    run = run_of(
        rising(), wait=0.4, states={"generating": 0.5, "idle": 0.5}, **dict[str, Any]({"lead/rule": float(rule)})
    )
    found = finding(run, "waits")
    assert (found.state, found.change) == ("each waits for the other", change)


@pytest.mark.parametrize(
    ("numbers", "level", "state", "said"),
    [
        ({}, "good", "young", "250 ms old when they are trained on, 1.20 × the least that is possible."),
        ({"staleness/age_over_bound": 2.5}, "note", "old", "Set a lower `groups_in_flight`."),
        ({"staleness/age_over_bound": 2.5, "lead/rule": float(Rule.FIXED)}, "note", "old", 'Set `ahead="auto"`.'),
    ],
)
def test_each_verdict_on_age(numbers, level, state, said):
    found = finding(run_of(rising(), **numbers), "age")
    assert (found.level, found.state) == (level, state)
    assert said in str(found)


def test_a_loop_that_logs_no_staleness_has_its_recorded_ages():
    run = run_of(rising())
    for name in ("staleness/age_over_bound", "staleness/token_age_ms"):
        del run.numbers[name]
    run.numbers["token_age_ms, median"] = dict.fromkeys(run.times, 40.0)
    found = finding(run, "age")
    assert (found.level, found.state) == ("unknown", "no verdict yet")
    assert "Tokens are 40 ms old" in str(found)
    assert "does not log `staleness/age_over_bound`" in str(found)


COUNTING = list(map(float, range(60)))


@pytest.mark.parametrize(
    ("numbers", "level", "state", "said"),
    [
        ({}, "good", "good", "effective sample size 0.98, 1% of the tokens clipped, 2% of the answers cut off"),
        ({"num_skipped": COUNTING}, "alarm", "updates are skipped", "100% were not finite. Lower the learning rate."),
        ({"dropped/num_unscored_groups": [8 * n for n in COUNTING]}, "alarm", "rewards fail", "the score function."),
        ({"ratio/ess": 0.3}, "alarm", "few tokens carry the gradient", "Lower the learning rate."),
        ({"ratio/ess": 0.3, "mismatch/kl": 0.5}, "alarm", "few tokens carry the gradient", "Set the same `dtype`"),
        ({"clipped": 0.4}, "note", "many tokens are clipped", "The policy has left the one that drew the tokens."),
        ({"truncated": 0.4}, "note", "many answers are cut off", "They reach `max_tokens`. Raise it."),
        (
            {"dropped/num_uniform_groups": [48 * n for n in COUNTING]},
            "note",
            "most groups teach nothing",
            "75% of the groups with equal rewards.",
        ),
        ({"entropy": list(np.geomspace(2.0, 0.05, 60))}, "note", "the entropy is spent", "Raise `entropy_weight`."),
    ],
)
def test_each_verdict_on_the_signal(numbers, level, state, said):
    found = finding(run_of(rising(), **numbers), "signal")
    assert (found.level, found.state) == (level, state)
    assert said in str(found)


def test_first_steps_give_no_verdict():
    for run in (
        RecordedRun(),
        run_of([]),
        run_of(rising()[:4], **dict[str, Any]({"lead/rule": float(Rule.FIRST_STEPS)})),
    ):
        assert {found.level for found in verdict_of(run)} == {"unknown"}


@pytest.mark.parametrize("kept", [0, 30, 45])
def test_numbers_that_are_no_longer_finite_give_no_verdict(kept):
    """The recorder leaves such numbers out. NaN counts as missing, too."""
    for missing in (nan, None):
        run = run_of(rising())
        for name in ("reward", "ratio/ess", "staleness/age_over_bound"):
            for step in [step for step in run.numbers[name] if step > kept]:
                run.numbers[name][step] = nan
                if missing is None:
                    del run.numbers[name][step]
        levels = {found.topic: found.level for found in verdict_of(run)}
        assert levels == {"learning": "unknown", "waits": "good", "age": "unknown", "signal": "unknown"}


def test_steps_that_a_restart_repeats_count_once():
    run = run_of(rising(), wait=0.4)
    run.add(Began(time=1000.0, title="a made run", resumed_after_step=30))
    for step in range(31, 61):
        run.add(Step(time=1000.0 + step, step=step, numbers=HEALTHY | {"reward": 0.1}, seconds=1.0))
        run.add(Engine(time=1000.0 + step, states=BUSY))
    learning, waits, *_ = verdict_of(run)
    assert learning.state == "the reward fell"
    assert waits.state == "nobody waits"
