"""Python processes that run parts of inflight, and where they find it.

A child imports the same inflight as its parent, from the same place, and nothing from the working directory, where a
file may have the name of a module. This file is both: imported, it makes the command line of a child; run by path, it
is the child's first code (and therefore imports nothing of ours). As it stays the child's main module, it is also the
first code of processes that the child has `multiprocessing` start, as vLLM does for its workers.
"""

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

_PACKAGES = ("inflight", "inflight_kernels")
_FOUND = "INFLIGHT_CHILD_PACKAGES"
"""The variable that tells a child's own processes where these are."""


def command(module: str, *arguments: str, python: str = "", kernels: bool = True) -> list[str]:
    """The command line that runs a module of inflight as a program. python: another interpreter, which has packages of
    its own and gets inflight alone of ours; "" is the one that runs this. kernels: False for a program without torch,
    which they import."""
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
    except FileNotFoundError:  # somebody has removed it
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
