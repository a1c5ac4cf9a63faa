"""The launcher's process, as its engine sees it: when that is gone, the engine ends, whatever it is at, and leaves
nothing.

Imports nothing heavy: the watch begins before what takes seconds to import.
"""

import os
import select
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from inflight.engine.log import trim_log

_POLL_S = 0.5
_GRACE_S = 5.0


class ParentWatch:
    """A thread that ends this process when its parent is gone: at once, or by way of `stop` where that is given, which
    then has a few seconds. The parent's end of our standard input closes then, unless a process that it forked holds it
    open; so its process id is watched too. It also keeps the log short."""

    def __init__(self, parent_pid: int, directory: Path):
        self._parent_pid, self._directory = parent_pid, directory
        self._stop: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-parent-watch", daemon=True)
        self._thread.start()

    @property
    def orphaned(self) -> bool:
        return os.getppid() != self._parent_pid

    def stop_with(self, stop: Callable[[], None]) -> None:
        """From now on there is a loop that can be told to end."""
        self._stop = stop

    def leave_nothing(self) -> None:
        """Remove what the launcher would have removed."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        while not self.orphaned:
            trim_log(self._directory)
            readable, _, _ = select.select([0], [], [], _POLL_S)
            if readable and not os.read(0, 4096):
                break
        if self._stop is not None:
            self._stop()
            threading.Event().wait(_GRACE_S)  # the process ends meanwhile, and this thread with it
        slots = sys.modules.get("inflight.weights.shared_memory")
        if slots is not None and hasattr(slots, "remove_own"):
            slots.remove_own()
        self.leave_nothing()
        os._exit(1)
