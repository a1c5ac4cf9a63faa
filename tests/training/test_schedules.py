"""Three schedules of generating and training: which weights draw what, in which order."""

import time
from collections import Counter, deque
from contextlib import closing
from copy import deepcopy
from itertools import count, islice
from types import SimpleNamespace

import own_schedule
import pytest
import torch
from tiny_models import VOCABULARY, make_model

import inflight
from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION
from inflight.training.data.scored_groups import Dropped
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.schedules import SCHEDULES, Admission, Example
from inflight.weights.tensors import fill, published_tensors

STEPS = 6


class LaggedPublisher:
    """Publisher with a delay: `publish()` sends the weights of `lag` calls ago.

    The first call sends the weights at once. Later, call n sends the model of call n − lag under that version number,
    so that a version has the same weights as without a lag. With schedule "sync" all tokens of step t have version
    max(1, t − lag). The publisher stores lag + 2 copies of the model.
    """

    def __init__(self, engine, model, *, lag: int):
        self._lag, self._meter = lag, engine.staleness
        self._current = published_tensors(model)
        self._snapshots: deque[dict[str, torch.Tensor]] = deque()
        lagged = deepcopy(model)
        self._lagged = published_tensors(lagged)
        self._publisher = engine.publisher(lagged)
        self._has_sent = False

    @property
    def version(self) -> int:
        """Return the newest version sent to the engine."""
        return self._publisher.version

    def publish(self) -> int:
        """Store the present parameters, and send the parameters of `lag` calls ago. Returns their version."""
        self._snapshots.append({name: tensor.detach().clone() for name, tensor in self._current.items()})
        if len(self._snapshots) > self._lag or not self._has_sent:
            self._has_sent = True
            self._publisher.wait_copied()
            fill(self._lagged, self._snapshots.popleft())
            self._publisher.publish()
        self._meter.trainer_version = self.version + len(self._snapshots)
        return self.version

    def close(self) -> None:
        self._publisher.close()


class Journal:
    """An engine and a publisher that write down what is asked of them. Groups finish in the order of submission.

    A version is held while it is live or groups pinned to it are in flight.
    """

    def __init__(self, bad_groups=(), num_examples=None, uniform_groups=(), abandoned_after=None):
        self._uniform_groups, self._abandoned_after = uniform_groups, abandoned_after
        self.events = []
        self.stream = self.ledger = self.scoring = self
        self.version = 0
        self.live = 0
        self.dropped = Dropped()
        self._pins = {}
        self._examples = [Example([1], {})] * num_examples if num_examples else (Example([1], {}) for _ in count())
        self.outstanding = []
        self.most_outstanding = 0
        self._bad_groups = bad_groups
        self._ids = count()

    def submit(self, prompts, params, *, metadata, version=None):
        held = {self.live, LIVE_VERSION, None} | {self._pins[group_id] for group_id in self.outstanding}
        if version not in held:
            raise InvalidRequestError(f"prompt 0 is pinned to version {version}, which no slot holds")
        ids = list(islice(self._ids, len(prompts)))
        self._pins |= dict.fromkeys(ids, self.live if version == LIVE_VERSION else version)
        self.outstanding += ids
        self.most_outstanding = max(self.most_outstanding, len(self.outstanding))
        self.events.append(("submit", len(ids), version))
        return ids

    def groups(self, group_ids=None, *, score=None, before_waiting=None):
        while self.outstanding:
            group_id = self.outstanding.pop(0)
            if group_id == self._abandoned_after:  # Another caller abandons all others.
                self.outstanding.clear()
            reason = "error" if group_id in self._bad_groups else "stop"
            rewards = (1.0, 1.0) if group_id in self._uniform_groups else (0.0, 1.0)
            plain = {"group_id": group_id, "finish_reason": reason, "turns": ()}
            yield [SimpleNamespace(reward=reward, **plain) for reward in rewards]

    def wait_for_version(self, version, *, timeout_s):
        assert timeout_s >= 3600  # an evaluation may keep the slot for long
        self.events.append(("wait", version))
        self.live = version

    failures = Counter()

    def check(self, scored, least):
        pass

    def drop(self, group_ids):
        assert sorted(self.outstanding) == group_ids
        self.outstanding.clear()

    def cancel(self, group_ids=None):
        self.events.append(("cancel", len(group_ids)))

    def train_and_publish(self):
        self.events.append(("train", len(self.outstanding)))
        self.version += 1
        self.live = self.version

    def run(self, schedule, steps, *, limit=2, groups_per_step=2, most_replaced=0, **settings):
        """Group ids that each step trained on."""
        taken = []
        config = GRPOConfig(
            sampling=inflight.SamplingParams(n=2),
            schedule=schedule,
            groups_per_step=groups_per_step,
            ahead=9,
            groups_in_flight=limit,
            replace_uniform_groups=most_replaced,
            **settings,
        )
        with Admission(self, self, iter(self._examples), lambda rollout: 1.0, config) as admission:
            for scored in islice(SCHEDULES[schedule].run(admission), steps):
                taken.append([group[0].group_id for group in scored.groups])
                self.dropped += scored.dropped
                self.train_and_publish()
        return taken


