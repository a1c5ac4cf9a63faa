"""The engine process: `python -m inflight.engine.main OPTIONS-AS-JSON`, as its launcher starts it.

It ends when it is told to, by a message or by SIGTERM, or when the process that launched it is gone.
"""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from inflight.core.options import Startup
from inflight.engine.directory import declare_alive
from inflight.engine.log import log_to_stderr
from inflight.engine.parent import ParentWatch

_LAUNCHER_S = 1.0


def main() -> int:
    startup = msgspec.json.decode(sys.argv[1], type=Startup)
    directory = Path(startup.directory)
    watch = ParentWatch(startup.parent_pid, directory)
    log_to_stderr()
    declare_alive(directory)
    signal.signal(signal.SIGTERM, _end)
    try:
        from inflight.engine.process import serve  # takes seconds

        return serve(startup, watch)
    except SystemExit:
        # A signal to all processes of a job ends the launcher, too, which would have cleaned up; it may take a moment.
        until = time.monotonic() + _LAUNCHER_S
        while not watch.orphaned and time.monotonic() < until:
            time.sleep(0.02)
        raise
    finally:
        if watch.orphaned:
            watch.leave_nothing()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
