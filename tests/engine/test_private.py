"""On a machine that others use too, an engine's files are for its user alone, whatever the umask."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest
from engine_files import directory_of, slots_of
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.model.shapes import shape_config
from inflight.stream.kept_frames import KeptFrames

NOBODY = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
directory, *slots = sys.argv[1:]

def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"

def connect(name):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(os.path.join(directory, name))

attempts = {"list": lambda: os.listdir(directory), "remove": lambda: os.rmdir(directory)}
for name in ("control", "stream"):
    attempts[name] = lambda name=name: connect(name)
for name in ("engine.log", "owners.lock", "publisher.lock", "alive.lock"):
    attempts[name] = lambda name=name: open(os.path.join(directory, name), "rb")
for slot in slots:
    attempts["read " + slot] = lambda slot=slot: open(slot, "rb")
    attempts["write " + slot] = lambda slot=slot: open(slot, "r+b")
    attempts["remove " + slot] = lambda slot=slot: os.unlink(slot)
print(json.dumps({name: outcome(attempt) for name, attempt in attempts.items()}))
"""


@pytest.fixture(scope="module")
def careless() -> Iterator[inflight.Engine]:
    """An engine whose launcher lets everybody read and write what it makes."""
    before = os.umask(0)
    try:
        with inflight.launch("tiny", max_sequences=2, max_context=64, threads=1, device="cpu") as engine:
            yield engine
    finally:
        os.umask(before)


def test_what_an_engine_makes_is_for_its_user_alone(careless):
    directory, slots = directory_of(careless.pid), slots_of(careless.pid)
    with careless.publisher(AutoModelForCausalLM.from_config(shape_config("tiny"))) as publisher:
        careless.wait_for_version(publisher.publish())
        names = {path.name for path in directory.iterdir()}
        assert names == {"control", "stream", "engine.log", "owners.lock", "publisher.lock", "alive.lock"}
        assert len(slots) == 2
        modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [*directory.iterdir(), *slots]}
    assert modes == dict.fromkeys(modes, 0o600)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_names_cannot_be_guessed(careless):
    """Eight characters of 37, chosen by the system's random numbers."""
    for path in [directory_of(careless.pid), *slots_of(careless.pid)]:
        assert len(path.name.rpartition("-")[2]) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_can_neither_list_nor_read_nor_connect(careless):
    directory, slots = directory_of(careless.pid), slots_of(careless.pid)
    command = [sys.executable, "-c", NOBODY, str(directory), *map(str, slots)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    outcomes = json.loads(told)
    assert len(outcomes) == 2 + 2 + 4 + 3 * 2
    assert set(outcomes.values()) == {"PermissionError"}, outcomes
    assert careless.status().bad_messages == 0
    assert len(careless.generate([[1, 2]], inflight.SamplingParams(max_tokens=3, ignore_eos=True))[0][0].token_ids) == 3


def test_frames_that_wait_on_disk_are_in_no_directory(tmp_path):
    before = os.umask(0)
    try:
        kept = KeptFrames(0, tmp_path)
        kept.append(b"secret" * 100)
        assert kept.bytes_in_files == 600
        assert list(tmp_path.iterdir()) == []
    finally:
        os.umask(before)
        kept.close()
