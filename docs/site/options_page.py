"""Writes the generated parts of docs/options.md from the docstrings of fields: `make options`.

A comment `<!-- options of MODULE.CLASS -->` or `<!-- flags of MODULE.CLASS -->` starts such a part, and `<!-- end -->`
ends it.
"""

import dataclasses
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from inflight.core.option import docs_of
from inflight.tools.command_line import choices_of, spelling_of

WIDTH = 120
PART = re.compile(r"(<!-- (options|flags) of ([\w.]+)\.(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return a page with its generated parts written again."""

    def part(found: re.Match[str]) -> str:
        kind = getattr(import_module(found[3]), found[4])
        entries = [options_of, flags_of][found[2] == "flags"](kind)
        return "\n".join([found[1], *(wrapped(*entry) for entry in entries), "", found[5]])

    return PART.sub(part, page)


def options_of(kind: type) -> list[tuple[str, str, str]]:
    """Return name, default and docstring of each field of a struct or dataclass, as in Python."""
    docs, entries = docs_of(kind), []
    is_struct = issubclass(kind, msgspec.Struct)
    for field in msgspec.structs.fields(kind) if is_struct else dataclasses.fields(kind):
        missing = msgspec.NODEFAULT if is_struct else dataclasses.MISSING
        factory: Any = field.default_factory
        default: Any = field.default if factory is missing else factory()
        text = "required" if default is missing else f"default `{_shown(default)}`"
        entries.append((f"`{field.name}`", text, docs[field.name]))
    return entries


def _shown(default: Any) -> str:
    """Return a default as in Python. A struct shows the fields that differ from its own defaults."""
    if isinstance(default, msgspec.Struct):
        plain = type(default)()
        given = {name: getattr(default, name) for name in default.__struct_fields__}
        differing = {name: value for name, value in given.items() if value != getattr(plain, name)}
        return f"{type(default).__name__}({', '.join(f'{name}={value!r}' for name, value in differing.items())})"
    return f'"{default}"' if isinstance(default, str) else repr(default)


def flags_of(kind: type) -> list[tuple[str, str, str]]:
    """Return flag, default and docstring of each field of a dataclass, as on the command line."""
    docs, kinds, entries = docs_of(kind), get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        about, spelling = field.metadata["option"], spelling_of(field, kinds[field.name])
        names = about.names or (f"--{field.name.replace('_', '-')}",)
        name = about.metavar if about.is_argument else "`, `".join(names)
        choices = choices_of(kinds[field.name])
        shown = about.shown if isinstance(about.shown, str) else f"`{spelling.default}`"
        is_empty = about.shown is True and (spelling.default in (None, "", [], ()) or spelling.default is False)
        default = "required" if about.is_argument else "" if is_empty else f"default {shown}"
        entries.append((f"`{name}`", ", ".join(filter(None, [" | ".join(choices), default])), docs[field.name]))
    return entries


def wrapped(name: str, about: str, doc: str) -> str:
    """Return an item of a list. A file of docs/ in the text becomes a link."""
    text = f"{name} ({about}): {' '.join(doc.split())}" if about else f"{name}: {' '.join(doc.split())}"
    text = re.sub(r"\bdocs/([\w-]+\.md)((?:#[\w-]+)?)", r"[\1](\1\2)", text)
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/options.md")
    path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
