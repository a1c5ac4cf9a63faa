"""What a recorder writes of what it was told, exactly; and that nothing which happens to it ends the run."""

import logging
import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_batches import make_batch, make_rollouts
from made_frames import make_frame
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import EngineDiedError, InflightError
from inflight.core.frames import Swap
from inflight.core.messages import Status
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.core.spans import span
from inflight.observability.event_file import EventFile
from inflight.observability.events import (
    LOG_RATIO_EDGES,
    Began,
    Consumed,
    Ended,
    Engine,
    RunError,
    Samples,
    Step,
    Swapped,
    Version,
    read_events,
)
from inflight.observability.staleness_meter import StalenessMeter
from inflight.training import recording
from inflight.training.config import GRPOConfig
from inflight.training.data.scored_groups import ScoredGroups, measure_consumed, measure_taken
from inflight.training.data.staleness_filter import StalenessRule
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.surrogates import ppo_clip
from inflight.training.recording import RunRecorder, _percentiles, _texts

MS = 1_000_000
COUNTS = {field: 0 for field in Status.__struct_fields__ if field.startswith(("num_", "kv_"))}


class MadeEngine:
    """An engine of which only its counters are known."""

    def __init__(self):
        self.options = SimpleNamespace(model="tiny")
        self.info = SimpleNamespace(max_sequences=8)
        self.staleness = StalenessMeter()
        self.stream = SimpleNamespace(
            state="generating",
            outstanding=[3, 4],
            observers=[],
            episodes=[],
            texts=SimpleNamespace(of_tokens=lambda ids: [f"<{token}>" for token in ids]),
        )
        self.seconds: dict[str, float] = {}
        self.error: Exception | None = None

    def status(self) -> Status:
        if self.error:
            raise self.error
        counts = {**COUNTS, "num_running": 5, "num_waiting": 2, "kv_blocks_used": 3, "kv_blocks": 4, "bad_messages": 0}
        flags = {"paused": False, "asleep": False}
        return Status(**counts, **flags, version=7, step=0, versions=[], seconds_by_state=self.seconds)


@pytest.fixture
def recorded(tmp_path):
    """An engine, its recorder, and what closes the recorder and gives its events by kind."""
    engine = MadeEngine()
    recorder = RunRecorder(engine, tmp_path / "run", title="a run")

    def events(kind):
        recorder.close()
        return [event for event in read_events(tmp_path / "run") if isinstance(event, kind)]

    yield engine, recorder, events
    recorder.close()


def made_batch_of(engine):
    batch = make_batch()
    batch.observers = engine.stream.observers
    return batch


def test_a_run_begins_with_its_name_and_ends(recorded):
    _, _, events = recorded
    first, *_, last = events(object)
    assert isinstance(first, Began)
    assert (first.title, first.model, first.max_sequences, first.pid) == ("a run", "tiny", 8, os.getpid())
    assert isinstance(last, Ended)


def test_options_are_recorded_as_text_under_flat_names(tmp_path):
    engine = MadeEngine()
    engine.options = EngineOptions(model="tiny", max_sequences=8)
    config = {"grpo": GRPOConfig(steps=7, sampling=SamplingParams(n=4)), "where": Path("/a"), "reward": len}
    with RunRecorder(engine, tmp_path, config=config):
        pass
    began = next(iter(read_events(tmp_path)))
    assert isinstance(began, Began)
    expected = {"engine.max_sequences": "8", "grpo.steps": "7", "grpo.sampling.n": "4", "where": "/a"}
    assert expected.items() <= began.config.items()
    assert began.config["reward"] == "len"


def scaled(factor: float, seed: int, judge: object = None):
    return lambda rollout: factor + seed + len(str(judge))


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (inflight.turn_advantages, ("rloo", "grpo")),
        (lambda discount: inflight.turn_advantages(discount=discount), (1.0, 0.5)),
        (inflight.pass_at_k_advantages, (2, 8)),
        (inflight.tree_advantages, ("rloo", "treerl")),
        (inflight.policy_advantages, ("rloo", "grpo")),
        (inflight.gdpo_advantages, ({"a": 1.0}, {"a": 2.0})),
        (lambda high: partial(ppo_clip, high=high), (0.2, 0.28)),
        (lambda high: inflight.Objective(surrogate=partial(ppo_clip, high=high)), (0.2, 0.28)),
        (lambda factor: scaled(factor, seed=0), (1.0, 2.0)),
    ],
)
def test_functions_with_other_arguments_have_other_texts(make, values):
    texts = [_texts({"option": make(value)}) for value in values]
    assert texts[0] != texts[1]
    assert texts == [_texts({"option": make(value)}) for value in values]  # other objects at other addresses
    assert "0x" not in str(texts)


