"""Bounds on what the trainer has not consumed stop prompts from beginning, and nothing else; without them all waits."""

import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_batches import make_group
from made_frames import ends, make_frame, starts
from waiting import wait_until

import inflight
from inflight.core.options import EngineOptions
from inflight.core.rollout import Turn
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.admission import may_begin
from inflight.stream.held_groups import GroupSize
from inflight.stream.reader import StreamReader
from inflight.stream.wire import Held
from inflight.stream.writer import StreamWriter

OPTIONS = {"device": "cpu", "dtype": "float32", "max_sequences": 4, "max_context": 128, "threads": 1}
PARAMS = SamplingParams(n=2, max_tokens=20, seed=3, ignore_eos=True)
COUNT = 40


def settle(engine) -> None:
    """Wait until the engine does nothing any more."""
    deadline, last = time.monotonic() + 120, -1
    while (now := engine.status().num_tokens) != last or engine.status().num_running:
        assert time.monotonic() < deadline
        last = now
        time.sleep(0.4)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("bound", "most"),
    [
        ({"max_unconsumed_tokens": 200}, 200 + 4 * 20),
        ({"max_unconsumed_rollouts": 10}, (10 + 4) * 20),
    ],
)
def test_a_trainer_that_is_behind_keeps_prompts_from_beginning(bound, most):
    """What runs ends; then nothing begins until rollouts are taken, and at last every token is there."""
    with inflight.launch("tiny", **OPTIONS, **bound) as engine:
        ids = engine.submit([[1, i + 1] for i in range(COUNT)], PARAMS)
        wait_until(lambda: engine.stream.num_tokens)
        settle(engine)
        assert engine.status().num_tokens <= most
        assert engine.status().num_waiting > 0
        wait_until(lambda: engine.stream.state == "waits for the trainer")
        seen = []
        for group in engine.stream.groups():
            seen.append(group)
            time.sleep(0.02)
        assert sorted(group[0].group_id for group in seen) == ids
        assert all(len(rollout.token_ids) == 20 for group in seen for rollout in group)


@pytest.mark.medium
def test_a_bound_below_a_batch_does_not_keep_it_from_filling_up():
    with inflight.launch("tiny", **OPTIONS, max_unconsumed_rollouts=1, max_unconsumed_tokens=1) as engine:
        engine.submit([[1, i + 1] for i in range(COUNT)], PARAMS)
        sizes = [len(b.rollouts) for b in engine.stream.batches(rollouts=30, score=lambda r: float(r.token_ids[0]))]
        assert sum(sizes) == 2 * COUNT


@pytest.mark.medium
def test_what_a_trainer_has_no_memory_for_waits_in_the_engine_and_on_its_disk(tmp_path):
    """A trainer that takes nothing holds little, the engine no more than its bound, and every token comes at last."""
    options = {**OPTIONS, "stream_memory_bytes": 20_000, "spill_directory": str(tmp_path)}
    with inflight.launch("tiny", **options) as engine:
        ids = engine.submit([[1, i + 1] for i in range(3 * COUNT)], PARAMS)
        stream = engine.stream
        wait_until(lambda: not (engine.status().num_running or engine.status().num_waiting))
        held = stream.ledger.table.finished_bytes
        assert 20_000 < held < 40_000
        status = engine.status()
        assert status.num_unacknowledged_bytes <= 20_000
        assert status.num_spilled_bytes > 20_000
        groups = list(stream.groups())
        assert sorted(group[0].group_id for group in groups) == ids
        assert all(len(rollout.token_ids) == 20 for group in groups for rollout in group)
        wait_until(lambda: not engine.status().num_spilled_bytes)
        assert stream.ledger.table.finished_bytes == stream.ledger.held_of(None).held_tokens == 0


@pytest.mark.parametrize("bound", [{"max_unconsumed_tokens": 10}, {"max_unconsumed_rollouts": 10}], ids=str)
def test_output_that_an_earlier_trainer_consumed_does_not_hold_the_next_one_back(tmp_path, bound):
    """An engine counts from its start, and each reader from its own."""
    engine = SimpleNamespace(
        options=EngineOptions("tiny", **bound), num_tokens=30, requests=SimpleNamespace(num_ended=20), version=0
    )
    with closing(StreamWriter(f"ipc://{tmp_path}/stream")) as writer:

        def read(reader, count):
            while count:
                writer.flush()
                count -= reader.receive(5) is not None

        for number in range(10):
            writer.send(make_frame(3, number, finishes=ends(0, 1)))
        assert not may_begin(engine, writer)
        with closing(StreamReader(writer.endpoint)) as first:
            read(first, 10)
        wait_until(lambda: (writer.flush(), writer.kept.oldest == 10)[1])
        engine.num_tokens += 3
        writer.send(make_frame(3, 10, finishes=ends(0, 1)))
        with closing(StreamReader(writer.endpoint, held=lambda: Held(awaits_ends=True))) as second:
            read(second, 1)
            wait_until(lambda: (second.receive(0), writer.flush(), writer.trainer.awaits_ends)[2])
            assert may_begin(engine, writer)


def test_the_engine_is_told_what_is_held(wire):
    wire.stream.ledger.expect([0, 1, 2])
    wire.send(make_frame(3, 0, groups=starts(0, 1, 2), finishes=ends(0, 1)))
    deadline = time.monotonic() + 120
    while (held := wire.writer.trainer).held_tokens != 3 or held.held_rollouts != 2:
        assert time.monotonic() < deadline
        wire.writer.flush()
    assert (held.oldest, held.waits) == (5, False)
    taken = wire.stream.collect([1])
    while (held := wire.writer.trainer).held_rollouts != 1:
        assert time.monotonic() < deadline
        wire.writer.flush()
    assert (held.held_tokens, held.oldest) == (2, 5)
    assert len(taken) == 1


def test_the_oldest_version_is_of_a_drawn_token():
    """Branches of episodes begin with given tokens, which have the version 0."""
    rollout = make_group(np.random.default_rng(0), 0, 1, 3)[0]
    tokens = np.arange(4, dtype=np.int32)
    turns = (Turn(0, 2, drawn=False), Turn(2, 4, drawn=True))
    given = replace(rollout, token_ids=tokens, weight_versions=np.array([0, 0, 9, 7]), turns=turns)
    assert GroupSize.of([given, replace(given, weight_versions=np.array([0, 0, 8, 9]))]).oldest == 7
    assert GroupSize.of([replace(given, turns=(Turn(0, 4, drawn=False),))]).oldest is None
