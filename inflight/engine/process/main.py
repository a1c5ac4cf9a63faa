"""The engine process: `python -m inflight.engine.process.main OPTIONS-AS-JSON`, as its launcher starts it.

It ends after a stop message, after SIGTERM, or when the process that launched it has ended. It imports nothing heavy at
first, so that it watches the launcher before the slow imports begin.
"""

import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from inflight.core.decoders import json_decoder
from inflight.core.options import Startup
from inflight.engine.process.directory import declare_alive, log_to_stderr, trim_log

_LAUNCHER_S = 1.0
_POLL_S = 0.5
_GRACE_S = 5.0
_MOST_REMOVALS, _REMOVAL_S = 100, 0.02
_KEPT_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Numbers of products of different sizes for which oneDNN, and PyTorch's side of it, cache their preparations. Each
takes half a megabyte, and the default is a thousand. Preparing one again takes about a millisecond."""


def main() -> int:
    startup = json_decoder(Startup).decode(sys.argv[1])
    directory = Path(startup.directory)
    watch = ParentWatch(startup.parent_pid, directory)
    log_to_stderr()
    declare_alive(directory)
    signal.signal(signal.SIGTERM, _end)
    for name in _KEPT_PRODUCTS:
        os.environ.setdefault(name, "128")
    try:
        from inflight.engine.process.process import serve  # takes seconds

        return serve(startup, watch.stop_with)
    except SystemExit:
        # A signal to all processes of a job also ends the launcher. Its end, after which this process cleans up in its
        # place, can take a moment.
        until = time.monotonic() + _LAUNCHER_S
        while not watch.orphaned and time.monotonic() < until:
            time.sleep(0.02)
        raise
    finally:
        if watch.orphaned:
            watch.leave_nothing()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


class ParentWatch:
    """A thread that ends this process when its parent has ended: at once or, if `stop` is given, by calling it and
    waiting a few seconds. The parent's end of the standard input closes when the parent ends, unless a process that it
    forked holds it open, so the thread also watches the parent's process id. It also keeps the log short."""

    def __init__(self, parent_pid: int, directory: Path):
        self._parent_pid, self._directory = parent_pid, directory
        self._stop: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-parent-watch", daemon=True)
        self._thread.start()

    @property
    def orphaned(self) -> bool:
        return os.getppid() != self._parent_pid

    def stop_with(self, stop: Callable[[], None]) -> None:
        """Register a function that ends the loop."""
        self._stop = stop

    def leave_nothing(self) -> None:
        """Remove the directory, also while another thread creates sockets and locks there."""
        for _ in range(_MOST_REMOVALS):
            shutil.rmtree(self._directory, ignore_errors=True)
            if not self._directory.exists():
                return
            time.sleep(_REMOVAL_S)

    def _run(self) -> None:
        while not self.orphaned:
            trim_log(self._directory)
            readable, _, _ = select.select([0], [], [], _POLL_S)
            if readable and not os.read(0, 4096):
                break
        if self._stop is not None:
            self._stop()
            threading.Event().wait(_GRACE_S)  # the process, and this thread with it, ends during the wait
        slots = sys.modules.get("inflight.weights.shared_memory")
        if slots is not None and hasattr(slots, "remove_own"):
            slots.remove_own()
        self.leave_nothing()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
