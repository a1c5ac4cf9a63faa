"""A journal gives a trainer what the live stream gave it."""

import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from made_frames import ends, make_frame, starts
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import inflight
from inflight.core.errors import JournalError, StreamGapError
from inflight.core.rollout import Rollout, SamplingMask
from inflight.engine.model.shapes import shape_config
from inflight.stream import replay as replay_module
from inflight.stream.journal import JournalReader, JournalWriter
from inflight.tools.cli import app

PARAMS = inflight.SamplingParams(
    n=4, max_tokens=24, top_k=40, return_sampling_mask=True, return_entropy=True, top_logprobs=2
)


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def score(rollout: Rollout) -> float:
    return float(rollout.token_ids.sum() % 7)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the directory of a journal, the batches that the live stream gave, all groups of them): of one engine, with
    weights that change while it draws."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    with inflight.launch("tiny", device="cpu", threads=1, max_sequences=16, journal=directory) as engine:
        publisher = engine.publisher(model)
        engine.submit([f"Number {i}: " for i in range(40)], PARAMS, metadata=[{"i": i} for i in range(40)])
        batches = []
        for batch in engine.stream.batches(rollouts=32, score=score):
            batches.append(batch)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01
            publisher.publish()
        [group] = engine.generate([[1, 2, 3]], PARAMS)
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    return directory, batches, {r.request_id: r for r in [*rollouts, *group]}


def assert_same(one: Rollout, other: Rollout) -> None:
    for name in (field.name for field in fields(Rollout) if field.name != "reward"):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, SamplingMask):
            a, b = [a.token_ids, a.offsets], [b.token_ids, b.offsets]
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            a, b = list(a.values()), list(b.values())
        for x, y in zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]:
            np.testing.assert_array_equal(x, y, err_msg=name)


def test_a_replay_gives_the_groups_of_the_live_stream(run):
    directory, _, live = run
    with inflight.replay(directory, model="tiny") as stream:
        groups = list(stream.groups())
        assert [group[0].group_id for group in groups] == stream.group_ids
        assert stream.outstanding == []
    assert len(groups) == 41
    replayed = {rollout.request_id: rollout for group in groups for rollout in group}
    assert replayed.keys() == live.keys()
    assert all([rollout.sample for rollout in group] == [0, 1, 2, 3] for group in groups)
    for request_id, rollout in live.items():
        assert_same(rollout, replayed[request_id])
    versions = np.concatenate([rollout.weight_versions for rollout in replayed.values()])
    assert len(set(versions.tolist())) > 1
    assert {rollout.metadata.get("i") for rollout in replayed.values()} == {None, *range(40)}


