"""Evaluations beside training: one version answers, nothing trains on it, and a run goes on with them."""

import logging
import threading
import time
from itertools import count

import pytest
import torch
from tiny_models import VOCABULARY, make_model

import inflight
from inflight.training.evaluation import Evaluation
from inflight.training.schedules import Example

GREEDY = inflight.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLING = inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True)
HELD_OUT = [[7, index] for index in range(3)]


def token_sum(rollout):
    return float(rollout.token_ids.sum() % 3)


@pytest.fixture
def wide_engine(model_dir):
    """With a third slot, for the version that is evaluated."""
    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=64, slots=3) as e:
        yield e


def train(engine, evaluation, *, steps, run=None, publish_first=True, loggers=(), stop_after=None):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = inflight.GRPOConfig(steps=steps, groups_per_step=2, sampling=SAMPLING)
    examples = (Example([index % VOCABULARY, 3], {}) for index in count())
    reports = []
    with engine.publisher(model) as publisher:
        if publish_first:
            engine.wait_for_version(publisher.publish())
        source = inflight.grpo(
            engine, publisher, model, optimizer, examples, token_sum, config, evaluation=evaluation, loggers=loggers
        )
        for report in source:
            reports.append(report)
            if report.step == stop_after:
                source.close()
                break
    return reports


class Kept:
    """A logger that keeps what it is told."""

    def __init__(self):
        self.values = []

    def log(self, step, values):
        self.values.append((step, dict(values)))


def test_versions_are_evaluated_before_the_first_step_now_and_then_and_after_the_last(wide_engine):
    evaluation = Evaluation(wide_engine, HELD_OUT, token_sum, sampling=GREEDY, every=2, name="held_out")
    kept = Kept()
    reports = train(wide_engine, evaluation, steps=5, loggers=[kept])
    results = evaluation.results
    assert results[0].step == 0
    assert results[-1].step == 5
    assert {result.step for result in results} <= {0, 2, 4, 5}
    begin = results[0].version
    for result in results:
        assert result.version == begin + result.step
        assert len(result.rollouts) == 3
        assert {int(v) for rollout in result.rollouts for v in rollout.weight_versions} == {result.version}
        assert result.reward == pytest.approx(sum(map(token_sum, result.rollouts)) / 3)
        assert result.num_failed == 0
    in_reports = [result for report in reports for result in report.evaluations]
    assert in_reports == results[: len(in_reports)]
    trained = {rollout.group_id for report in reports for rollout in report.rollouts}
    assert trained.isdisjoint(rollout.group_id for result in results for rollout in result.rollouts)
    assert [step for step, _ in kept.values] == [1, 2, 3, 4, 5] + [5] * (len(results) - len(in_reports))
    told = [values["held_out/reward"] for _, values in kept.values if "held_out/reward" in values]
    assert told[-1] == results[-1].reward
    assert kept.values[-1][1]["held_out/mean_length"] == 6
    assert kept.values[-1][1]["held_out/truncated"] == 1
    assert not wide_engine.stream.outstanding


def test_with_two_slots_training_waits_for_the_version_and_nothing_is_lost(engine):
    evaluation = Evaluation(engine, HELD_OUT, token_sum, sampling=GREEDY, every=1)
    reports = train(engine, evaluation, steps=3)
    assert [report.step for report in reports] == [1, 2, 3]
    assert (evaluation.results[0].step, evaluation.results[-1].step) == (0, 3)


def test_the_evaluation_after_the_last_step_is_not_left_out_while_another_one_runs(engine, caplog):
    def slow(rollout):
        time.sleep(0.2)
        return 1.0

    evaluation = Evaluation(engine, HELD_OUT, slow, sampling=GREEDY, every=1)
    with caplog.at_level(logging.WARNING):
        train(engine, evaluation, steps=1)
    assert [result.step for result in evaluation.results] == [0, 1]
    assert "is left out" not in caplog.text


def test_one_that_begins_too_early_is_left_out_and_one_that_fails_is_told(engine, caplog):
    may_end = threading.Event()

    def slow(rollout):
        may_end.wait(20)
        return 1.0

    def broken(rollout):
        raise ConnectionError("the judge is away")

    version = engine.status().version
    evaluation = Evaluation(engine, HELD_OUT, slow, sampling=GREEDY)
    with caplog.at_level(logging.WARNING):
        evaluation.start(3, version)
        assert len(evaluation.running) == 3
        evaluation.start(4, version)
        assert "the evaluation after step 4 is left out: the one after step 3 is still under way" in caplog.text
        assert evaluation.finished() == []
        may_end.set()
        evaluation.wait()
        assert [result.step for result in evaluation.finished()] == [3]
        assert evaluation.finished() == []
        failing = Evaluation(engine, HELD_OUT, broken, sampling=GREEDY)
        failing.start(5, version)
        failing.wait()
        assert "the evaluation after step 5 has failed: ConnectionError: the judge is away" in caplog.text
    assert failing.results == []
    assert not engine.stream.outstanding
    evaluation.close()
    failing.close()


def test_a_run_that_is_given_up_leaves_nothing_in_flight(engine):
    """Also of an evaluation whose answers are long."""
    endless = inflight.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    evaluation = Evaluation(engine, HELD_OUT * 20, token_sum, sampling=endless, every=1)
    train(engine, evaluation, steps=9, stop_after=1)
    assert evaluation.running == []
    assert not engine.stream.outstanding
    [[rollout]] = engine.generate([[1, 2]], GREEDY)
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"examples": []}, "at least one prompt"), ({"examples": HELD_OUT, "every": 0}, "every must be at least 1")],
)
def test_what_cannot_be_evaluated_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(None, **{"score": token_sum} | arguments)  # type: ignore[arg-type]


class Saved:
    """A run that notes how far training has come."""

    def __init__(self):
        self.progress = {}


def test_an_evaluation_that_was_under_way_is_begun_again_by_a_run_that_goes_on(engine):
    model = make_model("qwen3")
    ids = engine.submit(HELD_OUT, GREEDY, train=False)
    run = Saved()
    run.progress["grpo"] = {"step": 4, "evaluating": ids}
    evaluation = Evaluation(engine, HELD_OUT, token_sum, sampling=GREEDY, every=4)
    config = inflight.GRPOConfig(steps=5, groups_per_step=2, sampling=SAMPLING)
    examples = [Example([index, 3], {}) for index in range(9)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
        first = publisher.version
        reports = list(
            inflight.grpo(
                engine, publisher, model, optimizer, examples, token_sum, config, run=run, evaluation=evaluation
            )
        )
    assert [report.step for report in reports] == [5]
    assert [(result.step, result.version) for result in evaluation.results] == [(4, first), (5, first + 1)]
    assert not engine.stream.outstanding
