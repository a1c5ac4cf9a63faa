"""Feeds a decoder what no honest process sends: valid input that is changed, as a tree of values and as bytes.

Valid messages are made from their types, so that a new field or a new message is fuzzed as soon as it exists. What a
decoder does with changed input is held against bounds: it returns, or raises an InflightError, soon and without taking
much memory. `fuzz_targets.py` has the decoders.
"""

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect

from inflight.core.errors import InflightError

Parts = list[bytes]
"""What comes at once: the parts of a message, or several messages."""

BYTES_PER_BYTE = 128
"""What a decoder may allocate per byte of input: an empty map is one byte on the wire, and 88 in Python."""
SLACK_BYTES = 1 << 20
LIMIT_MS = 200
"""Bound on the CPU time for an input of at most 64 KiB, and on that for each 64 KiB of a larger one."""
SAMPLE_BYTES, SAMPLE_MS = 2048, 0.2
"""What a sample that a GroupStart announces may take beside that; there are at most MAX_SAMPLES to a group."""
_CORPUS = 300
_KEPT_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder, and what it makes of what it decoded."""

    name: str
    make: Callable[[random.Random], Parts]
    """Makes valid input."""
    run: Callable[[Parts], int]
    """Decodes, and returns how many samples the input announced. Raises InflightError for what it refuses."""
    open: "Callable[[bytes], Tree] | None" = None
    """Reads a part of valid input as a tree."""
    slack_bytes: int = SLACK_BYTES
    share: float = 1.0
    """How many inputs it gets, beside others."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A message as values that can be changed: maps, lists, and what they hold."""

    root: Any
    close: Callable[[Any], bytes]


@dataclass(slots=True)
class Report:
    """What became of all inputs of a target."""

    num_inputs: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """Counts of "valid" and of the classes of errors."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The first few: what is wrong, and the input in hex."""
    num_failures: int = 0
    slowest_ms: float = 0.0
    """For an input of at most 64 KiB that announces no sample; slowest_bytes is its size."""
    slowest_bytes: int = 0
    most_bytes: int = 0
    """The most that one input made the decoder allocate."""
    most_bytes_share: float = 0.0
    """The largest share of its bound on memory that an input used."""

    def fail(self, what: str, parts: Parts) -> None:
        self.num_failures += 1
        if len(self.failures) < _KEPT_FAILURES:
            self.failures.append({"what": what, "input": [part.hex() for part in parts]})


def fuzz(target: Target, count: int, seed: int = 0) -> Report:
    """Try so many inputs. They depend on the seed and the types alone."""
    draw, report = random.Random(f"{target.name} {seed}"), Report()
    corpus = [target.make(draw) for _ in range(min(count, _CORPUS))]
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        for _ in range(count):
            _try(target, mutate(draw, draw.choice(corpus), corpus, target.open), report)
    finally:
        if not was_tracing:
            tracemalloc.stop()
    return report


