"""Files of a run are complete or absent, and a failed write ends in a one-sentence error."""

import errno
import json
import os

import pytest
from typer.testing import CliRunner

from inflight.core.errors import InflightError
from inflight.tools.cli import app
from inflight.tools.demo.run import _check_writable, _remove_run
from inflight.tools.environment import write_json


def test_a_directory_that_cannot_be_written_to_is_told_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file" / "run")], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert f"error: cannot write to {tmp_path}/file/run: Not a directory; --out takes another directory" in done.stderr


def test_a_full_file_system_is_told_before_the_run(tmp_path):
    (tmp_path / ".probe").symlink_to("/dev/full")
    with pytest.raises(InflightError, match=f"cannot write to {tmp_path}: {os.strerror(errno.ENOSPC)}"):
        _check_writable(tmp_path)


def test_a_new_run_removes_the_checkpoints_of_the_demo_alone(tmp_path):
    (tmp_path / "checkpoint-000020").mkdir()
    (tmp_path / "checkpoint-000020" / "demo.json").write_text("{}")
    (tmp_path / "checkpoint-500").mkdir()  # as other trainers name theirs
    _remove_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-500", "steps.jsonl"]


def test_a_summary_that_does_not_fit_leaves_the_one_before(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    (tmp_path / ".summary.partial.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_json(path, {"steps": 2, "long": "x" * 100_000})
    assert json.loads(path.read_text()) == {"steps": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
