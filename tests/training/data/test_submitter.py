"""Prompts that a run submits itself: all of them once, in order, within the bounds, also while the trainer computes."""

import threading
import time
from contextlib import nullcontext
from itertools import chain, count

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import make_model
from waiting import PATIENCE_S, wait_until

import inflight
from inflight.core.errors import InflightError, InvalidRequestError, ScoreError
from inflight.training.data.examples import Example, plain_example
from inflight.training.data.submitter import Submitter
from inflight.training.grpo import grpo

SAMPLING = inflight.SamplingParams(n=2, max_tokens=5, ignore_eos=True)


def score(rollout):
    return float(rollout.token_ids.sum() % 2)


def prompts_of(batches):
    """The first token of each group's prompt, batch by batch."""
    found = []
    for batch in batches:
        firsts = {rollout.group_id: int(rollout.prompt_token_ids[0]) for rollout in batch.rollouts}
        found.append(list(firsts.values()))
    return found


@pytest.mark.parametrize("ahead", ["auto", 0, 2])
def test_a_stream_that_submits_trains_on_each_prompt_once(engine, ahead):
    prompts = [[index, 3] for index in range(23)]
    found = prompts_of(engine.stream.batches(rollouts=8, score=score, prompts=prompts, params=SAMPLING, ahead=ahead))
    assert [len(batch) for batch in found] == [4, 4, 4, 4, 4, 3]
    assert sorted(chain(*found)) == list(range(23))
    assert not engine.stream.outstanding
    assert engine.stream.lead.groups == 0


def test_prompts_start_while_the_trainer_computes(engine, monkeypatch):
    submit, threads = engine.submit, []

    def watched(*args, **options):
        threads.append(threading.current_thread().name)
        return submit(*args, **options)

    monkeypatch.setattr(engine, "submit", watched)
    batches = engine.stream.batches(
        rollouts=8, score=score, prompts=([index % 50, 3] for index in count()), params=SAMPLING
    )
    for _ in range(8):
        assert next(batches).num_sequences == 8
        time.sleep(0.2)  # the trainer computes
    batches.close()
    assert "inflight-submitter" in threads
    assert "inflight-submitter" not in {thread.name for thread in threading.enumerate()}
    engine.stream.ledger.drop(engine.stream.outstanding)


@pytest.mark.parametrize("ahead", ["auto", 1])
def test_groups_that_another_caller_discards_are_replaced(engine, ahead):
    batches = engine.stream.batches(
        rollouts=8, score=score, prompts=([index % 50, 3] for index in range(40)), params=SAMPLING, ahead=ahead
    )
    next(batches)
    for _ in range(3):
        engine.abandon(engine.stream.outstanding)
        assert next(batches).num_sequences == 8
    batches.close()
    engine.stream.ledger.drop(engine.stream.outstanding)


def test_a_stopped_stream_continues_with_the_groups_in_flight(engine):
    prompts = iter([[index, 3] for index in range(12)])
    first = engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING, ahead=1)
    [begin] = prompts_of([next(first)])
    first.close()
    rest = prompts_of(engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING, ahead=1))
    assert sorted([*begin, *chain(*rest)]) == list(range(12))


@pytest.mark.parametrize("ahead", ["auto", 1])
def test_prompts_that_do_not_fit_are_skipped_and_counted(engine, ahead):
    before = engine.stream.dropped.num_unfit_examples
    prompts = [[index, 3] if index % 3 else [3] * 100 for index in range(1, 10)]
    found = prompts_of(engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING, ahead=ahead))
    assert sorted(chain(*found)) == [1, 2, 4, 5, 7, 8]
    assert engine.stream.dropped.num_unfit_examples - before == 3
    with pytest.raises(InvalidRequestError, match="prompt 0"):
        next(engine.stream.batches(rollouts=4, score=score, prompts=[[3] * 100], params=SAMPLING, ahead=ahead))


@pytest.mark.parametrize("ahead", ["auto", 1])
def test_an_error_of_the_prompts_reaches_the_trainer(engine, ahead):
    def prompts():
        yield from ([index, 3] for index in range(7))
        raise RuntimeError("the dataset is broken")

    batches = engine.stream.batches(rollouts=4, score=score, prompts=prompts(), params=SAMPLING, ahead=ahead)
    with pytest.raises(RuntimeError, match="the dataset is broken"):
        list(batches)
    engine.stream.ledger.drop(engine.stream.outstanding)


def test_prompts_without_end_of_which_none_can_be_trained_on_come_to_an_end(engine):
    prompts = ([index % 50, 3] for index in count())
    batches = engine.stream.batches(rollouts=4, score=lambda rollout: None, prompts=prompts, params=SAMPLING)
    with pytest.raises(InflightError, match="3 groups failed while one batch of 2 was taken"):
        next(batches)
    batches = engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING)
    assert next(batches) is not None
    batches.close()
    engine.stream.ledger.drop(engine.stream.outstanding)