def test_one_step_off_trains_while_the_next_batch_is_drawn_under_one_version():
    journal = Journal()
    assert journal.run("one_step_off", 3) == [[0, 1], [2, 3], [4, 5]]
    assert journal.events == [
        ("wait", 0),
        ("submit", 2, 0),
        ("wait", 0),
        ("submit", 2, 0),
        ("train", 2),
        ("wait", 1),
        ("submit", 2, 1),
        ("train", 2),
        ("wait", 2),
        ("submit", 2, 2),
        ("train", 2),
        ("cancel", 2),
    ]


def test_sync_trains_with_nothing_in_flight_and_draws_under_the_newest_weights():
    journal = Journal()
    journal.run("sync", 2)
    submit = ("submit", 2, None)
    assert journal.events == [submit, ("train", 0), ("wait", 1), submit, ("train", 0)]


def test_in_flight_never_waits_and_admits_as_many_as_were_taken():
    journal = Journal()
    journal.run("inflight", 3, limit=5)
    kinds = [event[0] for event in journal.events]
    assert kinds == ["submit", "submit", "train", "submit", "train", "submit", "train", "cancel"]
    assert {event[1] for event in journal.events if event[0] == "train"} == {5}
    assert journal.most_outstanding == 5


def test_one_step_off_pins_nothing_before_what_was_published_is_live():
    journal = Journal()
    journal.version = 1
    assert journal.run("one_step_off", 1) == [[0, 1]]
    assert journal.events[:2] == [("wait", 1), ("submit", 2, 1)]


def test_groups_that_failed_are_counted_and_replaced():
    journal = Journal(bad_groups=[1])
    assert journal.run("inflight", 2, limit=4) == [[0, 2], [3, 4]]
    assert journal.dropped.num_failed_groups == 1
    assert journal.most_outstanding == 4
    assert Journal(bad_groups=[1]).run("sync", 2) == [[0, 2], [3, 4]]