def test_seeds_addresses_and_captured_objects_are_no_part_of_a_text():
    judges = [object(), threading.Event()]
    functions = [scaled(2.0, seed=seed, judge=judge) for seed, judge in enumerate(judges)]
    assert len({str(_texts(function)) for function in functions}) == 1
    assert _texts({"judge": partial(scaled, 2.0, seed=3)}) == {"judge": "scaled(0=2.0)"}
    assert _texts({"judge": judges[0]}) == {"judge": "<object object>"}


def test_a_function_that_refers_to_itself_has_a_text():
    def again(count: int) -> int:
        return again(count - 1) if count else 0

    assert "again" in _texts({"option": again})["option"]


def test_measures_and_the_life_of_versions_are_what_the_meter_was_told(recorded):
    engine, _, events = recorded
    meter = engine.staleness
    meter.restore([(0, 0), (4, 50 * MS)])
    meter.published(5, 100 * MS)
    meter.frame(make_frame(0, swap=Swap(5, 100 * MS, 2 * MS, 1)))
    meter.frame(make_frame(6, time_ns=112 * MS))  # of version 5
    meter.listener.taken(np.array([5, 5, 5, 4]), np.array([5, 4]))
    meter.consume(np.array([5, 4]), np.array([112, 104]) * MS, consumed_ns=200 * MS, trainer_version=5)
    [swapped] = events(Swapped)
    assert (swapped.version, swapped.swap_ms, swapped.stall_ms) == (5, 12.0, 2.0)
    [consumed] = events(Consumed)
    assert consumed.num_tokens == 2
    assert consumed.measures["token_age_ms"] == pytest.approx([88.8, 92, 95.2, 95.92])
    assert consumed.measures["weight_lag_ms"][1] == 2
    assert consumed.measures["version_lag"][3] == pytest.approx(0.99)

    lives = {event.version: event for event in events(Version)}
    assert (lives[5].drawn, lives[5].trained, lives[5].dropped) == (6, 1, 2)
    assert (lives[4].drawn, lives[4].trained, lives[4].dropped) == (0, 1, 0)
    assert lives[5].published is not None
    assert lives[4].published is None


def test_a_step_has_its_numbers_and_the_time_of_this_threads_spans(recorded):
    _, recorder, events = recorded
    with span("forward"):
        pass
    recorder.log(1, {"reward": 0.5, "loss": float("nan")})
    recorder.log(2, {"reward": 1.0})
    first, second = events(Step)
    assert (first.step, first.numbers) == (1, {"reward": 0.5})
    assert first.seconds is not None  # since the recorder was opened
    assert list(first.spans) == ["forward"]
    assert second.spans == {}
    assert second.seconds is not None


def test_ratios_are_counted_by_cause(recorded):
    engine, recorder, events = recorded
    batch = made_batch_of(engine)
    model = make_model("qwen3")
    policy_loss(model, batch)  # of a trainer whose version is not known
    recorder.log(1, {})
    batch.trainer_version = 3
    _, stats = policy_loss(model, batch)
    recorder.log(2, {})
    recorder.log(3, {})
    unknown, known, nothing = events(Step)
    assert (sum(known.mismatch), sum(known.stale)) == (stats.mismatch.num_tokens, stats.stale.num_tokens)
    assert min(stats.mismatch.num_tokens, stats.stale.num_tokens) > 0
    assert unknown.mismatch == unknown.stale == nothing.mismatch == nothing.stale == []


def test_log_ratios_lie_in_the_bins_that_are_documented(recorded):
    _, recorder, events = recorded
    batch = make_batch()
    batch.trainer_version = 0  # no version is older
    rows = batch.drawn[:5]
    recorder._observe(batch, rows, torch.tensor([-7.0, -1.99, 0.05, 1.95, 2.5]))
    recorder.log(1, {})
    [step] = events(Step)
    assert [index for index, count in enumerate(step.mismatch) if count] == [0, 1, 21, 40, 41]
    assert LOG_RATIO_EDGES[20] == 0


