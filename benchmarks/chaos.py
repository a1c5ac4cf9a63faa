"""Injects faults into a training loop at random moments, and counts what is lost: `make chaos`.

    python benchmarks/chaos.py [FILE] [--minutes M] [--seed S] [--kills N] [--only FAULT …] [--mistakes NAME …]

A trainer (`chaos_trainer.py`) submits, publishes and consumes all the time, and checks every token. N times its engine
is killed within M minutes, a fifth of these times while it loads; other faults come in proportion (FAULTS). After each
trainer that is killed, what it leaves is looked for. Where the kernel lets us mount, all run in a mount namespace of
their own, in which /dev/shm and the temporary directory are small; else the faults that fill these are left out.
Ends with 1 if anything was lost, doubled, misattributed or left.
"""

import argparse
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from truth_load import Verdict, save_model

from inflight.core.clock import now_ns
from inflight.tools.environment import write_result

_HERE = Path(__file__).parent
_MARK = "INFLIGHT_CHAOS"
_INSIDE = "INFLIGHT_CHAOS_MOUNTED"
_SHM, _SHM_BYTES, _TMP_BYTES = Path("/dev/shm"), 48 << 20, 64 << 20
_MANY_RESTARTS = "100000"
_LAUNCH_S, _SUCCESSOR_S, _LEAVE_S, _END_S = 400.0, 60.0, 20.0, 240.0
_POLL_S = 0.01


class Trainer:
    """One life of the trainer, and what it reported."""

    def __init__(self, model: str, seed: int, mistakes: list[str], log: Path):
        arguments = [model, str(seed), _MANY_RESTARTS, *mistakes]
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(_HERE / "chaos_trainer.py"), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self.verdict: dict[str, int] = {}
        self.ended = False
        self.first_tokens_ns: dict[int, int] = {}
        """Maps process ids of engines to the time when they drew their first token."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):  # it was killed while it wrote
                break
            what = json.loads(line)
            if "pid" in what:
                self.first_tokens_ns[what["pid"]] = what["draws_at_ns"]
            self.verdict = what.get("verdict", self.verdict)
            self.ended = what.get("ended", False)

    @property
    def engines(self) -> list[int]:
        """Process ids of its engines that live, the newest last."""
        children: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                children += map(int, task.read_text().split())
        return sorted(filter(lives, children), key=started)

    @property
    def draws(self) -> bool:
        """Whether its newest engine draws tokens."""
        return any(pid in self.first_tokens_ns for pid in self.engines[-1:])

    def wait_until_drawing(self, timeout_s: float) -> None:
        """Raises RuntimeError if the trainer ends, and TimeoutError."""
        wait_until(lambda: self.draws or self.code() is not None, timeout_s, "no token was drawn")
        if self.code() is not None:
            raise RuntimeError(f"the trainer ended with code {self.code()}")

    def code(self) -> int | None:
        """What the process ended with; None: it lives."""
        return self._process.poll()

    def command(self, *words: object) -> None:
        """Send it a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """End the process at once, and read what it reported."""
        self._process.kill()
        self._process.wait()
        self._thread.join(_END_S)

    def stop(self) -> None:
        """Let it finish what is in flight, and end."""
        self.command("stop")
        wait_until(lambda: self.code() is not None, _END_S, "the trainer did not end")
        self._thread.join(_END_S)