def test_a_group_that_failed_is_replaced_under_the_version_of_its_batch_while_a_slot_holds_it():
    for bad_group, version, second_batch in ((2, 0, [3, 4]), (3, LIVE_VERSION, [2, 4])):
        journal = Journal(bad_groups=[bad_group])
        assert journal.run("one_step_off", 2) == [[0, 1], second_batch]
        assert journal.dropped.num_failed_groups == 1
        train = journal.events.index(("train", 2))  # version 1 is live from here on; groups 2 and 3 are of version 0
        assert journal.events[train + 1] == ("submit", 1, version)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_prompts_that_always_fail_come_to_an_end(schedule):
    assert Journal(bad_groups=[0, 1]).run(schedule, 1) == [[2, 3]]
    with pytest.raises(InflightError, match="3 groups failed while one batch of 2 was taken"):
        Journal(bad_groups=range(100)).run(schedule, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_when_the_prompts_end_the_last_batch_is_smaller(schedule):
    journal = Journal(num_examples=5)
    assert journal.run(schedule, 9) == [[0, 1], [2, 3], [4]]
    assert Journal(num_examples=4).run(schedule, 9) == [[0, 1], [2, 3]]
    assert Journal(num_examples=5, bad_groups=[4]).run(schedule, 9) == [[0, 1], [2, 3]]
    assert Journal(num_examples=1, bad_groups=[0]).run(schedule, 9) == []


def test_groups_of_equal_rewards_are_replaced_up_to_a_bound_in_each_batch():
    journal = Journal(uniform_groups=[0, 1, 2, 5])
    assert journal.run("sync", 2, most_replaced=2) == [[2, 3], [4, 6]]
    assert journal.dropped == Dropped(num_replaced_groups=3)
    assert journal.most_outstanding == 2
    journal = Journal(uniform_groups=[1])
    assert journal.run("one_step_off", 2, most_replaced=2) == [[0, 2], [3, 4]]
    assert journal.events[2] == ("submit", 1, 0)  # under the version of its batch
    assert Journal(uniform_groups=[0, 1]).run("inflight", 1, limit=4) == [[0, 1]]


def test_groups_of_equal_rewards_that_have_an_advantage_are_not_replaced():
    above_half = inflight.per_group(lambda groups: [rollout.reward - 0.5 for group in groups for rollout in group])
    journal = Journal(uniform_groups=[0, 1, 2])
    assert journal.run("sync", 2, most_replaced=2, advantages=above_half) == [[0, 1], [2, 3]]
    assert journal.dropped == Dropped()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_group_that_nothing_is_left_to_replace_stays(schedule):
    journal = Journal(num_examples=4, uniform_groups=range(4))
    assert journal.run(schedule, 9, most_replaced=1) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("schedule", "batches"),
    [("sync", [[0, 2], [3, 4]]), ("one_step_off", [[0, 2], [3, 4]]), ("inflight", [[0, 4], [5, 6]])],
)
def test_groups_that_another_caller_abandons_are_replaced(schedule, batches):
    journal = Journal(abandoned_after=0)
    assert journal.run(schedule, 2, limit=4) == batches
    assert journal.most_outstanding == max(4 * (schedule == "inflight"), 2)
    assert Journal(num_examples=4, abandoned_after=2).run(schedule, 9, limit=4) == [[0, 1], [2]]


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="unknown schedule 'async'; choose inflight, sync, one_step_off"):
        GRPOConfig(schedule="async")


