"""Starts child processes that run the parent's copy of inflight.

A child imports inflight from the same place as its parent. It imports nothing from the working directory, where a file
might have the name of a module. This file has two roles. Imported, it makes the command line of a child. Run by path,
it is the child's first code, so it imports nothing of ours. It remains the child's main module: processes that the
child starts by `multiprocessing` (as vLLM starts its workers) run it first, too.
"""

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

_PACKAGES = ("inflight", "inflight_kernels")
_FOUND = "INFLIGHT_CHILD_PACKAGES"
"""Environment variable with the packages' paths, for the child's own processes."""


def command(module: str, *arguments: str, python: str = "", kernels: bool = True) -> list[str]:
    """Return the command line that runs a module of inflight as a program.

    python: another interpreter with its own packages; of ours it gets only inflight. "": the present interpreter.
    kernels: False for a program without torch, because the kernels import torch."""
    packages = {}
    for name in _PACKAGES if kernels else _PACKAGES[:1]:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            packages[name] = str(Path(spec.origin).absolute())
    paths = [path for path in sys.path if path and os.path.realpath(path) != _working_directory()]
    found = {"packages": packages, "paths": [] if python else paths}
    return [python or sys.executable, "-P", __file__, json.dumps(found), module, *arguments]


def _working_directory() -> str | None:
    try:
        return os.path.realpath(os.getcwd())
    except FileNotFoundError:  # it was removed
        return None


def main() -> None:
    os.environ[_FOUND], module = sys.argv[1], sys.argv[2]
    _find_packages()
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__")


def _find_packages() -> None:
    found = json.loads(os.environ[_FOUND])
    sys.path += [path for path in found["paths"] if path not in sys.path]  # last, so that they replace nothing
    for name, origin in found["packages"].items():
        spec = importlib.util.spec_from_file_location(
            name, origin, submodule_search_locations=[str(Path(origin).parent)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _find_packages()