class Chaos:
    """Trainers one after another, and what is done to them."""

    def __init__(self, seed: int, mistakes: list[str], temporary: Path, *, mounted: bool, log: Path):
        self._draw, self._mistakes, self._temporary, self._log = random.Random(seed), mistakes, temporary, log
        self._model = str(temporary / "model")
        self._mounted = mounted
        save_model(self._model)
        self.counts: Counter[str] = Counter()
        self.kills: list[tuple[int, str]] = []
        """When an engine was killed, and in which fault."""
        self.left: list[str] = []
        self.problems: list[str] = []
        """Waits without an end, and trainers that ended by themselves."""
        self.verdict = Verdict()
        self.successors_ns: list[int] = []
        """When a successor drew its first token."""
        self.trainer = self._start()

    def run(self, minutes: float, kills: int, faults: Collection[str]) -> None:
        """Inject these faults when they are due, and let the last trainer finish."""
        self.trainer.wait_until_drawing(_LAUNCH_S)
        begin = time.monotonic()
        for at_s, fault in self._schedule(minutes * 60, kills, faults):
            time.sleep(max(0.0, begin + at_s - time.monotonic()))
            if time.monotonic() > begin + minutes * 60:
                break
            try:
                getattr(self, fault)()
                self.counts[fault] += 1
            except (TimeoutError, RuntimeError) as error:
                self.problems.append(f"{fault}: {error}")
                self.kill_both()
        try:
            self._end_trainer(self.trainer.stop)
        except TimeoutError as error:
            self.problems.append(str(error))
            self._end_trainer(self.trainer.kill)

    def _schedule(self, seconds: float, kills: int, faults: Collection[str]) -> list[tuple[float, str]]:
        names = [name for name in faults if self._mounted or not name.startswith("fill_")]
        times = {name: max(1, round(kills * FAULTS[name])) for name in names}
        return sorted((self._draw.uniform(0, seconds), name) for name, count in times.items() for _ in range(count))

    # ---- faults -------------------------------------------------------------------------------------------------

    def kill_engine(self) -> None:
        self.trainer.wait_until_drawing(_SUCCESSOR_S)
        time.sleep(self._draw.random() ** 3)
        self._kill_engine("kill_engine")

    def kill_loading_engine(self) -> None:
        """A successor is killed before it draws."""
        self.kill_engine()
        wait_until(lambda: self.trainer.engines, _SUCCESSOR_S, "no successor was started")
        time.sleep(self._draw.uniform(0, 4))
        self._kill_engine("kill_loading_engine")

    def stop_engine(self) -> None:
        self.trainer.wait_until_drawing(_SUCCESSOR_S)
        self._hold(self.trainer.engines[-1])

    def stop_trainer(self) -> None:
        self._hold(self.trainer.pid)

    def kill_trainer(self) -> None:
        """Its engine lives then, and takes all away. What is left where both died (`kill_both`, or an engine that was
        killed a moment before) is gone when the next trainer draws."""
        self.trainer.wait_until_drawing(_SUCCESSOR_S)
        self._end_trainer(self.trainer.kill)
        self._begin_trainer()

    def kill_both(self) -> None:
        """What is left is gone when the next trainer draws."""
        engines, killed = self.trainer.engines, set(self._leftovers())
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)  # it must not see its trainer's end
        self.trainer.kill()
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        self._account()
        self._begin_trainer()
        self.left += [f"{what} after kill_both" for what in killed.intersection(self._leftovers())]

    def idle_reader(self) -> None:
        self.trainer.command("idle", self._draw.uniform(0.1, 5))

    def drop_connection(self) -> None:
        self.trainer.command("drop")

    def fill_disk(self) -> None:
        """The trainer reads nothing meanwhile, so that frames would go to files."""
        self.trainer.wait_until_drawing(_SUCCESSOR_S)
        with filled(self._temporary / "ballast"):
            self._hold(self.trainer.pid)

    def fill_shared_memory(self) -> None:
        """The engine is killed, and its successor does not find room for its weights."""
        self.trainer.wait_until_drawing(_SUCCESSOR_S)
        with filled(_SHM / "ballast"):
            self._kill_engine("fill_shared_memory")
            time.sleep(self._draw.uniform(0.5, 5))

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _kill_engine(self, fault: str) -> None:
        for pid in self.trainer.engines[-1:]:
            self.kills.append((now_ns(), fault))
            os.kill(pid, signal.SIGKILL)

    def _hold(self, pid: int) -> None:
        with suppress(ProcessLookupError):  # a trainer ends an engine that hangs
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(self._draw.uniform(0.1, 5))
                self._see_spills()
            finally:
                os.kill(pid, signal.SIGCONT)

    def _see_spills(self) -> None:
        """Count how often frames were found in files, and how often in memory because the disk was full."""
        for pid in self.trainer.engines[-1:]:
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                open_files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
                log = Path(os.readlink(f"/proc/{pid}/fd/2")).read_text(errors="replace")
                spilled = [path for path in open_files if path.startswith(str(self._temporary)) and "(deleted)" in path]
                self.counts["saw_frames_in_files"] += bool(spilled)
                self.counts["saw_frames_stay_in_memory"] += "stay in memory" in log

    def _start(self) -> Trainer:
        self.counts["trainers"] += 1
        return Trainer(self._model, self._draw.randrange(1 << 30), self._mistakes, self._log)

    def _begin_trainer(self) -> None:
        self.trainer = self._start()
        self.trainer.wait_until_drawing(_LAUNCH_S)

    def _end_trainer(self, end: Callable[[], None]) -> None:
        end()
        self._account()
        with suppress(TimeoutError):
            wait_until(lambda: not self._leftovers(), _LEAVE_S, "")
        self.left += self._leftovers()

    def _account(self) -> None:
        """Add what the trainer that has ended found, and what became of it."""
        for name, value in self.trainer.verdict.items():
            setattr(self.verdict, name, getattr(self.verdict, name) + value)
        self.successors_ns += self.trainer.first_tokens_ns.values()
        if self.trainer.code() not in (0, -signal.SIGKILL) or (self.trainer.code() == 0 and not self.trainer.ended):
            self.problems.append(f"a trainer ended with code {self.trainer.code()}")

    def _leftovers(self) -> list[str]:
        """Processes of a trainer that has ended, slots that nobody holds, and directories."""
        mark = f"{_MARK}={os.environ[_MARK]}".encode()
        found = [f"process {pid}" for pid in marked(mark) if pid != os.getpid()]
        found += [str(path) for path in _SHM.glob("inflight-*") if self._mounted or is_orphan(path)]
        return found + [str(path) for path in self._temporary.glob("inflight-*")]

    def result(self) -> dict[str, Any]:
        """What is written."""
        seconds = sorted(self._restart_seconds())
        found = self.verdict.faults
        return {
            "faults": dict(sorted(self.counts.items())),
            "engine_kills": len(self.kills),
            "engine_kills_survived": sum(any(at > kill for at in self.successors_ns) for kill, _ in self.kills),
            "restart_s": {f"p{p}": float(np.percentile(seconds, p)) for p in (50, 99)} if seconds else None,
            "restarts_timed": len(seconds),
            "totals": {name: value for name, value in asdict(self.verdict).items() if name not in found},
            "lost": found["lost_groups"] + found["lost_samples"] + found["lost_tokens"],
            "doubled": found["doubled_groups"] + found["doubled_tokens"],
            "misattributed": found["misattributed_tokens"] + found["torn_tokens"] + found["mixed_up"],
            "found": found,
            "leftovers": self.left,
            "problems": self.problems,
            "left_out": [] if self._mounted else [name for name in FAULTS if name.startswith("fill_")],
        }

    def _restart_seconds(self) -> Iterator[float]:
        """From the last kill before it to the first token of each successor, where memory was free."""
        events = sorted([*self.kills, *((at_ns, "draws") for at_ns in self.successors_ns)])
        for (kill_ns, fault), (at_ns, what) in pairwise(events):
            if what == "draws" and fault in ("kill_engine", "kill_loading_engine"):
                yield (at_ns - kill_ns) / 1e9


