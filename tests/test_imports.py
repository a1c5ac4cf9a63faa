"""What imports what: `import inflight` is light, nothing imports upwards, and nothing imports in a circle."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import inflight_kernels
import pytest

import inflight

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "kernels": set(),
    "weights": {"core", "kernels"},
    "model_checks": {"core", "weights"},
    "stream": {"core"},
    "observability": {"core"},
    "chat": {"core"},
    "engine": {"core", "kernels", "weights", "model_checks", "stream", "observability", "chat"},
    "training": {"core", "kernels", "weights", "model_checks", "stream", "observability"},
    "server": {"core", "chat", "weights", "stream", "observability", "engine", "training"},
    "fleet": {"core", "weights", "stream", "observability", "engine", "training", "server"},
    "episodes": {"core", "chat", "stream", "observability", "engine", "training", "server", "fleet"},
    "run": {"core", "weights", "stream", "training", "fleet"},
    "integrations": {
        *("core", "kernels", "weights", "model_checks", "stream"),
        *("engine", "training", "fleet", "episodes"),
    },
    "tools": {
        *("core", "kernels", "weights", "stream", "observability", "server"),
        *("engine", "training", "fleet", "episodes", "run"),
    },
}
"""Maps each part, in the order of docs/structure.md, to the parts below it that it may import."""

PROGRAM = """
import sys
import inflight
heavy = sorted(name for name in ("torch", "transformers", "zmq", "triton", "trl") if name in sys.modules)
assert not heavy, heavy
import torch
assert all(getattr(inflight, name) is not None for name in inflight.__all__)
"""


@pytest.mark.medium
def test_import_loads_neither_torch_nor_transformers_nor_zmq():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_type_checkers_see_every_public_name_where_it_is_loaded_from():
    assert inflight.__file__ is not None
    tree = ast.parse(Path(inflight.__file__).read_text())
    [for_types] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in for_types.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names} == inflight._HOME


def our_sources() -> dict[str, str]:
    """Maps the names of all modules to their text. `inflight` itself is left out: whatever module is imported imports
    it, and it loads the modules of its public names when these are first used."""
    sources = {}
    for package in (inflight, inflight_kernels):
        assert package.__file__ is not None
        root = Path(package.__file__).parent
        for path in root.rglob("*.py"):
            parts = (root.name, *path.relative_to(root).with_suffix("").parts)
            sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    del sources["inflight"]
    return sources


def imports_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Maps each module to those of the others that it imports anywhere: at its top, in functions, for types alone."""
    return {
        name: {imported for imported in _imported(text, sources) if imported in sources and imported != name}
        for name, text in sources.items()
    }


def _imported(text: str, sources: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:  # a module of a package, or a name in a module
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in sources else str(node.module)


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in turn, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def upward(imports: dict[str, set[str]]) -> list[str]:
    """Imports that `MAY_IMPORT` does not allow."""
    return [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in others
        if part(other) != part(name) and part(other) not in MAY_IMPORT[part(name)]
    ]


def part(module: str) -> str:
    """The part that a module belongs to."""
    return "kernels" if module.startswith("inflight_kernels") else module.split(".")[1]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return imports_of(our_sources())


def test_no_modules_import_one_another_in_a_circle(imports):
    assert len(imports) > 100
    assert not circle(imports)


def test_no_part_imports_from_above(imports):
    assert not upward(imports)
    below: set[str] = set()
    for name, allowed in MAY_IMPORT.items():
        assert allowed <= below, f"{name} is allowed what stands after it"
        below.add(name)


@pytest.mark.medium
def test_no_module_imports_the_package_that_imports_all():
    """`inflight` loads any module when its public names are used, so that importing it is importing upwards."""
    for name, text in our_sources().items():
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not any(isinstance(node, ast.ImportFrom) and node.module == "inflight" for node in nodes), name
        plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert "inflight" not in plain, name


PLANTED = {
    "inflight.core.a": "import inflight.core.b",
    "inflight.core.b": "def later():\n    from inflight.core import c",
    "inflight.core.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from inflight.core.a import Name",
    "inflight.stream.d": "from inflight.core.a import Name",
    "inflight.stream.e": "from inflight.engine.f import Name",
    "inflight.engine.f": "import inflight_kernels.g as g",
    "inflight_kernels.g": "",
}


def test_a_circle_is_found_also_in_functions_and_in_imports_for_types():
    found = circle(imports_of(PLANTED))
    assert set(found) == {"inflight.core.a", "inflight.core.b", "inflight.core.c"}
    assert not circle(imports_of(PLANTED | {"inflight.core.c": ""}))


def test_an_upward_import_is_found():
    assert upward(imports_of(PLANTED)) == ["inflight.stream.e imports inflight.engine.f"]