def _try(target: Target, parts: Parts, report: Report) -> None:
    report.num_inputs += 1
    num_bytes = sum(map(len, parts))
    outcome, took_bytes, took_ms, samples = _measure(target, parts)
    slack_ms = samples * SAMPLE_MS + LIMIT_MS * (num_bytes // 65536 + 1)
    for _ in range(3):
        if took_ms > slack_ms:  # the garbage collector may have run, or the processor was slow
            took_ms = min(took_ms, _measure(target, parts)[2])
    may_take = BYTES_PER_BYTE * num_bytes + target.slack_bytes + samples * SAMPLE_BYTES
    name = outcome if isinstance(outcome, str) else "FAILED"
    report.outcomes[name] = report.outcomes.get(name, 0) + 1
    if isinstance(outcome, Exception):
        report.fail(repr(outcome), parts)
    if took_ms > slack_ms:
        report.fail(f"it took {took_ms:.0f} ms, and {slack_ms:.0f} ms are the limit", parts)
    if took_bytes > may_take:
        report.fail(f"it allocated {took_bytes:,} bytes, and {may_take:,} are the limit", parts)
    if took_ms > report.slowest_ms and not samples and num_bytes <= 65536:
        report.slowest_ms, report.slowest_bytes = took_ms, num_bytes
    report.most_bytes = max(report.most_bytes, took_bytes)
    report.most_bytes_share = max(report.most_bytes_share, took_bytes / may_take)


def _measure(target: Target, parts: Parts) -> tuple[str | Exception, int, float, int]:
    """What came of it, the most bytes that were allocated meanwhile, milliseconds of CPU time, which a busy
    machine does not stretch, and samples announced."""
    outcome, samples = "valid", 0
    tracemalloc.reset_peak()
    before, began = tracemalloc.get_traced_memory()[0], time.thread_time()
    try:
        samples = target.run(parts)
    except InflightError as error:
        outcome = type(error).__name__
    except Exception as error:  # reported
        outcome = error
    took_ms = (time.thread_time() - began) * 1e3
    return outcome, tracemalloc.get_traced_memory()[1] - before, took_ms, samples


# ---- valid values, by type --------------------------------------------------------------------------------------

_TEXT = (
    "",
    "a",
    "margin",
    "model.layers.0.self_attn.q_proj.weight",
    "float32",
    "<f4",
    "stop",
    "weight_versions",
    "é\0",
)


def value(kind: inspect.Type, draw: random.Random, depth: int = 0) -> Any:
    """A value of a type. Raises TypeError for a type that none of our messages has had so far: make it here then."""
    match kind:
        case inspect.StructType():
            return _struct(kind, draw, depth)
        case inspect.UnionType():
            return value(draw.choice(kind.types), draw, depth)
        case inspect.IntType():
            low = 0 if kind.ge is None else kind.ge
            high = low + draw.choice((3, 3, 3, 10, 1000, 2**31 - 1))
            return draw.randint(low, high if kind.le is None else min(high, kind.le))
        case inspect.FloatType():
            return draw.choice((0.0, 0.5, 1.0, -1.0, draw.random() * 10))
        case inspect.BoolType():
            return draw.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.StrType():
            return draw.choice(_TEXT)
        case inspect.LiteralType():
            return draw.choice(kind.values)
        case inspect.BytesType():
            return draw.randbytes(draw.randrange(9))
        case inspect.ListType():
            return [value(kind.item_type, draw, depth + 1) for _ in range(draw.randrange(4))]
        case inspect.VarTupleType():
            return tuple(value(kind.item_type, draw, depth + 1) for _ in range(draw.randrange(4)))
        case inspect.TupleType():
            return tuple(value(item, draw, depth + 1) for item in kind.item_types)
        case inspect.DictType():
            keys = [value(kind.key_type, draw, depth + 1) for _ in range(draw.randrange(4))]
            return {key: value(kind.value_type, draw, depth + 1) for key in keys}
        case inspect.AnyType():
            return _anything(draw, depth)
        case inspect.RawType():
            return msgspec.Raw(msgspec.msgpack.encode(_anything(draw, depth)))
        case _:
            raise TypeError(f"no value of type {kind} is known")


def _struct(kind: inspect.StructType, draw: random.Random, depth: int) -> msgspec.Struct:
    """Some fields have their defaults; more of them where the type refuses what was drawn."""
    for share in (draw.choice((0.1, 0.8)), 0.9, 0.9, 1.0):
        fields = {
            field.name: value(field.type, draw, depth + 1)
            for field in kind.fields
            if field.required or draw.random() >= share
        }
        try:
            return kind.cls(**fields)
        except ValueError:
            if share == 1.0:
                raise
    raise AssertionError


def _anything(draw: random.Random, depth: int) -> Any:
    match draw.randrange(4 if depth > 4 else 6):
        case 0:
            return draw.choice(_TEXT)
        case 1:
            return draw.randrange(-5, 300)
        case 2:
            return draw.random()
        case 3:
            return draw.choice((None, True, False, b"\x00\x01"))
        case 4:
            return [_anything(draw, depth + 1) for _ in range(draw.randrange(4))]
        case _:
            return {draw.choice(_TEXT): _anything(draw, depth + 1) for _ in range(draw.randrange(4))}


# ---- changes ----------------------------------------------------------------------------------------------------

_NUMBERS = [
    sign * (2**bits) + off
    for bits in (0, 7, 8, 15, 16, 31, 32, 40, 53, 62, 63)
    for sign in (1, -1)
    for off in (-1, 0, 1)
]
_NUMBERS = sorted({n for n in _NUMBERS if -(2**63) <= n < 2**64} | {2, 3, 4, 65535, 65537, 2**64 - 1})
_ODD = (None, True, "", "x" * 300, "\0", "\U0010ffff", b"", b"\xff" * 40, [], {}, [[]], {"": {}}, [0] * 200)
_ODD += (float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, 0.5)
_HEADS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xdc\xff\xff",
)
_HEADS += (
    b"\xc9\xff\xff\xff\xff\xff",
    b"\xd6\xff\xff\xff\xff\xff",
    b"\xd7\xff" + b"\xff" * 8,
    b"\xc1",
    b"\x80",
    b"\x90",
)


