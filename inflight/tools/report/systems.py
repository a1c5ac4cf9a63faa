"""What was measured for its staleness, by a name that tells it from the others on the page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inflight.tools.report.results import Result, Servers, Staleness, Sweep

MODES = {"inflight": "in flight", "one_step_off": "one step off", "sync": "synchronous"}
MODE_COLOURS = {"inflight": "blue", "one_step_off": "green", "sync": "orange"}
_SERVER_COLOURS = {"vllm": "red", "sglang": "purple"}
_SETTINGS = ("model", "sequences", "tokens", "publish_every", "backend", "dtype")
"""What is said of a loop, or a server, where not all loops, or servers, of the page agree in it."""


@dataclass(frozen=True, slots=True)
class System:
    """An engine in a training loop, or a server, under one configuration."""

    name: str
    result: Result
    """The file that it stands in."""
    found: Staleness

    @property
    def is_served(self) -> bool:
        return self.found.target is not None

    @property
    def is_of_sweep(self) -> bool:
        return isinstance(self.result.found, Sweep)

    @property
    def colour(self) -> str:
        """That of its schedule, or of the server's kind."""
        if self.is_served:
            return _SERVER_COLOURS.get(self.found.api, "blue")
        return MODE_COLOURS.get(self.found.mode, "blue")


def systems_of(results: Sequence[Result]) -> list[System]:
    """All systems of the files, in their order, under names that differ."""
    systems = [system for result in results for system in _systems_in(result)]
    loops, servers = ([one for one in systems if one.is_served == served] for served in (False, True))
    varying = {False: _varying(loops), True: _varying(servers)}
    systems = [replace(one, name=", ".join([one.name, *_said(one.found, varying[one.is_served])])) for one in systems]
    if loops:
        systems = [replace(one, name=f"server: {one.name}") if one.is_served else one for one in systems]
    names = told_apart([one.name for one in systems], [one.result for one in systems])
    return [replace(one, name=name) for one, name in zip(systems, names, strict=True)]


def _varying(systems: Sequence[System]) -> list[str]:
    return [name for name in _SETTINGS if len({getattr(one.found, name) for one in systems}) > 1]


def told_apart(names: Sequence[str], results: Sequence[Result]) -> list[str]:
    """The names; those that several have with their files, and where that is not enough with numbers."""
    shared, seen = Counter(names), Counter[str]()
    told = []
    for name, result in zip(names, results, strict=True):
        whole = f"{name} ({result.name})" if shared[name] > 1 else name
        seen[whole] += 1
        told.append(f"{whole}, {seen[whole]}" if seen[whole] > 1 else whole)
    return told


def _systems_in(result: Result) -> list[System]:
    found: Any = result.found
    if isinstance(found, Staleness):
        return [System(_own_name(found), result, found)]
    if isinstance(found, Servers):
        return [System(name, result, one) for name, one in found.servers.items()]
    if isinstance(found, Sweep):
        return [System(_own_name(one), result, one) for one in found.points]
    return []


def _own_name(found: Staleness) -> str:
    if found.target is not None:
        return f"{found.api or 'server'}, pause {found.pause or 'none'}"
    slots = {1: "one slot", 2: "two slots"}.get(found.slots, f"{found.slots} slots")
    return f"{MODES.get(found.mode, found.mode)}, {slots}"


def _said(found: Staleness, names: Sequence[str]) -> list[str]:
    words = {
        "sequences": f"{found.sequences} sequences",
        "tokens": f"{found.tokens} tokens",
        "publish_every": f"publish every {found.publish_every}",
        "backend": f"by {found.backend}",
    }
    return [words.get(name, str(getattr(found, name))) for name in names]