def test_rollouts_show_their_own_ratios_also_in_micro_batches(recorded):
    engine, recorder, events = recorded
    batch = made_batch_of(engine)
    batch.trainer_version = 3
    model = make_model("qwen3")
    parts = batch.micro_batches(60)
    assert len(parts) > 1
    for part in parts:
        recorder._shown._chosen_s = 0.0
        policy_loss(model, part)
        policy_loss(model, part)  # one sample in five seconds is enough
    with torch.no_grad():
        logs = (token_logprobs(model, batch) - batch.behavior_logprobs[batch.drawn]).tolist()
    expected = {}
    for rollout in batch.rollouts:
        length = len(rollout.token_ids)
        expected[tuple(f"<{token}>" for token in rollout.token_ids)] = (rollout, logs[:length])
        del logs[:length]
    found = events(Samples)
    assert [event.trainer_version for event in found] == [3] * len(parts)
    for shown in (one for event in found for one in event.rollouts):
        rollout, ratios = expected[tuple(shown.tokens)]
        assert shown.log_ratios == pytest.approx(ratios, rel=1e-3, abs=1e-4)
        assert shown.versions == rollout.weight_versions.tolist()
        assert shown.num_tokens == len(rollout.token_ids)


@pytest.mark.parametrize(("unit", "action"), [("token", "mask"), ("rollout", "reject")])
def test_tokens_are_trained_on_or_left_out_and_nothing_else(recorded, unit, action):
    """Also while the batch is under way, and also those that a rule masks."""
    engine, recorder, events = recorded
    rollouts = make_rollouts(4)
    for rollout in rollouts:
        rollout.reward = float(rollout.sample)
    scored = ScoredGroups(groups=[rollouts[:2]], replaced=[rollouts[2:]])
    rule = StalenessRule(max_version_lag=2, unit=unit, action=action)
    batch = scored.pack(trainer_version=4, staleness=[rule])
    measure_taken(engine.staleness, scored, batch)
    versions = Counter(np.concatenate([rollout.weight_versions for rollout in rollouts]).tolist())
    trained = Counter() if batch is None else Counter(batch.weight_versions[batch.loss_mask & batch.included].tolist())
    assert {version: life.dropped for version, life in recorder._writer.lives.items()} == {
        version: count - trained[version] for version, count in versions.items()
    }
    if batch is not None:
        measure_consumed(engine.staleness, batch)
    lives = {event.version: event for event in events(Version)}
    assert {version: life.trained for version, life in lives.items()} == {v: trained[v] for v in versions}
    assert {version: life.trained + life.dropped for version, life in lives.items()} == versions
    assert sum(life.dropped for life in lives.values()) > len(np.concatenate([r.token_ids for r in rollouts[2:]]))


def test_the_engine_is_asked_once_in_a_while_and_its_time_is_shared_out(monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "_WRITE_EVERY_S", 0.01)
    engine = MadeEngine()
    engine.seconds = {"generating": 3.0, "idle": 1.0}
    with RunRecorder(engine, tmp_path) as recorder:
        wait_until(lambda: any(isinstance(event, Engine) for event in read_events(tmp_path)))
        engine.error = EngineDiedError("it has ended")
        wait_until(lambda: {"silent": 1.0} in [e.states for e in read_events(tmp_path) if isinstance(e, Engine)])
        recorder.log(1, {"reward": 1.0})
    first = next(event for event in read_events(tmp_path) if isinstance(event, Engine))
    assert first.states == {"generating": 0.75, "idle": 0.25}
    assert (first.version, first.num_running, first.num_waiting, first.num_outstanding) == (7, 5, 2, 2)
    assert first.kv_used == 0.75
    assert [event.step for event in read_events(tmp_path) if isinstance(event, Step)] == [1]


def test_one_recorder_at_a_time(recorded, tmp_path):
    engine, recorder, _ = recorded
    with pytest.raises(InflightError, match="is being recorded already; close that recorder first"):
        RunRecorder(engine, tmp_path / "other")
    recorder.log(1, {})
    with pytest.raises(InflightError, match="is being recorded already"):
        RunRecorder(engine, tmp_path / "run")
    recorder.close()
    assert any(isinstance(event, Step) for event in read_events(tmp_path / "run"))  # the first one's record is there
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        RunRecorder(engine, tmp_path / "file")
    RunRecorder(engine, tmp_path / "other").close()


def test_a_recorder_that_cannot_go_on_leaves_nothing_open(recorded, tmp_path, monkeypatch):
    engine, recorder, _ = recorded
    recorder.close()

    def fail(directory):
        raise RunError(f"{directory} is no run")

    before = threading.active_count()
    monkeypatch.setattr(recording, "_lives_of", fail)
    with pytest.raises(RunError, match="is no run"):
        RunRecorder(engine, tmp_path / "run", resumed_after_step=1)
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(tmp_path / "run" / "events.jsonl") not in opened
    assert threading.active_count() == before
    RunRecorder(engine, tmp_path / "other").close()


