"""Whoever dies, and when: no slot, no directory and no process is left."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_files import directory_of, slots_of
from waiting import wait_until

import inflight
from inflight.engine.process.directory import make_directory, remove_orphan_directories
from inflight.engine.process.main import ParentWatch
from inflight.weights.shared_memory import default_directory, remove_orphans

LAUNCH = "import inflight\nengine = inflight.launch('tiny', max_sequences=4, threads=1, device='cpu')\n"


def start(program: str, arguments: Sequence[str] = (), **options) -> subprocess.Popen:
    command = [sys.executable, "-u", "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "zombie" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, task.read_text().split())
    return found


def running_pair() -> tuple[subprocess.Popen, int, set[Path], Path]:
    """A trainer, its engine's process id, slots and directory."""
    trainer = start(LAUNCH + "print(engine.pid)\nimport time; time.sleep(60)")
    pid = int(trainer.stdout.readline())
    slots, directory = slots_of(pid), directory_of(pid)
    assert len(slots) == 2
    assert directory.name.startswith("inflight-engine-")
    return trainer, pid, slots, directory


@pytest.mark.slow
def test_sigterm_to_both_leaves_nothing():
    """As a cluster ends a job."""
    trainer, pid, slots, directory = running_pair()
    os.kill(pid, signal.SIGTERM)
    trainer.terminate()
    trainer.wait()
    wait_until(lambda: ended(pid), "the engine lives on")
    assert not directory.exists()
    assert not any(slot.exists() for slot in slots)


@pytest.mark.slow
def test_what_sigkill_to_both_leaves_the_next_launch_or_doctor_removes():
    trainer, pid, slots, directory = running_pair()
    os.kill(pid, signal.SIGKILL)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: ended(pid), "the engine lives on")
    assert directory.exists()
    done = subprocess.run([sys.executable, "-m", "inflight.tools.cli", "doctor"], capture_output=True, text=True)
    assert "leftovers" in done.stdout
    assert not directory.exists()
    assert not any(slot.exists() for slot in slots)


RESTARTING = """
import sys, time, inflight
from inflight.fleet import member
member._FIRST_BACKOFF_S = float(sys.argv[1])
engine = inflight.launch('tiny', max_sequences=4, threads=1, device='cpu', restarts=2)
print(engine.pid)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backoff_s", [60, 0.1])
def test_a_trainer_that_is_killed_while_its_engine_is_restarted_leaves_nothing(backoff_s):
    """While it waits, and while the successor loads."""
    trainer = start(RESTARTING, arguments=[str(backoff_s)])
    pid = int(trainer.stdout.readline())
    slots, directories, successors = slots_of(pid), [directory_of(pid)], []
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not directories[0].exists(), "what the engine left lies there while its trainer waits")
    assert not any(slot.exists() for slot in slots)
    if backoff_s < 1:
        wait_until(lambda: children(trainer.pid), "there is no successor")
        successors = children(trainer.pid)
        wait_until(lambda: "engine.log" in os.readlink(f"/proc/{successors[0]}/fd/2"), "it has no log")
        directories.append(directory_of(successors[0]))
        wait_until(lambda: (directories[1] / "alive.lock").exists(), "it does not load")
    trainer.kill()
    trainer.wait()
    wait_until(lambda: all(map(ended, successors)), "the successor loads on")
    assert not any(directory.exists() for directory in directories)


def test_what_a_thread_puts_into_the_directory_while_it_is_removed_is_removed_too(tmp_path, monkeypatch):
    """The engine makes its sockets while the watch sees that its trainer is gone."""
    directory, remove, num_calls = tmp_path / "engine", shutil.rmtree, 0

    def remove_what_is_written_to(path, ignore_errors):
        nonlocal num_calls
        num_calls += 1
        remove(path, ignore_errors=ignore_errors)
        if num_calls < 3:  # it was not empty any more when its files were gone
            directory.mkdir()
            (directory / "socket").touch()

    directory.mkdir()
    monkeypatch.setattr(shutil, "rmtree", remove_what_is_written_to)
    watch = object.__new__(ParentWatch)
    watch._directory = directory
    watch.leave_nothing()
    assert (directory.exists(), num_calls) == (False, 3)


def test_a_directory_of_somebody_who_lives_is_no_orphan():
    directory, lock = make_directory()
    remove_orphan_directories()
    assert directory.exists()
    os.close(lock)
    remove_orphan_directories()
    assert not directory.exists()


def test_a_directory_whose_maker_was_killed_at_once_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new, link = (tmp_path / f"inflight-engine-{name}" for name in ("old", "new", "link"))
    old.mkdir()
    new.mkdir()
    link.symlink_to(tmp_path / "somewhere")
    os.utime(old, (0, 0))
    assert remove_orphan_directories() == 1
    assert sorted(tmp_path.iterdir()) == [link, new]


def test_versions_that_were_left_half_written_are_removed_when_nobody_writes_them(tmp_path):
    for name in (".version-1.safetensors.partial", ".version-2.safetensors.partial", "version-0.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / ".version-1.safetensors.partial", (0, 0))
    inflight.Files(directory=str(tmp_path)).sender()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".version-2.safetensors.partial",
        "version-0.safetensors",
    ]


@pytest.mark.parametrize("model", ["tiny", pytest.param("/no/such/model", marks=pytest.mark.slow)])
def test_an_engine_whose_trainer_dies_while_it_loads_ends_at_once(model):
    trainer = start(LAUNCH.replace("'tiny'", repr(model)))
    wait_until(lambda: children(trainer.pid), "there is no engine")
    [pid] = children(trainer.pid)
    wait_until(lambda: "engine.log" in os.readlink(f"/proc/{pid}/fd/2"), "it has no log")
    directory = directory_of(pid)
    wait_until(lambda: (directory / "alive.lock").exists(), "it does not load")
    trainer.kill()
    trainer.wait()
    wait_until(lambda: ended(pid), "the engine loads on", seconds=20)
    assert not directory.exists()


@pytest.mark.parametrize(
    "pause_s", [pytest.param(0.0, marks=pytest.mark.slow), 0.05, pytest.param(0.5, marks=pytest.mark.slow)]
)
def test_control_c_twice_during_the_launch_leaves_nothing(pause_s):
    trainer = start(
        LAUNCH,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until(lambda: children(trainer.pid), "there is no engine")
    [pid] = children(trainer.pid)
    wait_until(lambda: ended(pid) or "engine.log" in os.readlink(f"/proc/{pid}/fd/2"), "it has no log")
    directory = directory_of(pid)
    time.sleep(0.5)
    for _ in range(3):
        trainer.send_signal(signal.SIGINT)
        time.sleep(pause_s)
    trainer.wait(30)
    wait_until(lambda: ended(pid), "the engine lives on")
    wait_until(lambda: not directory.exists(), "its directory is left")


def test_orphaned_slots_are_counted(tmp_path):
    (tmp_path / "inflight-slot-dead").write_bytes(b"x")
    assert remove_orphans(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_slots_that_must_lie_on_a_disk_are_told(monkeypatch, caplog, tmp_path):
    from inflight.weights import shared_memory

    monkeypatch.setattr(shared_memory, "_SHM", tmp_path / "missing")
    shared_memory.SharedMemorySlot.create(1 << 12).unlink()
    assert "cannot be written to: the weights lie in" in caplog.text
    assert default_directory() != tmp_path
