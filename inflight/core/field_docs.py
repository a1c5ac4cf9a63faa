"""Docstrings of fields: the strings below the fields of a class, which Python does not keep."""

import ast
import inspect
from functools import cache


def docs_of(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a class, by name. Paragraphs are single lines, with an empty line between
    them. A field without a docstring has the docstring of the base class, or of the class `DESCRIBED_BY`."""
    docs: dict[str, str] = docs_of(kind.DESCRIBED_BY) if hasattr(kind, "DESCRIBED_BY") else {}
    for base in reversed(kind.__mro__):
        try:
            module = inspect.getsourcefile(base)
        except TypeError:  # a class of Python or of an extension module
            continue
        if module is not None:
            docs |= _classes_of(module).get(base.__name__, {})
    return docs


@cache
def _classes_of(path: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the fields of each class in a source file."""
    with open(path, encoding="utf-8") as file:
        body = ast.parse(file.read()).body
    return {node.name: dict(_fields_of(node)) for node in body if isinstance(node, ast.ClassDef)}


def _fields_of(node: ast.ClassDef) -> list[tuple[str, str]]:
    docs = []
    for field, text in zip(node.body, node.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                paragraphs = inspect.cleandoc(doc).split("\n\n")
                docs.append((name, "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)))
    return docs