FAULTS = {
    "kill_engine": 0.8,
    "kill_loading_engine": 0.2,
    "stop_engine": 0.4,
    "stop_trainer": 0.3,
    "kill_trainer": 0.06,
    "kill_both": 0.03,
    "idle_reader": 0.3,
    "drop_connection": 0.5,
    "fill_disk": 0.15,
    "fill_shared_memory": 0.08,
}
"""How often each is done, for each kill that is asked for. Names are those of methods of `Chaos`."""


def wait_until(true: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_s:g} s")
        time.sleep(_POLL_S)


def lives(pid: int) -> bool:
    return _stat(pid)[0] not in ("Z", "X", "")


def started(pid: int) -> int:
    """Clock ticks from the machine's start to that of the process."""
    return int(_stat(pid)[19] or 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, or empty ones."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [""] * 20


def marked(mark: bytes) -> Iterator[int]:
    """Processes whose environment has this variable."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def is_orphan(path: Path) -> bool:
    """Whether nobody holds the lock on a slot."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def filled(ballast: Path) -> Iterator[None]:
    """Take all that a small file system has left."""
    left = os.statvfs(ballast.parent)
    assert left.f_blocks * left.f_frsize <= max(_SHM_BYTES, _TMP_BYTES), "this is not the small file system"
    try:
        with suppress(OSError), open(ballast, "wb", buffering=0) as file:  # until it is full, whoever else writes
            while True:
                file.write(bytes(1 << 16))
        yield
    finally:
        ballast.unlink(missing_ok=True)


def enter_own_mounts() -> None:
    """Start this program again in a mount namespace, as the same user, if the kernel lets us."""
    if _INSIDE in os.environ:
        return
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]
    try:
        able = (
            subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        able = False
    os.environ[_INSIDE] = str(int(able))
    if able:
        os.execvp("unshare", [*unshare, sys.executable, *sys.argv])


def mount(directory: Path, size: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("benchmarks/results/cpu/chaos.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--only", nargs="*", choices=[*FAULTS], default=[*FAULTS], help="the faults to inject")
    parser.add_argument("--mistakes", nargs="*", default=[], help="what the trainer does wrong, and must be found")
    options = parser.parse_args()
    enter_own_mounts()
    mounted = os.environ[_INSIDE] == "1"
    os.environ[_MARK] = secrets.token_hex(8)
    temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
    log = options.file.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    os.environ["TMPDIR"] = str(temporary)
    try:
        if mounted:
            mount(temporary, _TMP_BYTES)
            mount(_SHM, _SHM_BYTES)
        chaos = Chaos(options.seed, options.mistakes, temporary, mounted=mounted, log=log)
        began = time.monotonic()
        try:
            chaos.run(options.minutes, options.kills, options.only)
        finally:
            chaos.trainer.kill()
        result = chaos.result() | {"seconds": time.monotonic() - began}
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(temporary)], check=True)
        shutil.rmtree(temporary, ignore_errors=True)
    good = not any(chaos.verdict.faults.values()) and not chaos.left and not chaos.problems
    write_result(options.file, result)
    print(json.dumps(result))
    if good:
        log.unlink()
    return not good


if __name__ == "__main__":
    sys.exit(main())
