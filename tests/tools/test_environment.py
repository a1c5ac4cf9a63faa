"""Result files have few lines, and long series are in separate files."""

import gzip
import json
import subprocess
from pathlib import Path

from inflight.tools.environment import _commit, write_json, write_result

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"


def test_a_file_has_a_line_for_each_key_and_for_each_item_of_what_is_long(tmp_path):
    points = [{"size": size, "times": list(range(20))} for size in (1, 2)]
    data = {"name": "π", "sizes": list(range(200)), "short": [{"a": 1}], "points": points, "empty": [], "none": None}
    write_json(tmp_path / "data.json", data)
    text = (tmp_path / "data.json").read_text()
    assert json.loads(text) == data
    assert [line.strip().split(":")[0] for line in text.splitlines()] == [
        "{", '"name"', '"sizes"', '"short"', '"points"', '{"size"', '{"size"', "],", '"empty"', '"none"', "}"
    ]  # fmt: skip


def test_a_result_has_its_environment_and_its_series_beside_it(tmp_path):
    series = [{"seed": 0, "points": [1.5, 2.5]}]
    write_result(tmp_path / "curves.json", {"ratio": 2.0}, series)
    written = json.loads((tmp_path / "curves.json").read_text())
    assert written.pop("environment")["versions"]["torch"]
    assert written == {"ratio": 2.0}
    assert json.loads(gzip.decompress((tmp_path / "curves-series.json.gz").read_bytes())) == series


def test_a_copy_in_another_repository_is_of_no_commit_of_that(tmp_path, monkeypatch):
    """As of an installed package whose environment lies in a user's own repository."""
    monkeypatch.delenv("INFLIGHT_COMMIT", raising=False)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")
    (tmp_path / ".gitignore").write_text("copy\n")
    for command in (("init", "--quiet"), ("add", ".gitignore"), ("commit", "--quiet", "-m", "theirs")):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "environment.py").touch()
    assert _commit(copy) is None
    subprocess.run([*git, "add", "--force", "copy"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "ours"], cwd=tmp_path, check=True)
    assert len(str(_commit(copy))) == 12
    monkeypatch.setenv("INFLIGHT_COMMIT", "abc")  # the files of this commit were copied over those of another
    assert _commit(copy) == "abc"


def test_the_results_in_the_repository_stay_small():
    lines = sum(len(path.read_bytes().splitlines()) for path in RESULTS.rglob("*.json*") if path.suffix != ".gz")
    assert lines < 3700
