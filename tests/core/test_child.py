"""Processes that inflight starts run the inflight that started them, whatever lies beside."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

import inflight
from inflight.core import child

PACKAGE = Path(inflight.__file__).parent
LAUNCH = (
    "with inflight.launch('tiny', max_sequences=4, threads=1, device='cpu') as engine:\n"
    "    print(engine.info.package)\n"
)


def run(*arguments: str, **options) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.medium
def test_files_in_the_working_directory_are_not_modules_of_the_engine(tmp_path):
    there = tmp_path / "data"
    there.mkdir()
    for name in ("queue", "torch", "zmq", "inflight"):
        (there / f"{name}.py").write_text("raise SystemExit('executed what lies in the working directory')\n")
    script = tmp_path / "train.py"
    script.write_text("import inflight\n" + LAUNCH)
    assert run(str(script), cwd=there).strip() == str(PACKAGE)


def copy_package(directory: Path) -> None:
    """With version 0.9.9."""
    shutil.copytree(PACKAGE, directory / "inflight", ignore=shutil.ignore_patterns("__pycache__"))
    init = directory / "inflight" / "core" / "version.py"
    init.write_text(init.read_text().replace(f'__version__ = "{inflight.__version__}"', '__version__ = "0.9.9"'))


@pytest.mark.medium
def test_what_a_child_spawns_has_the_inflight_of_the_child(tmp_path):
    """As vLLM's workers have, in an interpreter that has none."""
    copy_package(tmp_path)
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "told.py").write_text("def tell():\n    import inflight\n    print(inflight.__version__, flush=True)\n")
    (modules / "spawner.py").write_text(
        "import multiprocessing, told\n"
        "process = multiprocessing.get_context('spawn').Process(target=told.tell)\n"
        "process.start()\n"
        "process.join()\n"
    )
    program = (
        f"import subprocess, sys; sys.path.insert(0, {str(tmp_path)!r}); from inflight.core import child\n"
        "subprocess.run(child.command('spawner', python=sys.executable), check=True)\n"
    )
    assert run("-c", program, env=os.environ | {"PYTHONPATH": str(modules)}).split() == ["0.9.9"]


@pytest.mark.slow
def test_an_engine_runs_the_inflight_of_its_trainer(tmp_path):
    """Which is found by sys.path alone, and which another one that is installed does not replace."""
    copy_package(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import inflight\n" + LAUNCH + "print(engine.info.version)"
    )
    location, version = run("-c", program).split()
    assert (location, version) == (str(tmp_path / "inflight"), "0.9.9")


@pytest.mark.medium
def test_a_child_finds_what_its_parent_found_last(tmp_path):
    (tmp_path / "only_there.py").write_text("where = 'there'\n")
    (tmp_path / "json.py").write_text("raise SystemExit('a file replaced the standard library')\n")
    sys.path.append(str(tmp_path))
    try:
        command = child.command("timeit", "-n1", "-r1", "import only_there, json; print(only_there.where)")
    finally:
        sys.path.remove(str(tmp_path))
    assert json.loads(command[3])["packages"]["inflight"] == str(PACKAGE / "__init__.py")
    assert run(*command[1:], env=os.environ | {"PYTHONPATH": ""}).splitlines()[0] == "there"
