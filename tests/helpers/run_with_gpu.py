"""Runs programs of a test file with the GPU that `pretend_gpu` makes up."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from waiting import PATIENCE_S


def run_with_gpu(directory: Path, *programs: Callable[[], None]) -> None:
    """Run functions of one file in another process. The arguments of that file are a directory and their names."""
    [file] = {program.__code__.co_filename for program in programs}
    command = [sys.executable, file, str(directory), *(program.__name__ for program in programs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert ended.returncode == 0, ended.stderr
