"""Several threads may be the first to read a type."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import inflight

RACE = """
import sys, threading
import msgspec
from inflight.core.decoders import convert, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)  # threads change places as often as they can
plain = {"a": 1, "b": {"x": 1, "y": [1]}, "c": [{"x": 2, "y": []}]}
packed, text = msgspec.msgpack.encode(plain), msgspec.json.encode(plain)
WAYS = {
    "msgpack": lambda kind: msgpack_decoder(kind).decode(packed),
    "json": lambda kind: json_decoder(kind).decode(text),
    "convert": lambda kind: convert(plain, kind),
    "by msgspec itself": lambda kind: msgspec.msgpack.decode(packed, type=kind),
}
way, rounds, read = sys.argv[1], int(sys.argv[2]), []
for _ in range(rounds):
    Inner = msgspec.defstruct("Inner", [("x", "int"), ("y", "list[int]")])
    globals()["Inner"] = Inner
    Outer = msgspec.defstruct("Outer", [("a", "int | str"), ("b", "Inner"), ("c", "list[Inner]")], module=__name__)
    together = threading.Barrier(3)
    def use(kind=Outer):
        together.wait()
        read.append(msgspec.to_builtins(WAYS[way](kind)))
    threads = [threading.Thread(target=use) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
assert read == [plain] * 3 * rounds, len(read)
"""


def _race(way: str, rounds: int) -> int:
    """The exit status. rounds: number of types that three threads read at once."""
    command = [sys.executable, "-c", RACE, way, str(rounds)]
    return subprocess.run(command, capture_output=True, timeout=300).returncode


@pytest.mark.medium
def test_first_use_by_three_threads():
    assert [_race(way, 200) for way in ("msgpack", "json", "convert")] == [0, 0, 0]


def test_the_race_is_one():
    """Without the lock, the same threads crash, here within 30 rounds. If they do not, msgspec no longer needs it."""
    assert _race("by msgspec itself", 5000) != 0


def test_all_code_decodes_through_decoders():
    """Except where no type is given, and where a hook is (the demo reads its options before it has threads)."""
    package, found = Path(inflight.__file__).parent, []
    for path in package.rglob("*.py"):
        text = path.read_text()
        calls = re.findall(r"msgspec\.(?:json|msgpack)\.(?:decode\([^\n]*type=|Decoder\()|msgspec\.convert\(", text)
        if path.name != "decoders.py":
            found += [f"{path.relative_to(package)}: {call}" for call in calls]
            found += re.findall(r"from msgspec\.(?:msgpack|json) import", text)
    assert not found