def test_an_error_of_a_submission_in_the_background_reaches_the_trainer(engine, monkeypatch):
    submit, begun = engine.submit, threading.Event()

    def failing(*args, **options):
        if threading.current_thread().name == "inflight-submitter":
            begun.set()
            raise OSError("no route to the engine")
        return submit(*args, **options)

    monkeypatch.setattr(engine, "submit", failing)
    batches = engine.stream.batches(
        rollouts=4, score=score, prompts=([index % 50, 3] for index in count()), params=SAMPLING
    )
    slow = (begun.wait(0.3) for _ in batches)
    with pytest.raises(OSError, match="no route to the engine"):
        list(slow)
    engine.stream.ledger.drop(engine.stream.outstanding)


@pytest.mark.parametrize("ahead", [-1, "soon"])
def test_other_values_of_ahead_are_named(engine, ahead):
    with pytest.raises(ValueError, match="ahead must be"):
        next(engine.stream.batches(rollouts=4, score=score, prompts=[], ahead=ahead))
    with pytest.raises(ValueError, match="ahead must be"):
        inflight.GRPOConfig(ahead=ahead)


def test_greedy_prompts_are_refused_as_in_the_config(engine):
    for begin in (
        lambda params: next(engine.stream.batches(rollouts=4, score=score, prompts=[[1, 3]], params=params)),
        lambda params: inflight.GRPOConfig(sampling=params),
    ):
        with pytest.raises(ValueError, match=r"\.temperature is 0, which always takes the likeliest token"):
            begin(inflight.SamplingParams(n=2, temperature=0))


def test_greedy_groups_of_another_caller_do_not_hold_back_the_prompts(engine):
    greedy = engine.submit([[index, 3] for index in range(9)], inflight.SamplingParams(max_tokens=5, temperature=0))
    prompts = [[index, 3] for index in range(8)]
    found = prompts_of(engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING))
    assert sorted(chain(*found)) == list(range(8))
    assert len(engine.stream.collect(greedy)) == 9  # They are reserved for a caller that names them.


@pytest.mark.parametrize("most", [2, 5])
def test_groups_in_flight_bounds_the_controller(engine, most):
    model = make_model("qwen3")
    config = inflight.GRPOConfig(steps=8, groups_per_step=2, groups_in_flight=most, sampling=SAMPLING)
    optimizer, largest = torch.optim.SGD(model.parameters(), lr=0.1), 0
    submit = engine.submit

    def counted(*args, **options):
        nonlocal largest
        ids = submit(*args, **options)
        largest = max(largest, len(engine.stream.outstanding))
        return ids

    engine.submit = counted
    try:
        with engine.publisher(model) as publisher:
            examples = (Example([index % 50, 3], {}) for index in count())
            reports = list(grpo(engine, publisher, model, optimizer, examples, score, config))
    finally:
        del engine.submit
    assert 2 <= largest <= most
    assert len(reports) == 8
    assert {"lead/groups", "lead/wait_share"} <= set(reports[-1].as_dict())
    assert any("staleness/age_over_bound" in report.as_dict() for report in reports)
    assert not engine.stream.outstanding


def test_a_paused_submitter_submits_nothing(engine):
    submitter = Submitter(engine, iter([[index, 3] for index in range(40)]), SAMPLING, 4, ahead="auto")

    def wait_for(num_submitted):
        wait_until(lambda: submitter.num_submitted >= num_submitted)
        return submitter.num_submitted

    with submitter.in_background():
        submitter.ask()
        assert submitter.num_submitted == 4
        with submitter.paused():
            for group_id in sorted(submitter.in_flight):  # without the pause, others would start now
                submitter.took(group_id, 4)
            time.sleep(0.2)
            assert submitter.num_submitted == 4
        assert wait_for(8) == 8
    engine.stream.ledger.drop(engine.stream.outstanding)


def test_the_state_of_examples_is_read_without_the_lock_and_the_buffer_with_it(engine):
    class Stateful(list):
        def observe(self, group): ...

        def state_dict(self):
            thread = threading.Thread(target=submitter.begin)
            thread.start()
            thread.join(20)
            return {"free": not thread.is_alive()}

    submitter, found = Submitter(engine, Stateful([[1, 3]]), SAMPLING, 4, ahead=1), []
    submitter.examples.read(1)
    record = submitter.submitted
    assert record.examples == {"free": True}
    assert record.unsubmitted == [Example([1, 3], {})]
    thread = threading.Thread(target=lambda: found.append(submitter.unsubmitted))
    with submitter._changed:
        thread.start()
        thread.join(0.2)
        assert not found
    thread.join(PATIENCE_S)
    assert found == [[[1, 3]]]


