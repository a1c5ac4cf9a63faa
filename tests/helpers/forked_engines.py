"""Engine processes that are forked from one that has imported everything, which takes most of the time of a start.

Of the launcher, `subprocess.Popen` alone is replaced; the engine is a child of the process that launches it, runs the
same `main` with the same arguments, files and session, and cannot tell the difference but by its command line.
A program that a test starts (a command, an example, a trainer that is killed) starts engines as everybody does.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_START_S = 60.0
_IMPORTS_S = 300.0
"""Bound of the imports of the template, which take more than a minute next to busy programs."""
_MESSAGE_BYTES = 1 << 18
_HELPERS = Path(__file__).parent


class Template:
    """The process that engines are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Returns the process id of a new child of this process. Raises TimeoutError."""
        with self._lock:
            if self._process is None:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._socket.settimeout(_IMPORTS_S)
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    )  # fmt: skip
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                return int(self._socket.recv(32))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait(_START_S)


_template = Template()
atexit.register(_template.close)


class ForkedPopen(subprocess.Popen):
    """What `subprocess.Popen` is to the launcher."""

    def __init__(
        self, command: list[str], *, stdin: int, stdout: Any, stderr: Any, pass_fds: list[int], env: dict, **_: Any
    ):
        read_end, write_end = os.pipe()
        request = {
            "startup": command[-1], "environ": env, "path": sys.path, "directory": os.getcwd(),
            "parent": os.getpid(),
        }  # fmt: skip
        try:
            pid = _template.fork(request, [read_end, stdout.fileno(), stderr.fileno(), *pass_fds])
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        # What subprocess.Popen knows of a child that it started.
        self.args, self.pid, self.returncode, self._child_created = command, pid, None, True
        self.stdin, self.stdout, self.stderr = os.fdopen(write_end, "wb", buffering=0), None, None
        self._waitpid_lock, self._communication_started, self._input = threading.Lock(), False, None


def popen(command: list[str], **options: Any) -> subprocess.Popen:
    """An engine in the interpreter of the tests is forked; another interpreter has its own packages."""
    return (ForkedPopen if command[0] == sys.executable else subprocess.Popen)(command, **options)


POPEN = SimpleNamespace(**vars(subprocess) | {"Popen": popen})
"""Stands for the module `subprocess` in the launcher."""


def main() -> None:
    """The template: fork for each request, until the process that started this one is gone."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")  # as the engine's main does before it imports
    import inflight.engine.loop.engine
    import inflight.engine.process.process  # noqa: F401

    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            data, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 8)
            if not data:
                return
            if not (between := os.fork()):
                if os.fork():
                    os._exit(0)  # and the other one's parent is the process that asked
                _become_an_engine(json.loads(data), files, requests)
            for file in files:
                os.close(file)
            os.waitpid(between, 0)


def _become_an_engine(request: dict[str, Any], files: list[int], requests: socket.socket) -> None:
    code: Any = 1
    try:
        os.setsid()
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
            os.close(file)
        until = time.monotonic() + _START_S
        while os.getppid() != request["parent"]:
            if time.monotonic() > until:  # who asked is gone
                os._exit(1)
            time.sleep(0.0005)
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.path[:] = request["path"]
        with contextlib.suppress(FileNotFoundError):  # a test has removed it
            os.chdir(request["directory"])
        requests.send(str(os.getpid()).encode())
        requests.close()
        from inflight.engine.process.main import main as run

        sys.argv = ["inflight.engine.process.main", request["startup"]]
        code = run()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