def test_log_ratios_that_are_not_finite_are_left_out(recorded):
    engine, recorder, events = recorded
    batch = make_batch()
    batch.trainer_version = 0
    [observer] = engine.stream.observers
    observer(batch, batch.drawn[:4], torch.tensor([float("nan"), float("inf"), -float("inf"), 0.05]))
    recorder.log(1, {})
    [step] = events(Step)
    assert [index for index, count in enumerate(step.mismatch) if count] == [21]


def test_what_fails_in_the_recorder_ends_its_listening_and_not_the_run(recorded, monkeypatch, caplog):
    engine, recorder, events = recorded
    monkeypatch.setattr(recording, "_counts", lambda versions: 1 / 0)
    engine.staleness.listener.taken(np.array([1]), np.array([1]))
    assert engine.staleness.listener is None
    assert engine.stream.observers == []
    assert caplog.text.count("ZeroDivisionError") == 1
    recorder.log(1, {"reward": 1.0})
    assert [event.step for event in events(Step)] == [1]


def test_batch_rows_of_a_pool_are_those_of_its_engines(tmp_path):
    pool = MadeEngine()
    pool.members = [MadeEngine(), MadeEngine()]
    with RunRecorder(pool, tmp_path):
        pass
    assert next(read_events(tmp_path)).max_sequences == 16


def test_a_run_that_goes_on_keeps_its_events(tmp_path):
    with RunRecorder(MadeEngine(), tmp_path) as recorder:
        recorder.log(1, {"reward": 0.5})
    with RunRecorder(MadeEngine(), tmp_path, resumed_after_step=1) as recorder:
        recorder.log(2, {"reward": 0.75})
    events = list(read_events(tmp_path))
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2]
    assert [event.resumed_after_step for event in events if isinstance(event, Began)] == [0, 1]


def test_a_run_that_goes_on_counts_on_but_for_what_is_published_anew(tmp_path):
    for resumed in (None, 1):
        engine = MadeEngine()
        with RunRecorder(engine, tmp_path, resumed_after_step=resumed):
            engine.staleness.published(5, 0)
            engine.staleness.frame(make_frame(6))  # of version 5
            engine.staleness.listener.taken(np.array([0, 0, 5]), np.array([0]))
    lives = {event.version: event for event in read_events(tmp_path) if isinstance(event, Version)}
    assert (lives[0].drawn, lives[0].dropped) == (0, 2)
    assert (lives[5].drawn, lives[5].dropped) == (6, 1)


def test_an_engine_that_does_not_answer_does_not_hold_up_the_record(monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "_WRITE_EVERY_S", 0.01)
    monkeypatch.setattr(recording, "_ASK_S", 0.01)
    engine, asked, answer = MadeEngine(), threading.Event(), threading.Event()

    def status():
        asked.set()
        answer.wait(10)
        raise EngineDiedError("it has ended")

    engine.status = status
    with RunRecorder(engine, tmp_path) as recorder:
        assert asked.wait(10)
        recorder.log(1, {"reward": 1.0})
        wait_until(lambda: any(isinstance(event, Step) for event in read_events(tmp_path)))
    assert isinstance(list(read_events(tmp_path))[-1], Ended)
    answer.set()
    recorder._watcher.thread.join(10)


def test_a_full_disk_ends_the_record_and_not_the_run(monkeypatch, tmp_path, caplog):
    def fail(self, events):
        raise RunError("cannot write events.jsonl: No space left on device")

    monkeypatch.setattr(EventFile, "append", fail)
    monkeypatch.setattr(recording, "_WRITE_EVERY_S", 0.01)
    monkeypatch.setattr(recording, "_WAITING_EVENTS", 3)
    with caplog.at_level(logging.WARNING), RunRecorder(MadeEngine(), tmp_path) as recorder:
        wait_until(lambda: not recorder._writer.thread.is_alive())
        for step in range(10):
            recorder.log(step, {})
        assert len(recorder._writer.waiting) <= 3
    assert "the run goes on without a record: cannot write events.jsonl: No space left" in caplog.text


@pytest.mark.parametrize("count", [1, 2, 3, 10, 11, 2048])
def test_percentiles_are_those_of_numpy(count):
    columns = [np.random.default_rng(count).lognormal(5, 2, count), np.arange(count) // 3]
    expected = np.percentile(np.stack(columns), (10, 50, 90, 99), axis=1).T
    np.testing.assert_allclose(_percentiles(columns), expected, rtol=1e-12)