def mutate(draw: random.Random, parts: Parts, corpus: list[Parts], open_: Callable[[bytes], Tree] | None) -> Parts:
    """Change a copy of the input, once or a few times."""
    parts = list(parts)
    trees = open_
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(parts)) if parts else -1
        kind = draw.random()
        if at < 0 or kind < 0.05:
            _change_parts(draw, parts, draw.choice(corpus))
        elif trees is not None and kind < 0.65:
            parts[at] = _change_tree(draw, parts[at], trees)
        else:
            trees = None  # what was changed as bytes may not be a tree any more
            parts[at] = _change_bytes(draw, parts[at], draw.choice(corpus))
    return parts


def _change_parts(draw: random.Random, parts: Parts, other: Parts) -> None:
    if draw.random() < 0.5 and parts:
        del parts[draw.randrange(len(parts))]
    else:
        parts.insert(draw.randint(0, len(parts)), draw.choice(parts + other or [b""]))


def _change_tree(draw: random.Random, data: bytes, open_: Callable[[bytes], Tree]) -> bytes:
    """Change a node, at any depth alike."""
    nodes: list[tuple[Any, Any]] = []
    try:
        tree = open_(data)
        _walk(tree.root, nodes)
    except (msgspec.DecodeError, ValueError, RecursionError):  # it was changed too much already, or is none
        return _change_bytes(draw, data, [data])
    if not nodes:
        return _change_bytes(draw, data, [data])
    holder, key = draw.choice(nodes)
    match draw.randrange(12):
        case 0:
            del holder[key]
        case 1:
            other, other_key = draw.choice(nodes)
            holder[key] = other[other_key]
        case 2 if isinstance(holder, list):
            holder.extend([holder[key]] * draw.choice((1, 2, 100, 1000)))
        case 2:
            holder[draw.choice(_TEXT)] = holder[key]
        case 3:
            holder[key] = draw.choice(_ODD)
        case 4:
            for _ in range(draw.choice((1, 2, 100))):
                holder[key] = [holder[key]] if draw.random() < 0.5 else {"a": holder[key]}
        case 5 if isinstance(holder[key], int):
            holder[key] += draw.choice((-1, 1))
        case _:
            holder[key] = draw.choice(_NUMBERS)
    try:
        return tree.close(tree.root)
    except (TypeError, ValueError, OverflowError, RecursionError):  # no message can hold it; as bytes it may go
        return _change_bytes(draw, data, [data])


def _walk(node: Any, found: list[tuple[Any, Any]]) -> None:
    """Collect where every value lies below this node: what holds it, and its key or index."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        found.append((node, key))
        _walk(node[key], found)


def _change_bytes(draw: random.Random, data: bytes, other: Parts) -> bytes:
    at = draw.randint(0, len(data))
    head, tail = data[:at], data[at:]
    match draw.randrange(10):
        case 0:
            return head
        case 1:
            return head + tail[draw.randint(1, 16) :]
        case 2:
            return head + draw.randbytes(draw.randint(1, 16)) + tail
        case 3:
            return head + draw.choice(_HEADS) + tail[draw.choice((0, 1, 5)) :]
        case 4:
            return (
                head
                + draw.choice((b"\x91", b"\x81\xa1a", b"\x81\x90", b"\x82\xa1a\x91")) * draw.choice((3, 50, 2000))
                + tail
            )
        case 5:
            return head + head[-draw.randint(1, 64) :] * draw.choice((1, 8, 64)) + tail
        case 6:
            source = draw.choice(other or [b""])
            return head + source[draw.randint(0, len(source)) :]
        case 7:  # a number where columns and counts lie
            number = draw.choice(_NUMBERS) % 2**64
            size, order = draw.choice(((8, "<Q"), (8, ">Q"), (4, "<I"), (4, ">I"), (2, ">H")))
            at = max(0, len(data) - 8 * draw.randint(1, 1 + len(data) // 8)) + draw.choice((0, 0, 0, 4))
            return data[:at] + struct.pack(order, number % 256**size) + data[at + size :]
        case _:
            changed = bytearray(data or b"\0")
            for _ in range(draw.choice((1, 1, 2, 8))):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            return bytes(changed)
