"""The lead controller on a simulated clock: it waits little, keeps tokens young, follows changes, never deadlocks."""

import sys
from dataclasses import replace
from math import inf, isnan
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.training.data.lead import LeadController, check_ahead
from inflight.training.data.lead_law import WAIT_SHARE

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from lead_simulation import Simulation, World

PLAIN = World(is_long_tailed=False, jitter=0.0, median_tokens=100, groups_per_step=16, samples=4, rows=64)
"""A batch of it takes one second: 100 passes of 10 ms."""


def drive(lead, now, *, train_s, draw_s, steps):
    """Run a trainer and a generator whose groups are ready `draw_s` after their start. Returns the waits."""
    pending, ready, waits, taken, asked, until = [], 0, [], 0, now, inf
    lead.ask(now)
    while len(waits) < steps:
        count = lead.allowed(now)
        lead.start(count, now)
        pending += [now + draw_s] * count
        now = max(now, min([*pending, lead.next_start(now), until]))
        while pending and pending[0] <= now:
            pending.pop(0)
            lead.ready(now)
            ready += 1
        if now >= until:
            lead.ask(now)
            taken, asked, until = 0, now, inf
        while until == inf and ready and taken < 4:
            ready, taken = ready - 1, taken + 1
            lead.take(4 - taken)
        if until == inf and taken == 4:
            lead.begin(now)
            waits.append(now - asked)
            until = now + train_s
    return waits


def test_with_constant_times_each_group_starts_just_in_time():
    lead = LeadController(4)
    waits = drive(lead, 0.0, train_s=2.0, draw_s=0.5, steps=20)
    assert max(waits[5:]) <= WAIT_SHARE * 2.0
    assert lead.state.seconds == pytest.approx(0.5, abs=WAIT_SHARE * 2.0)
    assert lead.in_flight == 0  # the groups of the next step start while the trainer trains
    assert lead.state.wait_share <= WAIT_SHARE


def test_a_lead_of_several_steps_keeps_several_batches_in_flight():
    lead = LeadController(4)
    waits = drive(lead, 0.0, train_s=1.0, draw_s=3.5, steps=60)
    assert sum(waits[-20:]) <= 20 * WAIT_SHARE
    assert lead.state.seconds == pytest.approx(3.5, abs=0.05)
    assert 12 <= lead.in_flight <= 16


def test_hard_bounds_hold_and_are_the_reason():
    lead = LeadController(4, most_groups=6)
    drive(lead, 0.0, train_s=1.0, draw_s=3.5, steps=20)
    lead.start(lead.allowed(1e9), 1e9)
    assert lead.in_flight == 6
    lead = LeadController(4, most_groups=4)
    drive(lead, 0.0, train_s=1.0, draw_s=3.5, steps=20)
    assert lead.in_flight <= 4
    lead.start(lead.allowed(1e9), 1e9)
    assert "the bound on groups in flight" in lead.state.reason


def test_a_fixed_number_of_batches_is_a_fixed_bound():
    lead = LeadController(4, ahead=2)
    assert lead.allowed(0.0) == 12
    lead.start(12, 0.0)
    assert lead.allowed(5.0) == 0
    assert lead.next_start(5.0) == inf
    assert isnan(lead.state.seconds)
    assert "fixed number of batches" in lead.state.reason


def test_engines_that_more_groups_do_not_speed_up_get_a_batch_at_most():
    lead = LeadController(4, spare_groups=lambda: 0.0)
    assert lead.allowed(0.0) == 4
    lead.start(4, 0.0)
    assert lead.allowed(0.0) == 0
    lead.ready(1.0)
    lead.take()
    assert lead.allowed(1.0) == 1


