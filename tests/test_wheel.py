"""The distribution: what is in it, and what is not."""

import re
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import hatchling.build
import pytest

import inflight
from inflight.core.errors import MissingPackageError
from inflight.core.extras import DISTRIBUTION, needing

ROOT = Path(__file__).parent.parent
PACKAGES = {"inflight": ROOT, "inflight_kernels": ROOT / "kernels"}
"""Maps each package to the directory that it lies in."""


FOREIGN = [
    re.compile(r"(pip|uv|poetry|pdm)3? (pip )?(install|add)\b[^#]*[ '\"]inflight(?![\w./-])"),
    re.compile(r"(?<![\w./])inflight\[[a-z]+\]"),
]
"""The bare name where pip takes a distribution."""


def tracked_texts() -> Iterator[Path]:
    """The pages, the code and the files of the build, but for this one and the list of changes."""
    for pattern in (
        "*.md",
        "*.toml",
        "Makefile",
        "docs/**/*.md",
        "examples/*",
        "inflight/**/*.py",
        "benchmarks/**/*.py",
    ):
        yield from (path for path in ROOT.glob(pattern) if path.is_file() and path.name != "CHANGELOG.md")


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
    assert wheel.name == f"inflight_rl-{inflight.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"inflight_rl-{inflight.__version__}.dist-info/entry_points.txt").decode()
    about = {name for name in names if name.startswith(f"inflight_rl-{inflight.__version__}.dist-info/")}
    assert {Path(name).name for name in about} == {"METADATA", "RECORD", "WHEEL", "LICENSE", "entry_points.txt"}
    assert "inflight = inflight.tools.cli:app" in entry_points
    expected = files_of_packages()
    assert "inflight_kernels/_cpu.c" in expected
    assert names - about == expected


def test_every_hint_has_the_name_of_the_distribution():
    """`pip install inflight` would install another project."""
    hints = []
    for path in tracked_texts():
        for line in path.read_text().splitlines():
            hints += [f"{path.relative_to(ROOT)}: {line.strip()}" for pattern in FOREIGN if pattern.search(line)]
    assert hints == []


@pytest.mark.parametrize(
    ("line", "is_foreign"),
    [
        ("pip install inflight", True),
        ("pip install --no-deps inflight     # beside verl", True),
        ("pip install 'inflight[serve]'", True),
        ("it needs `inflight[serve]`.", True),
        ("uv add inflight", True),
        ("pip install 'inflight-rl[serve]'", False),
        ("pip install 'dist/inflight_rl-0.1.0-py3-none-any.whl[demo]'", False),
        ("pip install '.[demo]'  # inflight and the demo's packages", False),
    ],
)
def test_a_hint_with_the_foreign_name_is_found(line, is_foreign):
    assert any(pattern.search(line) for pattern in FOREIGN) == is_foreign


def test_the_hint_names_the_distribution_and_extras_that_it_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    text = "".join(path.read_text() for path in tracked_texts())
    named = set(re.findall(rf"{DISTRIBUTION}\[(\w+)\]|install_hint\(\W(\w+)\W\)|needing\(\"(\w+)\"", text))
    extras = {name for names in named for name in names if name}
    assert {"serve", "watch", "demo", "trl", "ray"} <= extras <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md", "CONTRIBUTING.md", "examples/README.md"])
def test_pages_that_show_commands_say_how_to_activate_the_environment(page):
    assert ". .venv/bin/activate" in (ROOT / page).read_text()


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    message = r"serving needs nothing_here: pip install 'inflight-rl\[serve\]'"
    with pytest.raises(MissingPackageError, match=message), needing("serve", "serving"):
        import nothing_here  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="nothing"), needing("serve", "serving"):
        import inflight.nothing  # noqa: F401


def test_changelog_and_quick_start_are_of_this_version():
    assert f"\n## {inflight.__version__} - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"dist/inflight_rl-{inflight.__version__}-py3-none-any.whl" in (ROOT / "docs" / "quick-start.md").read_text()