def test_prompts_start_in_the_background_once_arguments_are_checked_and_groups_are_scored(engine, monkeypatch):
    score_with, begun = engine.stream.scoring.score_with, []
    monkeypatch.setattr(engine.stream.scoring, "score_with", lambda score: begun.append("score") or score_with(score))
    monkeypatch.setattr(Submitter, "in_background", lambda submitter: begun.append("background") or nullcontext())

    def batches(**options):
        return engine.stream.batches(score=score, prompts=[[1, 3]], params=SAMPLING, **options)

    with pytest.raises(ValueError, match="unknown advantages"):
        next(batches(rollouts=2, advantages="none"))
    with pytest.raises(ValueError, match="rollouts must be at least 1"):
        next(batches(rollouts=0))
    assert begun == []
    assert len(list(batches(rollouts=2))) == 1
    assert begun == ["score", "background"]


@pytest.mark.parametrize("ahead", ["auto", 1])
@pytest.mark.parametrize("interrupt", ["close", "score", "submission"])
def test_an_interrupted_stream_loses_and_repeats_no_prompt_of_its_iterator(engine, monkeypatch, ahead, interrupt):
    submit, fails = engine.submit, [False]

    def failing(*args, **options):
        if fails[0]:
            fails[0] = False
            raise OSError("no route to the engine")
        return submit(*args, **options)

    def raising(rollout):
        raise KeyError("answer")

    monkeypatch.setattr(engine, "submit", failing)
    prompts, found = iter([[index, 3] for index in range(23)]), []

    def batches(score=score):
        return engine.stream.batches(rollouts=8, score=score, prompts=prompts, params=SAMPLING, ahead=ahead)

    for _ in range(2):
        interrupted = batches()
        found += prompts_of([next(interrupted)])
        if interrupt == "submission":
            fails[0] = True
            with pytest.raises(OSError, match="no route"):
                found += prompts_of(interrupted)
        interrupted.close()
        if interrupt == "score":
            with pytest.raises(ScoreError, match="KeyError"):
                list(batches(raising))
    found += prompts_of(batches())
    assert sorted(chain(*found)) == list(range(23))
    assert not engine.stream.outstanding


def test_prompts_that_were_read_wait_for_their_own_iterator(engine):
    def batches(prompts):
        return engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING)

    first, second = (iter([[index, 3] for index in numbers]) for numbers in (range(12), range(20, 26)))
    stopped = batches(first)
    found = prompts_of([next(stopped)])
    stopped.close()
    with pytest.raises(ValueError, match="unknown advantages"):
        next(engine.stream.batches(rollouts=4, score=score, prompts=first, params=SAMPLING, advantages="none"))
    of_second = prompts_of(batches(second))
    assert set(range(20, 26)) <= set(chain(*of_second))  # and groups of the first, which were in flight
    found += of_second + prompts_of(batches(first))
    assert sorted(chain(*found)) == [*range(12), *range(20, 26)]


@pytest.mark.parametrize("ahead", ["auto", 1])
def test_a_list_of_prompts_begins_again_with_each_call(engine, ahead):
    prompts = [[index, 3] for index in range(6)]
    for _ in range(2):
        stopped = engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING, ahead=ahead)
        next(stopped)
        stopped.close()
        engine.stream.ledger.drop(engine.stream.outstanding)
    found = prompts_of(engine.stream.batches(rollouts=4, score=score, prompts=prompts, params=SAMPLING, ahead=ahead))
    assert sorted(chain(*found)) == list(range(6))


def test_a_prompt_that_the_engine_refuses_is_not_submitted_again(engine):
    prompts = iter([[3] * 100, [1, 3], [2, 3], [4, 3]])
    with pytest.raises(InvalidRequestError, match="prompt 0"):
        next(engine.stream.batches(rollouts=2, score=score, prompts=prompts, params=SAMPLING, ahead="auto"))
    found = prompts_of(engine.stream.batches(rollouts=2, score=score, prompts=prompts, params=SAMPLING))
    assert found == [[1], [2], [4]]


def test_examples_of_taken_groups_are_not_kept_without_a_run(engine):
    submitter = Submitter(engine, ([i % 50, 3] for i in count()), SAMPLING, 2, ahead=0)
    for _ in range(3):
        submitter.fill()
        assert len(submitter._examples) == 2
        for group in engine.stream.groups():
            submitter.took(group[0].group_id, 1)
        submitter.begin()
        assert not submitter._examples


@pytest.mark.parametrize("prompt", [np.array([10, 3]), list(np.array([10, 3])), torch.tensor([10, 3]), [10, 3]])
def test_token_ids_of_any_kind_can_be_saved(prompt):
    assert msgspec.json.decode(msgspec.json.encode(plain_example(prompt))) == [[10, 3], {}]