def test_steps_that_replace_groups_take_more():
    """Half of the groups are replaced: twice as many start for a step."""
    lead, now = LeadController(4), 0.0
    for _ in range(30):
        lead.ask(now)
        for index in range(8):
            lead.start(lead.allowed(now), now)
            lead.ready(now)
            lead.take(4 - (index + 1) // 2)
        lead.begin(now)
        now += 1.0
    assert lead.law.batch == 8
    lead.ask(now)
    assert lead.allowed(now) + lead.in_flight >= 8


def test_groups_that_were_ready_before_the_run_continued_do_not_count_as_unready():
    lead = LeadController(4, spare_groups=lambda: 0.0)
    lead.start(4, 0.0)  # of the saved run, ready already
    lead.ask(1.0)
    for missing in (3, 2, 1, 0):
        lead.take(missing)
    lead.begin(1.0)
    lead.ask(2.0)
    assert lead.allowed(2.0) == 4


def test_refused_groups_count_nowhere():
    lead = LeadController(4)
    lead.start(4, 0.0)
    lead.withdraw(3)
    assert (lead.in_flight, lead.allowed(0.0)) == (1, 3)


@pytest.mark.parametrize("ahead", [-1, "all", 1.5, True, None])
def test_other_values_than_auto_and_numbers_are_named(ahead):
    with pytest.raises(ValueError, match='ahead must be "auto" or a number of batches'):
        check_ahead(ahead)
    check_ahead(np.int64(2))


def figures(world, ahead, skip=20):
    return Simulation(world, ahead=ahead).run().result(skip)


@pytest.mark.parametrize("num_engines", [1, 4])
@pytest.mark.parametrize("is_long_tailed", [False, True])
@pytest.mark.parametrize("regime", ["trainer", "balanced", "generator"])
def test_it_is_as_fast_as_the_best_fixed_bound_and_its_tokens_are_as_young(num_engines, is_long_tailed, regime):
    batch_s = 3.2 if is_long_tailed else 1.0  # of a lone batch
    train_s = {"trainer": 3.0, "balanced": 1.1, "generator": 0.3}[regime] * batch_s
    world = replace(
        PLAIN,
        num_engines=num_engines,
        groups_per_step=16 * num_engines,
        is_long_tailed=is_long_tailed,
        train_s=train_s,
        jitter=0.05,
        steps=100,
    )
    fixed = [figures(world, ahead) for ahead in (0, 1, 2, 4, 8)]
    auto, best = figures(world, "auto"), max(one["steps_per_s"] for one in fixed)
    assert auto["steps_per_s"] >= 0.96 * best
    fast = [one["token_age_s"] for one in fixed if one["steps_per_s"] >= 0.97 * best]
    assert auto["token_age_s"] <= 1.15 * min(fast)
    if regime == "trainer":
        assert auto["trainer_wait_share"] <= WAIT_SHARE


JUDGED = replace(
    PLAIN, rows=256, median_tokens=5, train_s=0.1, jitter=0.05, reward_s=0.02, reward_varies=False, scorers=1, steps=200
)
"""Groups are drawn in 50 ms, and the scorer is the slower half: it scores a batch in 320 ms."""


def means(worlds, ahead, skip):
    runs = [figures(world, ahead, skip) for world in worlds]
    return {name: fmean(run[name] for run in runs) for name in runs[0]}


@pytest.mark.parametrize(("scorers", "varies", "hang_share"), [(1, 0, 0), (8, 0, 0), (4, 1, 0), (8, 1, 0.01)])
def test_groups_do_not_queue_at_scorers_that_are_the_slower_half(scorers, varies, hang_share):
    world = replace(JUDGED, scorers=scorers, reward_s=0.02 * scorers, reward_varies=varies, hang_share=hang_share)
    worlds = [replace(world, seed=seed) for seed in range(3)]
    auto, least, more = (means(worlds, ahead, 40) for ahead in ("auto", 0, 1))
    assert auto["steps_per_s"] >= 0.96 * max(least["steps_per_s"], more["steps_per_s"])
    if varies:  # The speeds of steps are noisy.
        assert auto["token_age_s"] <= 1.5 * more["token_age_s"]
    else:
        assert auto["token_age_s"] <= 1.3 * least["token_age_s"]


@pytest.mark.parametrize(("groups_per_step", "train_s"), [(16, 0.1), (16, 1.0), (4, 0.08)])
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("hang_share", [0, 0.01])
def test_a_latency_of_scores_is_hidden_whatever_the_number_of_groups(groups_per_step, train_s, varies, hang_share):
    """Also if a score in a hundred takes 50 times as long."""
    world = replace(JUDGED, scorers=0, groups_per_step=groups_per_step, train_s=train_s)
    world = replace(world, reward_s=0.1 if hang_share else 0.5, reward_varies=varies, hang_share=hang_share)
    worlds = [replace(world, seed=seed) for seed in range(3)]
    auto, most = means(worlds, "auto", 100), means(worlds, 8, 100)
    assert auto["steps_per_s"] >= 0.95 * most["steps_per_s"]
    if not (varies or hang_share):
        assert auto["trainer_wait_share"] <= WAIT_SHARE


def test_the_reason_names_the_slower_half():
    [trainer] = Simulation(JUDGED).run().trainers
    trainer.lead.start(trainer.lead.allowed(1e9), 1e9)
    assert "scores or tools are the slower half" in str(trainer.lead.state)


@pytest.mark.parametrize("train_s", [0.1, 0.4])
def test_it_follows_a_scorer_that_slows_down_and_recovers(train_s):
    usual, slow = replace(JUDGED, train_s=train_s), replace(JUDGED, train_s=train_s, reward_s=0.1)
    simulation = Simulation(usual)
    [trainer] = simulation.trainers

    def before_step(trainer):
        trainer.world = slow if 60 <= len(trainer.times) < 120 else usual

    trainer.before_step = before_step
    simulation.run()
    for first, last, world in ((80, 120, slow), (140, 200, usual)):
        fixed = figures(world, 0)
        ages, tokens = zip(*trainer.ages[16 * first : 16 * last], strict=True)
        speed = (last - first - 1) / (trainer.times[last - 1] - trainer.times[first])
        assert speed >= 0.95 * fixed["steps_per_s"]
        assert sum(ages) / sum(tokens) <= 2 * fixed["token_age_s"]


def settled(world, change=None, *, at=40, within=20):
    """Run, and make a change before step `at`. Returns the wait share and the mean age of tokens of the steps from
    `within` steps later on."""
    simulation = Simulation(world)
    [trainer] = simulation.trainers

    def before_step(trainer):
        if change is not None and len(trainer.times) == at:
            change(simulation)

    trainer.before_step = before_step
    figures = simulation.run().result(skip=at + within)
    return figures["trainer_wait_share"], figures["token_age_s"]


def lose_half(simulation):
    for engine in simulation.pool.engines[::2]:
        simulation.pool.fail(engine, Random(0))


CHANGES = {
    "lengths × 4": lambda world: replace(world, median_tokens=4 * world.median_tokens),
    "lengths / 4": lambda world: replace(world, median_tokens=world.median_tokens / 4),
    "rewards take 0.5 s": lambda world: replace(world, reward_s=0.5),
    "steps take half the time": lambda world: replace(world, train_s=world.train_s / 2),
    "half of the engines are lost": None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_long_tailed", [False, True])
def test_it_follows_a_change_within_20_steps(change, is_long_tailed):
    """Then the wait share is inside its limit, and tokens are as young as in a run that has always been so."""
    world = replace(
        PLAIN,
        num_engines=4,
        groups_per_step=32,
        median_tokens=50,
        train_s=8.0 if is_long_tailed else 3.0,
        jitter=0.03,
        is_long_tailed=is_long_tailed,
        steps=120,
    )
    changed = CHANGES[change]
    if changed is None:
        wait_share, age = settled(world, lose_half)
        _, usual_age = settled(replace(world, num_engines=2))
    else:
        wait_share, age = settled(world, lambda s: setattr(s.trainers[0], "world", changed(s.trainers[0].world)))
        _, usual_age = settled(changed(world))
    assert wait_share <= WAIT_SHARE
    assert age <= 1.1 * usual_age


@pytest.mark.medium
@settings(max_examples=300)
@given(
    world=st.builds(
        World,
        num_engines=st.integers(1, 3),
        rows=st.integers(1, 12),
        base_s=st.floats(1e-4, 0.1),
        row_s=st.sampled_from([0.0, 1e-4, 0.01]),
        groups_per_step=st.integers(1, 6),
        samples=st.integers(1, 3),
        median_tokens=st.floats(1, 50),
        is_long_tailed=st.booleans(),
        train_s=st.floats(1e-3, 10),
        jitter=st.floats(0, 2),
        reward_s=st.sampled_from([0.0, 0.1, 5.0]),
        failures_per_step=st.sampled_from([0.0, 0.3]),
        steps=st.just(12),
        seed=st.integers(0, 10_000),
    ),
    ahead=st.sampled_from(["auto", "auto", "auto", 0, 1]),
)
def test_no_world_deadlocks(world, ahead):
    [trainer] = Simulation(world, ahead=ahead).run().trainers
    assert len(trainer.times) >= 12
    assert trainer.lead.in_flight >= 0


EVENTS = st.lists(
    st.sampled_from(["start", "ready", "take", "ask", "begin", "refuse", "wait", "replace", "compute"]), max_size=60
)


@pytest.mark.medium
@settings(max_examples=3_000)
@given(events=EVENTS, per_step=st.integers(1, 4), most_groups=st.sampled_from([0, 4, 9]))
def test_no_schedule_of_events_deadlocks(events, per_step, most_groups):
    """After any events, a trainer that asks and takes what is ready gets a whole batch."""
    lead, now, unready, ready, asked = LeadController(per_step, most_groups=most_groups), 0.0, 0, 0, False
    for event in events:
        if event == "start":
            count = lead.allowed(now)
            assert most_groups == 0 or lead.in_flight + count <= most_groups
            lead.start(count, now)
            unready += count
        elif event == "ready" and unready:
            lead.ready(now)
            unready, ready = unready - 1, ready + 1
        elif event == "take" and asked and ready:
            lead.take()
            ready -= 1
        elif event == "ask":
            lead.ask(now)
            asked = True
        elif event == "begin":
            lead.begin(now)
            asked = False
        elif event == "refuse" and (count := lead.allowed(now)):
            lead.start(count, now)
            lead.withdraw(count)
        elif event == "replace":
            lead.missing = per_step
        elif event == "compute":
            lead.compute(now)
            now += 0.5
            assert lead.next_start(now) >= now
            lead.wait(now)
        now += 1.0 if event == "wait" else 0.01
        assert lead.next_start(now) >= now
    lead.ask(now)
    for missing in range(per_step, 0, -1):
        if not ready:
            unready += (count := lead.allowed(now))
            lead.start(count, now)
            assert unready, "the trainer would wait forever"
            lead.ready(now)
            unready -= 1
        else:
            ready -= 1
        lead.take(missing - 1)
    lead.begin(now)


def drive_in_parts(lead, draw_s, *, group_s, rest_s, steps):
    """Run a trainer that computes `group_s` for each group, on the groups that are ready as soon as it would wait, and
    `rest_s` at the end of a step. draw_s: called for the time until a started group is ready. Returns the waits."""
    pending, ready, now, waits = [], 0, 0.0, []

    def advance(until):
        """Start groups, and let them finish, until a time; None: until one is ready."""
        nonlocal now, ready
        while until is None or now < until:
            count = lead.allowed(now)
            lead.start(count, now)
            pending.extend(now + draw_s() for _ in range(count))
            pending.sort()
            event = max(now, min([*pending[:1], lead.next_start(now)]))
            if until is not None and event > until:
                now = until
                break
            now = event
            while pending and pending[0] <= now:
                pending.pop(0)
                lead.ready(now)
                ready += 1
            if until is None and ready:
                break

    for _ in range(steps):
        lead.ask(now)
        taken, new, wait = 0, 0, 0.0
        while taken < 4:
            was = now
            if ready:
                ready, taken, new = ready - 1, taken + 1, new + 1
                lead.take(4 - taken)
            elif new:
                lead.compute(now)
                advance(now + new * group_s)
                lead.wait(now)
                new = 0
            else:
                advance(None)
                wait += now - was
        lead.begin(now)
        waits.append(wait)
        advance(now + new * group_s + rest_s)
    return waits


@pytest.mark.parametrize("ahead", [0, 1, "auto"])
def test_the_time_of_parts_is_time_of_the_step_and_no_wait(ahead):
    random, lead = Random(0), LeadController(4, ahead=ahead)
    waits = drive_in_parts(lead, lambda: random.uniform(0.1, 3.0), group_s=0.3, rest_s=0.1, steps=12)
    assert [step.wait_s for step in lead.law.steps] == pytest.approx(waits)
    assert [step.train_s for step in lead.law.steps][1:] == pytest.approx([4 * 0.3 + 0.1] * 11)
    weights = [0.9**age for age in range(11)][::-1]
    mean_wait_s = sum(w * wait for w, wait in zip(weights, waits[1:], strict=True)) / sum(weights)
    assert lead.state.wait_share == pytest.approx(mean_wait_s / (mean_wait_s + 1.3))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rest_s", [0.1, 1.5])
def test_a_trainer_in_parts_hardly_waits_either_and_its_groups_start_later(rest_s, seed):
    """Its lead is at most that of a trainer that begins with the last group of a step."""
    random = Random(seed)
    draw_s = lambda: random.uniform(0.2, 2.0)  # noqa: E731
    lead, whole = LeadController(4), LeadController(4)
    waits = drive_in_parts(lead, draw_s, group_s=0.5, rest_s=rest_s, steps=200)
    drive(whole, 0.0, train_s=2.0 + rest_s, draw_s=2.0, steps=200)
    assert sum(waits[-100:]) <= WAIT_SHARE * (100 * (2.0 + rest_s) + sum(waits[-100:]))
    assert lead.state.seconds <= whole.state.seconds