def test_batches_of_a_replay_hold_what_those_of_the_live_stream_held(run):
    directory, live, _ = run

    def of(batches):
        """Maps requests to what the trainer gets of them."""
        columns = ("input_ids", "behavior_logprobs", "weight_versions", "advantages", "loss_mask", "position_ids")
        return {
            rollout.request_id: (rollout.reward, *(getattr(batch, name)[begin:end].tolist() for name in columns))
            for batch in batches
            for rollout, begin, end in zip(batch.rollouts, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        }

    def was_trained_on(group):
        """True but for what `generate` drew."""
        return "i" in group[0].metadata

    with inflight.replay(directory, keep=was_trained_on) as stream:
        assert len(stream.group_ids) == len(stream.outstanding) == 40
        replayed = list(stream.batches(rollouts=32, score=score))
    assert of(replayed) == of(live)
    assert [len(batch.rollouts) for batch in replayed] == [len(batch.rollouts) for batch in live]


def test_batches_come_in_the_same_order_however_long_scores_take(run):
    directory, _, _ = run

    def order(seed):
        draw = random.Random(seed)

        def slow_score(rollout):
            time.sleep(draw.random() * 0.01)
            return score(rollout)

        with inflight.replay(directory) as stream:
            batches = list(stream.batches(rollouts=12, score=slow_score))
            ids = [rollout.request_id for batch in batches for rollout in batch.rollouts]
            assert list(dict.fromkeys(r.group_id for batch in batches for r in batch.rollouts)) == stream.group_ids
            return ids, [batch.trainer_version for batch in batches]

    first = order(0)
    assert first == order(1)
    assert first[1] == sorted(first[1])
    assert first[1][-1] > 0


def test_a_group_that_cannot_be_scored_is_scored_again_in_its_turn(run):
    directory, _, _ = run
    failures = iter([True, True, False, True])

    def fails(rollout):
        if next(failures, False):
            raise ConnectionError
        return score(rollout)

    scorer = inflight.Scorer(fails, retries={ConnectionError: 3})
    with inflight.replay(directory) as stream:
        groups = list(stream.groups(score=scorer))
        assert [group[0].group_id for group in groups] == stream.group_ids
    assert all(rollout.reward is not None for group in groups for rollout in group if scorer.wants(rollout))
    assert scorer.failures == {"retries: ConnectionError": 3}
    scorer.close()


def test_the_lines_of_the_page_train_a_model(run, tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "stream.md").read_text()
    [code] = [
        block for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "replay" in block
    ]
    assert len(code.strip().splitlines()) <= 10
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(run[0])
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    names = {"inflight": inflight, "torch": torch, "model": model, "reward": score}
    exec(code, names)
    assert any((now != then).any() for now, then in zip(model.parameters(), before, strict=True))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert names["stream"].outstanding == []


def test_the_command_tells_what_is_in_a_journal(run, tmp_path):
    directory, _, live = run
    file = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["replay", str(directory), "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num_groups"] == 41
    assert found["num_tokens"] == sum(len(rollout.token_ids) for rollout in live.values())
    assert found["tokens_per_s"] > 0
    assert found["damage"] == []
    assert found.items() <= json.loads(file.read_text()).items()
    shutil.copy(JournalReader(directory).path, tmp_path)
    damage_row(tmp_path, 3)
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 0
    [damage] = json.loads(done.stdout.splitlines()[-1])["damage"]
    assert (damage["first"], damage["last"]) == (3, 3)
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "nothing")]).exit_code == 2


TRAINER = """
import sys, zlib
import inflight
with inflight.launch("tiny", device="cpu", threads=1, journal=sys.argv[1]) as engine:
    engine.submit([[i % 500] for i in range(5000)], inflight.SamplingParams(n=2, max_tokens=20))
    for group in engine.stream.groups():
        print(group[0].group_id, *(zlib.crc32(r.token_ids.tobytes() + r.logprobs.tobytes()) for r in group), flush=True)
"""


@pytest.mark.slow
def test_the_journal_of_a_killed_trainer_has_every_group_that_it_saw(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(100)]
    child.kill()
    lines += child.stdout.readlines()
    child.wait(20)
    seen = dict(tuple(line.split(" ", 1)) for line in lines if line.endswith("\n"))
    assert len(seen) >= 100
    with inflight.replay(tmp_path) as stream:
        replayed = {
            str(group[0].group_id): " ".join(
                str(zlib.crc32(r.token_ids.tobytes() + r.logprobs.tobytes())) for r in group
            )
            for group in stream.groups()
        }
    assert {group_id: sums + "\n" for group_id, sums in replayed.items()}.items() >= seen.items()
    JournalWriter(tmp_path).close()  # nobody holds it any more


def test_a_second_engine_needs_another_directory_while_the_first_one_writes(tmp_path):
    writer = JournalWriter(tmp_path)
    with pytest.raises(JournalError, match="another"):
        inflight.launch("tiny", device="cpu", journal=str(tmp_path))
    writer.close()


def test_a_launch_that_fails_leaves_the_journal_to_the_next(tmp_path, monkeypatch):
    def fail(options):
        raise inflight.InflightError("no engine")

    monkeypatch.setattr("inflight.fleet.process.local.LocalProcess", fail)
    with pytest.raises(inflight.InflightError, match="no engine"):
        inflight.launch("tiny", journal=tmp_path / "a")
    JournalWriter(tmp_path / "a").close()


# ---- journals of frames that were made by hand -------------------------------------------------------------------


