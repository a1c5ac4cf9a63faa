"""The distribution: what is in it, and what is not."""

import zipfile
from pathlib import Path

import hatchling.build

import inflight

ROOT = Path(__file__).parent.parent
PACKAGES = {"inflight": ROOT, "inflight_kernels": ROOT / "kernels"}
"""Maps each package to the directory that it lies in."""


def files_of_packages() -> set[str]:
    return {
        path.relative_to(parent).as_posix()
        for name, parent in PACKAGES.items()
        for path in (parent / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_all_files_of_the_packages_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / hatchling.build.build_wheel(str(tmp_path))
    assert wheel.name == f"inflight-{inflight.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"inflight-{inflight.__version__}.dist-info/entry_points.txt").decode()
    about = {name for name in names if name.startswith(f"inflight-{inflight.__version__}.dist-info/")}
    assert {Path(name).name for name in about} == {"METADATA", "RECORD", "WHEEL", "LICENSE", "entry_points.txt"}
    assert "inflight = inflight.cli:app" in entry_points
    expected = files_of_packages()
    assert "inflight_kernels/_cpu.c" in expected
    assert names - about == expected


def test_changelog_and_quick_start_are_of_this_version():
    assert f"\n## {inflight.__version__} - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"dist/inflight-{inflight.__version__}-py3-none-any.whl" in (ROOT / "docs" / "quick-start.md").read_text()