@pytest.mark.parametrize("schedule", ["own_schedule:TWO_AHEAD", own_schedule.TWO_AHEAD])
def test_a_custom_schedule_keeps_two_batches_ahead(engine, schedule):
    model, submitted = make_model("qwen3"), count(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampling = inflight.SamplingParams(n=2, max_tokens=5, ignore_eos=True)
    config = GRPOConfig(steps=3, groups_per_step=2, sampling=sampling, schedule=schedule)
    examples = (Example([next(submitted), 3], {}) for _ in count())
    with engine.publisher(model) as publisher:
        reports = grpo(engine, publisher, model, optimizer, examples, lambda r: float(r.token_ids.sum() % 2), config)
        num_submitted = [next(submitted) - 1 - index for index, _ in enumerate(reports)]
    assert num_submitted == [6, 8, 10]  # three batches before the first step, and one more after each


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("own_schedule:nothing", "schedule 'own_schedule:nothing' cannot be imported .AttributeError"),
        ("own_schedule:refill_after_training", "must be a Schedule, got function"),
    ],
)
def test_other_things_than_schedules_are_named(schedule, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(schedule=schedule)


def versions_by_step(engine, schedule, lag=0):
    """Versions of each step's tokens, counted from the trainer's first; the rollouts; and the model of each version."""
    model = make_model("qwen3")
    with engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = GRPOConfig(
        steps=STEPS,
        groups_per_step=2,
        sampling=inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True),
        schedule=schedule,
        skip_uniform_groups=False,
    )
    seen = []

    def score(rollout):
        return float(rollout.token_ids.sum() % 2)

    examples = (Example([index % VOCABULARY, 3], {}) for index in count())
    with closing(LaggedPublisher(engine, model, lag=lag) if lag else engine.publisher(model)) as publisher:
        begin = publisher.version + 1  # published before the first step
        models = {0: deepcopy(model)}
        by_step = []
        for report in grpo(engine, publisher, model, optimizer, examples, score, config):
            rollouts = [rollout for group in report.groups for rollout in group]
            assert len(rollouts) == 8
            assert [rollout.reward for rollout in rollouts] == [score(rollout) for rollout in rollouts]
            seen += rollouts
            versions = {int(v) - begin for rollout in rollouts for v in rollout.weight_versions}
            assert set(report.staleness.version_lag.tolist()) == {report.step - 1 - v for v in versions}
            by_step.append(versions)
            models[report.step] = deepcopy(model)
    assert not engine.stream.outstanding
    return by_step, seen, {begin + version: model for version, model in models.items()}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("schedule", "lag", "expected"),
    [
        ("sync", 0, [0, 1, 2, 3, 4, 5]),
        ("one_step_off", 0, [0, 0, 1, 2, 3, 4]),
        ("sync", 2, [0, 0, 0, 1, 2, 3]),
    ],
)
def test_every_token_of_a_step_has_the_version_of_the_schedule_and_its_weights(engine, schedule, lag, expected):
    by_step, rollouts, models = versions_by_step(engine, schedule, lag)
    assert by_step == [{version} for version in expected]
    for rollout in rollouts[::5]:
        ids = torch.tensor([*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()])
        with torch.no_grad():
            logprobs = models[int(rollout.weight_versions[0])](ids[None]).logits[0].log_softmax(-1)
        drawn = logprobs[1:-1].gather(1, ids[2:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(rollout.logprobs.copy()), drawn, atol=1e-4, rtol=1e-4)


@pytest.mark.medium
def test_rules_a_bound_on_what_is_in_flight_and_micro_batches_work_together(engine):
    """Every batch is two versions old: rules that allow one leave nothing to learn, and say how much that was."""
    for allowed, objective in ((2, "decoupled_ppo"), (1, "tis")):
        model = make_model("qwen3")
        config = GRPOConfig(
            steps=4,
            groups_per_step=2,
            sampling=inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True),
            schedule="sync",
            objective=objective,
            updates_per_batch=2 if objective == "decoupled_ppo" else 1,
            probe_every=2,
            staleness=(inflight.StalenessRule(max_version_lag=allowed, action="reject"),),
            micro_batch_tokens=20,
            skip_uniform_groups=False,
        )
        examples = (Example([index % VOCABULARY, 3], {}) for index in count())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
        with closing(LaggedPublisher(engine, model, lag=2)) as publisher:
            reports = list(grpo(engine, publisher, model, optimizer, examples, lambda r: r.token_ids.sum() % 3, config))
        assert [report.dropped.num_tokens for report in reports] == [40, 80, 120, 160]
        expected = [0, 0, 0, 0] if allowed == 2 else [0, 0, 40, 80]
        assert [report.dropped.num_stale_tokens for report in reports] == expected
        assert [report.stats is None for report in reports] == [False, False, allowed == 1, allowed == 1]
        assert [report.stats.num_tokens for report in reports if report.stats] == [40] * (4 if allowed == 2 else 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_grpo_ends_with_its_prompts_and_begins_with_weights_that_were_just_published(engine, schedule):
    model = make_model("qwen3")
    config = GRPOConfig(
        steps=STEPS,
        groups_per_step=2,
        sampling=inflight.SamplingParams(n=2, max_tokens=5, ignore_eos=True),
        schedule=schedule,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = iter([Example([index, 3], {}) for index in range(5)])
    with engine.publisher(model) as publisher:
        publisher.publish()
        reports = list(grpo(engine, publisher, model, optimizer, examples, lambda r: r.token_ids.sum() % 3, config))
    assert [report.num_tokens for report in reports] == [20, 20, 10]
    assert not engine.stream.outstanding


def test_a_real_engine_trains_on_groups_while_others_are_scored(engine):
    def score(rollout):
        time.sleep(0.05 * (rollout.prompt_token_ids[0] % 4))
        return float(rollout.sample)

    model, heard = make_model("qwen3"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampling = inflight.SamplingParams(n=2, max_tokens=5, ignore_eos=True)
    config = GRPOConfig(steps=3, groups_per_step=8, sampling=sampling, train_as_they_finish=True)
    examples = (Example([index % 50, 3], {}) for index in count())
    engine.stream.observers.append(lambda batch, *_: heard.append(batch.num_sequences))
    try:
        with engine.publisher(model) as publisher:
            reports = list(grpo(engine, publisher, model, optimizer, examples, score, config))
    finally:
        engine.stream.observers.clear()
    assert [report.stats.num_tokens for report in reports] == [80] * 3
    assert [len(report.staleness.token_age_ms) for report in reports] == [80] * 3
    assert sum(heard) == 48
    assert len(heard) > 3