def damage_row(directory, number):
    with closing(sqlite3.connect(JournalReader(directory).path)) as database, database:
        [data] = database.execute("SELECT data FROM frames WHERE number = ?", (number,)).fetchone()
        database.execute("UPDATE frames SET data = ? WHERE number = ?", (data[:-1] + bytes([data[-1] ^ 1]), number))


def write(directory, count, begin=0, leave_out=()):
    """Frames with which a group of one sample starts and ends."""
    writer = JournalWriter(directory)
    for n in range(begin, begin + count):
        if n not in leave_out:
            writer.append(make_frame(n + 1, n, groups=starts(n), finishes=ends(n), next_group_id=n + 1).encode())
    writer.close()


def test_a_journal_is_read_as_it_is_used(tmp_path, monkeypatch):
    """Not before somebody waits, and only so far ahead; who waits for what comes later gets it all the same."""
    monkeypatch.setattr(replay_module, "_READ_AHEAD_BYTES", 2000)
    monkeypatch.setattr(replay_module, "_LOOK_EVERY_BYTES", 500)
    write(tmp_path, 300)
    with inflight.replay(tmp_path) as stream:
        time.sleep(0.2)
        assert stream.num_tokens == 0
        groups = stream.groups()
        assert next(groups)[0].group_id == 0
        time.sleep(0.2)
        read = stream.num_tokens
        assert 0 < read < 100 * 101 / 2
        for number in range(1, 100):
            assert next(groups)[0].group_id == number
        time.sleep(0.2)
        assert read < stream.num_tokens < 200 * 201 / 2
        assert stream.state == "replaying"
        [[last]] = stream.collect([299], timeout_s=20)
        assert last.group_id == 299
        assert [group[0].group_id for group in groups] == list(range(100, 299))
    assert stream.state == "closed"


@pytest.mark.medium
def test_slow_scores_do_not_make_it_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_module, "_READ_AHEAD_BYTES", 2000)
    monkeypatch.setattr(replay_module, "_LOOK_EVERY_BYTES", 500)
    write(tmp_path, 300)
    go_on = threading.Event()
    with inflight.replay(tmp_path) as stream:
        batches = stream.batches(rollouts=20, score=lambda rollout: float(go_on.wait(20)))
        threading.Timer(0.5, lambda: (seen.append(stream.num_tokens), go_on.set())).start()
        seen: list[int] = []
        sizes = [len(batch.rollouts) for batch in batches]
    assert sizes == [20] * 15
    assert 0 < seen[0] < 100 * 101 / 2


def test_what_is_appended_meanwhile_is_not_part_of_a_replay(tmp_path):
    write(tmp_path, 5)
    with inflight.replay(tmp_path) as stream:
        write(tmp_path, 5)
        assert len(list(stream.groups())) == 5
    with inflight.replay(tmp_path) as stream:
        assert [group[0].group_id for group in stream.groups()] == list(range(10))


def test_missing_frames_are_told_once_and_the_rest_comes(tmp_path):
    write(tmp_path, 9, leave_out=(3,))
    with inflight.replay(tmp_path) as stream:
        seen, errors = [], []
        for _ in range(2):
            try:
                for group in stream.groups():  # some may come before the error, as it is read beside
                    seen.append(group[0].group_id)
            except StreamGapError as error:
                errors.append(str(error))
        assert seen == [0, 1, 2, 4, 5, 6, 7, 8]
    assert len(errors) == 1
    assert "frames 3 to 3" in errors[0]


def test_damage_is_told_before_anything_is_replayed(tmp_path):
    write(tmp_path, 30)
    damage_row(tmp_path, 20)
    with pytest.raises(JournalError, match="skip_damage"):
        inflight.replay(tmp_path)
    with inflight.replay(tmp_path, skip_damage=True) as stream:
        assert len(stream.summary.damage) == 1
        with pytest.raises(StreamGapError):
            stream.collect(stream.group_ids, timeout_s=20)
        assert len(stream.collect(stream.group_ids)) == 29


def test_text_needs_a_model_with_a_tokenizer(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(ValueError, match="no tokenizer"):
        inflight.replay(tmp_path, model=str(tmp_path))
