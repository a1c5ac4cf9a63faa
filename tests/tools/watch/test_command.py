"""Sources and errors of `inflight watch`."""

import os
import re
import signal
import subprocess
import sys
import urllib.request

from waiting import PATIENCE_S

from inflight.observability.event_file import EventFile
from inflight.observability.events import Began

WATCH = (sys.executable, "-m", "inflight.tools.cli", "watch")


def test_a_run_is_served_until_ctrl_c(tmp_path):
    EventFile(tmp_path).append([Began(time=1.0, title="a run")])
    command = subprocess.Popen([*WATCH, str(tmp_path), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert command.stdout is not None
        found = re.search(r"is shown at (http://127\.0\.0\.1:\d+)$", command.stdout.readline())
        assert found is not None
        with urllib.request.urlopen(found[1] + "/events", timeout=10) as answer:
            assert b'"title":"a run"' in answer.read()
        os.kill(command.pid, signal.SIGINT)
        assert command.wait(PATIENCE_S) == 130
    finally:
        command.kill()


def test_a_run_that_is_not_there_yet_is_told(tmp_path):
    run = tmp_path / "later"
    command = subprocess.Popen([*WATCH, str(run), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert command.stdout is not None
        assert "is shown at" in command.stdout.readline()
        told = command.stdout.readline()
        assert told == f"there is nothing to show yet: there is no {run}/events.jsonl; the page goes on looking\n"
    finally:
        command.kill()
        command.wait()


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path):
    refused = subprocess.run([*WATCH, "http://host:8000"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert "error: expected the directory of a run, got 'http://host:8000'" in refused.stderr
