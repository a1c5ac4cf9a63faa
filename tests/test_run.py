"""A run that was saved goes on in another process as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from closest_draw import FAR, closest_draw
from made_batches import make_rollouts
from transformers import Qwen3ForCausalLM
from truth_teller import make_truth_teller, teach
from waiting import PATIENCE_S, wait_until

import inflight
from inflight.core.clock import now_ns
from inflight.core.errors import (
    InflightError,
    InvalidRequestError,
    LayoutMismatchError,
    RankLostError,
    RunFileError,
)
from inflight.core.messages import Ids, Prompt
from inflight.core.rollout import Turn
from inflight.core.sampling import SamplingParams
from inflight.run import _Clock, _describe, _EngineState, _File, _read, _saved_groups, _write
from inflight.stream.assignments import OF_CLIENT
from inflight.stream.held_groups import SavedGroup
from inflight.stream.ledger import Ledger
from inflight.stream.rollout_codec import arrays_of, header_of

OPTIONS = {"device": "cpu", "dtype": "float32", "max_sequences": 6, "max_context": 256, "threads": 1}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6], [5, 3, 5], [8, 9, 7, 9, 3], [2, 3], [8, 4, 6, 2]]
PARAMS = SamplingParams(n=3, seed=13, ignore_eos=True, return_entropy=True)
LENGTHS = [60, 190, 200, 170, 210, 180, 220]  # two prompts run at a time, and no two of these end with the same pass


def by_sample(groups) -> dict[tuple[int, int], inflight.Rollout]:
    return {(r.group_id, r.sample): r for group in groups for r in group}


def submit_all(engine) -> None:
    for prompt, max_tokens in zip(PROMPTS, LENGTHS, strict=True):
        engine.submit([prompt], msgspec.structs.replace(PARAMS, max_tokens=max_tokens))


def wait_for_tokens(engine, count: int) -> None:
    wait_until(lambda: engine.stream.num_tokens >= count)


@pytest.fixture(scope="module")
def undisturbed(decided_dir):
    with inflight.launch(decided_dir, **OPTIONS) as engine:
        submit_all(engine)
        rollouts = by_sample(engine.stream.groups())
    assert closest_draw(decided_dir, rollouts.values(), PARAMS.seed) > FAR
    return rollouts


@pytest.fixture
def model(decided_dir):
    """The weights that the engines begin with."""
    return Qwen3ForCausalLM.from_pretrained(decided_dir)


@pytest.mark.medium
def test_nothing_is_lost_or_drawn_again(decided_dir, undisturbed, model, tmp_path):
    with inflight.launch(decided_dir, **OPTIONS) as engine, engine.publisher(model) as publisher:
        assert publisher.publish() == 1  # the same weights again
        engine.wait_for_version(1)
        submit_all(engine)
        consumed = by_sample([next(engine.stream.groups())])
        wait_for_tokens(engine, 450)
        run = inflight.Run(engine, publisher)
        run.progress = {"step": 3, "names": ["a"]}
        run.save(tmp_path / "saved")
        random_numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        saved_ns = now_ns()
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o700
    assert [(p.name, p.stat().st_mode & 0o777) for p in (tmp_path / "saved").iterdir()] == [("run.inflight", 0o600)]
    header, arrays, random_arrays = _read(tmp_path / "saved" / "run.inflight")
    assert header.engine is not None
    partial = {plain.request_id: of_one for plain, of_one in zip(header.rollouts, arrays, strict=True)}
    drawn = {request_id: len(of_one["token_ids"]) for request_id, of_one in partial.items()}
    under_way = {request_id for request_id, count in drawn.items() if 0 < count < LENGTHS[request_id // 3]}
    assert under_way, drawn

    with inflight.launch(decided_dir, **OPTIONS) as engine, engine.publisher(model) as publisher:
        run = inflight.Run(engine, publisher)
        run.load(tmp_path / "saved")
        assert run.progress == {"step": 3, "names": ["a"]}
        assert publisher.version == engine.status().version == engine.staleness.trainer_version == 1
        assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == random_numbers
        [later] = engine.submit([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert later == len(PROMPTS)
        with pytest.raises(RunFileError, match="submitted already"):
            run.load(tmp_path / "saved")
        rest = by_sample(engine.stream.groups())
        assert publisher.publish() == 2
        with pytest.raises(RunFileError, match="version 2 was published already, and the run goes on from 1"):
            run.load(tmp_path / "saved")
        other = msgspec.structs.replace(header.engine, fingerprint="another")
        _write(tmp_path / "run.inflight", msgspec.structs.replace(header, engine=other), [*arrays, random_arrays])
        with pytest.raises(LayoutMismatchError, match="other tensors"):
            run.load(tmp_path)

    assert rest.pop((later, 0)).request_id == 3 * len(PROMPTS)
    assert not consumed.keys() & rest.keys()
    assert (consumed | rest).keys() == undisturbed.keys()
    for key, rollout in (consumed | rest).items():
        known = undisturbed[key]
        assert (rollout.finish_reason, rollout.request_id) == ("length", known.request_id)
        assert rollout.token_ids.tolist() == known.token_ids.tolist()
        assert set(rollout.weight_versions.tolist()) == {1}
        np.testing.assert_allclose(rollout.logprobs, known.logprobs, atol=2e-4)
        np.testing.assert_allclose(rollout.columns["entropies"], known.columns["entropies"], atol=2e-4)
        assert (np.diff(rollout.sampled_at_ns) >= 0).all()
        assert rollout.params == known.params
        if key in rest:  # what had come before is what comes now
            if rollout.request_id not in partial:  # It had not started.
                assert rollout.sampled_at_ns[0] > saved_ns
                continue
            for name in ("token_ids", "logprobs", "weight_versions", "sampled_at_ns"):
                before = partial[rollout.request_id][name]
                np.testing.assert_array_equal(getattr(rollout, name)[: len(before)], before)


@pytest.mark.slow
def test_groups_that_wait_to_be_taken_are_kept_in_their_order(decided_dir, model, tmp_path):
    params = SamplingParams(n=2, max_tokens=4, seed=1, ignore_eos=True)
    with inflight.launch(decided_dir, **OPTIONS) as engine, engine.publisher(model) as publisher:
        engine.submit(PROMPTS[:2], params, metadata=[{"answer": 1}, {"answer": [2]}])
        [held_out] = engine.submit([PROMPTS[2]], params, train=False)
        wait_until(lambda: engine.stream.ledger.held_of(None).held_rollouts == 3 * 2)
        inflight.Run(engine, publisher).save(tmp_path)
        expected = by_sample(engine.stream.groups())
    with inflight.launch(decided_dir, **OPTIONS) as engine, engine.publisher(model) as publisher:
        inflight.Run(engine, publisher).load(tmp_path)
        assert engine.status().num_tokens == 0  # nothing is left to draw
        inflight.Run(engine, publisher).save(tmp_path / "again")
        assert _read(tmp_path / "again" / "run.inflight")[0].engine == _read(tmp_path / "run.inflight")[0].engine
        [batch] = engine.stream.batches(rollouts=4, score=lambda rollout: float(rollout.sample))
        assert {r.group_id: r.metadata for r in batch.rollouts} == {0: {"answer": 1}, 1: {"answer": [2]}}
        for rollout in batch.rollouts:
            np.testing.assert_array_equal(
                rollout.token_ids, expected[rollout.group_id, rollout.sample].token_ids, strict=True
            )
        [group] = engine.stream.collect([held_out], timeout_s=10)
        assert [len(rollout.token_ids) for rollout in group] == [4, 4]
        assert engine.stream.outstanding == []


@pytest.mark.slow
def test_tokens_keep_their_versions(tmp_path):
    """Tokens proclaim the weights that drew them, before the run was saved and after it was loaded."""
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    before = 0
    with inflight.launch(str(tmp_path), **OPTIONS) as engine, engine.publisher(model) as publisher:
        engine.submit(PROMPTS[:4], SamplingParams(n=2, max_tokens=200, temperature=0.0))
        for version in range(1, 6):
            teach(model, version, before)
            before = publisher.publish()
            publisher.wait_copied()
            wait_for_tokens(engine, 100 * version)
        engine.wait_for_version(5)
        inflight.Run(engine, publisher).save(tmp_path / "run")
        published = engine.staleness.history(5)
    with inflight.launch(str(tmp_path), **OPTIONS) as engine, engine.publisher(model) as publisher:
        inflight.Run(engine, publisher).load(tmp_path / "run")
        assert engine.staleness.history(5) == published
        for version in range(6, 9):
            wait_for_tokens(engine, 100 * (version - 5))
            teach(model, version, before)
            before = publisher.publish()
            publisher.wait_copied()
            assert before == version
        rollouts = by_sample(engine.stream.groups())
    seen = {v for r in rollouts.values() for v in r.weight_versions.tolist()}
    assert len(rollouts) == 8
    assert min(seen) < 5 < max(seen)
    for rollout in rollouts.values():
        assert rollout.finish_reason == "length"
        assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    with pytest.raises(RunFileError, match="no run was saved in"):
        _read(tmp_path / "run.inflight")
    path = tmp_path / "run.inflight"
    _write(path, _File(3, _Clock.read(), {"step": 1}, None), [{"a": np.arange(3)}])
    header, [], arrays = _read(path)
    assert (header.version, header.progress, arrays["a"].tolist()) == (3, {"step": 1}, [0, 1, 2])
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:40], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:]):
        path.write_bytes(broken)
        with pytest.raises(RunFileError, match="damaged"):
            _read(path)
    path.write_bytes(b"something else")
    with pytest.raises(RunFileError, match="no run that this version"):
        _read(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFileError, match="cannot write"):
        _write(tmp_path / "file" / "run.inflight", header, [])
    with pytest.raises(InvalidRequestError, match="JSON-like"):
        _write(path, _File(3, _Clock.read(), {"model": object()}, None), [])
    [rollout] = make_rollouts(1)
    for rollout.metadata, rollout.rewards in (({0: 1}, {}), ({}, {0: 1.0})):
        group = SavedGroup(Ids(0, 0), False, Prompt([1], PARAMS), None, [header_of(rollout)])
        state = _EngineState("", [], [group], Ids(1, 1))
        with pytest.raises(InvalidRequestError, match=r"Expected `str`, got `int` .* JSON-like"):
            _write(path, _File(3, _Clock.read(), {}, state), [arrays_of(rollout)])
    assert path.read_bytes() == b"something else"


def test_progress_with_keys_that_are_not_strings_is_refused(tmp_path):
    run = inflight.Run(SimpleNamespace(rank=1, stream=None), SimpleNamespace(version=0))
    for progress in ({5: 1}, {"a": 1, None: 2}):
        run.progress = progress
        with pytest.raises(InvalidRequestError, match=r"keys of run.progress must be strings, got"):
            run.save(tmp_path)
    run.progress = {"a": {5: 1}}
    run.save(tmp_path)
    assert _read(tmp_path / "run-rank1.inflight")[0].progress == {"a": {5: 1}}


@pytest.mark.parametrize(
    ("given", "named"),
    [((None, 3), "engine is NoneType"), ((SimpleNamespace(rank=0), "p"), "publisher is str")],
)
def test_other_objects_than_an_engine_and_its_publisher_are_refused(given, named):
    with pytest.raises(TypeError, match=named):
        inflight.Run(*given)


@pytest.mark.parametrize(("rank", "adapters"), [(0, ("default",)), (4, ("other", "third"))])
def test_a_group_of_an_adapter_that_the_engine_lacks_is_refused_by_load(tmp_path, rank, adapters):
    ledger = Ledger()
    with ledger.table.lock:
        for adapter in (None, "default"):
            ledger.engines.begin(Prompt([1, 2], PARAMS, adapter=adapter), None)
    ledger.expect([0, 1])
    info = SimpleNamespace(layout=SimpleNamespace(fingerprint=""))
    options = inflight.EngineOptions(model="tiny", lora_rank=rank, adapters=adapters)
    history = SimpleNamespace(history=lambda version: ([], {}), unpublished_steps=0)
    stream = SimpleNamespace(ledger=ledger, sharing=None, outstanding=[])
    engine = SimpleNamespace(rank=0, info=info, options=options, staleness=history, stream=stream)
    publisher = SimpleNamespace(version=0)
    run = inflight.Run(engine, publisher)  # type: ignore[arg-type]
    run.save(tmp_path)
    with pytest.raises(
        RunFileError, match=r"drawn with the adapter 'default', and the engine has (no|'other', 'third')"
    ):
        run.load(tmp_path)


def test_ranks_that_do_not_meet_raise_an_error(monkeypatch):
    engine: Any = SimpleNamespace(rank=0, options=SimpleNamespace(rank_timeout_s=0.5))
    run = inflight.Run(engine, SimpleNamespace(version=0))  # type: ignore[arg-type]
    over = threading.Event()

    def late(check):
        over.wait()

    def lost():
        raise RankLostError("rank 1 has ended")

    monkeypatch.setattr("inflight.run.RankGroup", late)
    with pytest.raises(InflightError, match=r"all ranks call run\.save and run\.load, and one has not within 0\.5 s"):
        run._meet(lambda: None)
    engine.options.rank_timeout_s = PATIENCE_S
    with pytest.raises(RankLostError):
        run._meet(lost)
    over.set()


def test_samples_that_have_to_end_are_in_the_file(tmp_path):
    ledger = Ledger()
    with ledger.table.lock:
        for _ in range(2):
            ledger.engines.begin(Prompt([1], SamplingParams(n=2)), None)
    ledger.expect([0, 1])
    ledger.engines.note_cancelled([], [1, 2])
    engine = SimpleNamespace(
        stream=SimpleNamespace(ledger=ledger),
        staleness=SimpleNamespace(history=lambda version: ([], {})),
        info=SimpleNamespace(layout=SimpleNamespace(fingerprint="")),
    )
    described, arrays = _describe(engine, 1)
    _write(tmp_path / "run.inflight", _File(1, _Clock.read(), {}, described), [*arrays, {}])
    header, arrays, _ = _read(tmp_path / "run.inflight")
    other = Ledger()
    other.engines.restore(_saved_groups(header.engine, arrays, 0), header.engine.next_ids)
    assert [record.cancelled for record in other.engines.unassigned] == [{1}, {2}]


def test_times_are_moved_to_the_clock_of_a_machine_that_was_started_again():
    then = _Clock("a", monotonic_ns=1_000, since_epoch_ns=50_000)
    assert then.shift_to(_Clock("a", 7_000, 90_000)) == 0
    assert then.shift_to(_Clock("b", 300, 51_000)) == -1_700  # a token of 1,000 was drawn 1,000 ns before 300
    assert Turn(0, 2, True, began_ns=5_000, ended_ns=6_000).shifted(-1_700).began_ns == 3_300
    for without_times in (Turn(0, 2, False), Turn(0, 2, True, 1.0)):  # given tokens, and a turn set by a score
        assert without_times.shifted(-1_700) == without_times


@pytest.mark.slow
def test_a_killed_trainer_goes_on_with_the_step_after_its_checkpoint(tmp_path):
    """The demo, killed twice, takes each step once, and ends as it should."""
    options = "--steps 8 --warmup-steps 2 --groups-per-step 4 --group-size 4 --save-every 2 --seed 1 --device cpu"
    command = [sys.executable, "-m", "inflight.tools.cli", "demo"]
    start, resume = [*command, *options.split(), "--out", str(tmp_path)], [*command, "--resume", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    steps, output = tmp_path / "steps.jsonl", tmp_path / "output"

    def lines() -> list[dict]:
        found = [json.loads(line) for line in steps.read_text().splitlines() if line] if steps.exists() else []
        return [line for line in found if "num_tokens" in line]  # the last line is the accuracy

    for killed_after in (3, 5):
        with open(output, "w") as file:
            process = subprocess.Popen(resume if lines() else start, env=environment, stdout=file, stderr=file)
        deadline = time.monotonic() + PATIENCE_S / 2
        while len(lines()) < killed_after:
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    done = subprocess.run(resume, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in lines()] == list(range(1, 9))
    assert (np.diff([line["seconds"] for line in lines()]) > 0).all()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["dropped"]["num_failed_groups"] == 0
    assert [p.name for p in Path(tmp_path).glob("checkpoint-*")] == ["checkpoint-000008"]


def test_requests_of_a_servers_clients_are_not_in_the_file():
    """No client would take them in another process."""
    ledger = Ledger()
    with ledger.table.lock:
        ledger.engines.begin(Prompt([1], SamplingParams(), metadata={OF_CLIENT: True}), None)
        ledger.engines.begin(Prompt([1], SamplingParams()), None)
    ledger.expect([0, 1], reserved=True)
    assert [group.ids.group_id for group in ledger.engines.snapshot()] == [1]
