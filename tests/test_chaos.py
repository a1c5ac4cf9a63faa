"""`make chaos` for a minute: nothing is lost, and a trainer that makes a mistake is found out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

CHAOS = Path(__file__).parent.parent / "benchmarks" / "chaos.py"


def chaos(file: Path, *options: str) -> tuple[int, dict]:
    """The exit status, and what was written."""
    done = subprocess.run([sys.executable, CHAOS, file, *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert file.exists(), done.stderr[-3000:]
    return done.returncode, json.loads(file.read_text())


@pytest.mark.slow
def test_nothing_is_lost_in_a_minute_of_faults(tmp_path):
    status, result = chaos(tmp_path / "chaos.json", "--minutes", "1", "--kills", "5", "--seed", "3")
    log = tmp_path / "chaos.log"
    assert status == 0, f"{result}\n{log.read_text()[-5000:]}"
    assert result["engine_kills"] == result["engine_kills_survived"] > 0
    assert result["totals"]["tokens"] > 1000
    assert result["totals"]["distinct_versions"] > 10
    assert result["lost"] == result["doubled"] == result["misattributed"] == 0
    assert result["leftovers"] == result["problems"] == []


@pytest.mark.long
def test_mistakes_are_found(tmp_path):
    mistakes = ("--mistakes", "forget_a_token", "forget_a_group", "state_another_version")
    status, result = chaos(
        tmp_path / "chaos.json", "--minutes", "0.3", "--kills", "1", "--seed", "0", "--only", "kill_engine", *mistakes
    )
    assert status == 1
    for found in ("ended_as_errors", "lost_groups", "misattributed_tokens"):
        assert result["found"][found] > 0, found
    assert result["leftovers"] == []
