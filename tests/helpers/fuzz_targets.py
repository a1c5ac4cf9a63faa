"""Everything that decodes what another process sent, as targets of `fuzzer.py`."""

import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from fuzzer import Parts, Target, Tree, value
from made_frames import open_frame
from msgspec import inspect

from inflight.core.columns import COLUMNS, MASK_OFFSETS, REQUIRED, TOKENS, TokenColumn, find_column
from inflight.core.errors import FrameError, InflightError, from_wire
from inflight.core.frames import Finish, FrameHeader, GroupStart, TokenFrame
from inflight.core.layout import WeightLayout
from inflight.core.messages import (
    Call,
    Failed,
    FromEngine,
    SharedMemoryDescriptor,
    Status,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    read,
)
from inflight.core.rollout import Rollout
from inflight.core.sampling import MAX_SAMPLES
from inflight.engine.loop.engine import Engine
from inflight.engine.loop.requests import Requests
from inflight.engine.process.process import EngineProcess
from inflight.engine.process.verbs import Verbs
from inflight.observability.staleness_meter import StalenessMeter
from inflight.stream.assembler import Assembler
from inflight.stream.wire import ToReader, ToWriter, encode, to_reader, to_writer
from inflight.stream.writer import StreamWriter
from inflight.weights import delta
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.transports.broadcast import BroadcastOrigin, Join
from inflight.weights.transports.files import FileOrigin, read_changes, read_version, write_version

_ASSEMBLER_BYTES = 24 << 20
"""The first pages of a TokenStore with every column at its widest, and again while one grows."""
_READ_OUT = 40
"""Of assemblers with more samples, those that are unfinished are not read out, which takes long."""


@contextmanager
def targets() -> Iterator[list[Target]]:
    """All of them. Those that have a socket or a file let it go at the end."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_quiet())
        yield [
            Target("decode_to_engine", _makes(ToEngine), _decodes(decode_to_engine), open_message),
            Target("decode_from_engine", _makes(FromEngine), _decode_from_engine, open_message),
            *_raw_parts(),
            _verbs(),
            Target("to_writer", _makes(ToWriter), _decodes(to_writer), open_message),
            Target("to_reader", _makes(ToReader), _decodes(to_reader), open_message),
            stack.enter_context(_writer(directory)),
            Target("TokenFrame.decode", _make_frame, _decode_frame, open_frame_tree),
            Target("Assembler.add", _make_frames, _assemble, open_frame_tree, _ASSEMBLER_BYTES, 0.3),
            *_version_files(directory),
            _delta(),
            _slot_descriptors(directory),
        ]


@contextmanager
def _quiet() -> Iterator[None]:
    """What is refused is not logged."""
    logger = logging.getLogger("inflight.stream.writer")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


# ---- messages ---------------------------------------------------------------------------------------------------


def open_message(data: bytes) -> Tree:
    return Tree(msgspec.msgpack.decode(data), msgspec.msgpack.encode)


def _makes(kind: Any) -> Callable[[random.Random], Parts]:
    info = inspect.type_info(kind)
    return lambda draw: [encode(value(info, draw))]


def _decodes(decode: Callable[[bytes], object]) -> Callable[[Parts], int]:
    def run(parts: Parts) -> int:
        for part in parts:
            decode(part)
        return 0

    return run


def _decode_from_engine(parts: Parts) -> int:
    for part in parts:
        message = decode_from_engine(part)
        if isinstance(message, Failed):
            assert isinstance(from_wire(message.kind, message.message), InflightError)
    return 0


def _raw_parts() -> Iterator[Target]:
    """What transports send inside of messages, and what a verb returned."""
    for kind in (FileOrigin, BroadcastOrigin, Join, Status):
        decoder = msgspec.msgpack.Decoder(kind)
        yield Target(
            f"read {kind.__name__}", _makes(kind), _decodes(lambda data, d=decoder: read(d, data)), open_message
        )


def _verbs() -> Target:
    """Arguments of all verbs, which are read as the parameters of the methods; the methods are not called."""
    verbs = Verbs(*(owner.__new__(owner) for owner in (Engine, Requests, EngineProcess)))
    kinds = {name: inspect.type_info(decoder.type) for name, decoder in verbs._decoders.items()}
    verbs._methods = dict.fromkeys(verbs._methods, lambda **arguments: None)

    def make(draw: random.Random) -> Parts:
        verb = draw.choice(sorted(kinds))
        return [encode(Call(ticket=1, verb=verb, arguments=msgspec.Raw(encode(value(kinds[verb], draw)))))]

    def run(parts: Parts) -> int:
        for part in parts:
            message = decode_to_engine(part)
            if isinstance(message, Call):
                verbs.answer(message)
        return 0

    return Target("Verbs.answer", make, run, open_message)


# ---- the stream -------------------------------------------------------------------------------------------------


@contextmanager
def _writer(directory: Path) -> Iterator[Target]:
    """A writer with frames that wait, to which strangers write. It refuses without raising anything."""
    writer = StreamWriter(f"ipc://{directory}/stream", spill_directory=directory)
    info = inspect.type_info(ToWriter)

    def make(draw: random.Random) -> Parts:
        return [draw.choice((b"reader", b"other", draw.randbytes(5))), encode(value(info, draw))]

    def run(parts: Parts) -> int:
        while writer.kept.next - writer.kept.oldest < 8:
            writer.kept.append(bytes(100))
        if parts:  # ZeroMQ puts the address first
            writer._hear(list(parts))
        assert writer.kept.oldest <= writer._next_to_send <= writer.kept.next
        assert writer._bytes_on_way >= 0
        return 0

    yield Target("StreamWriter._hear", make, run, open_message)
    writer.close()


def open_frame_tree(data: bytes) -> Tree:
    """The header of a frame. Columns stay as they are."""
    if data[:4] != b"IFF1":
        raise msgspec.DecodeError("no frame")
    return Tree(*open_frame(data))


_HEADER, _START = inspect.type_info(FrameHeader), inspect.type_info(GroupStart)


def _make_frame(draw: random.Random) -> Parts:
    return [draw.choice(_make_frames(draw))]


def _make_frames(draw: random.Random) -> Parts:
    """What an engine may send one after another: groups begin, draw tokens and end."""
    numbers = np.random.default_rng(draw.getrandbits(32))
    num_groups = num_requests = 0
    drawn: dict[int, int] = {}
    own: set[str] = set()
    frames = []
    for number in range(draw.randint(1, 4)):
        groups = []
        for _ in range(draw.randrange(3)):
            start = value(_START, draw)
            params = msgspec.structs.replace(start.params, n=1 + start.params.n % 8)
            start = msgspec.structs.replace(start, group_id=num_groups, first_request_id=num_requests, params=params)
            groups.append(start)
            drawn |= dict.fromkeys(range(num_requests, num_requests + start.params.n), 0)
            own |= set(start.params.columns)
            num_groups, num_requests = num_groups + 1, num_requests + start.params.n
        ids = [request_id for request_id in drawn if draw.random() < 0.8][:20]
        finishes = []
        for request_id in ids:
            drawn[request_id] += 1
            if draw.random() < 0.2:
                finishes.append(Finish(request_id, "stop", drawn.pop(request_id)))
        header = msgspec.structs.replace(
            value(_HEADER, draw), sequence=number, num_tokens=len(ids), groups=groups, finishes=finishes, columns=[]
        )
        extras = _make_extras(draw, numbers, len(ids), sorted(filter(find_column, own)))
        required = [
            np.array(ids, np.uint64),
            *(_make_column(numbers, COLUMNS[name], (len(ids),)) for name in REQUIRED[1:]),
        ]
        frames.append(TokenFrame(header, *required, extras).encode())
    return frames


def _make_extras(
    draw: random.Random, numbers: np.random.Generator, num_tokens: int, own: list[str]
) -> dict[str, np.ndarray]:
    """Optional columns, each with those that it needs."""
    names: set[str] = set()
    for name, column in list(COLUMNS.items())[len(REQUIRED) :]:
        if draw.random() < 0.15:
            names |= {name, *column.needs}
    names |= {need for name in names for need in COLUMNS[name].needs}
    sizes = {TOKENS: num_tokens, MASK_OFFSETS: num_tokens + 1}
    extras = {}
    for name in COLUMNS:
        if name in names:
            shape = tuple(sizes.setdefault(dim, draw.randrange(4)) for dim in COLUMNS[name].dims)
            extras[name] = _make_column(numbers, COLUMNS[name], shape)
    if "mask_offsets" in extras:
        size = len(extras["mask_token_ids"])
        inner = numbers.integers(0, size + 1, max(0, num_tokens - 1))
        extras["mask_offsets"] = np.array([0, *sorted(inner.tolist()), size][-num_tokens - 1 :], np.int64)
        if not num_tokens:
            extras["mask_offsets"], extras["mask_token_ids"] = np.zeros(1, np.int64), np.zeros(0, np.int32)
    if "mask_cut_from" in extras:
        extras["mask_cut_from"][:] = draw.choice((0, 1000))
    for name in own:
        if name not in COLUMNS and draw.random() < 0.8:
            extras[name] = numbers.integers(0, 2, num_tokens).astype(draw.choice(("<f4", "<i8", "<b1", "<f8")))
    return extras


def _make_column(numbers: np.random.Generator, column: TokenColumn, shape: tuple[int, ...]) -> np.ndarray:
    return numbers.integers(0, 10, shape).astype(column.dtypes[int(numbers.integers(len(column.dtypes)))])


def _decode_frame(parts: Parts) -> int:
    """A frame that is accepted has what it says, and could be sent on."""
    for part in parts:
        frame = TokenFrame.decode(part)
        num_tokens = frame.header.num_tokens
        assert len(frame.request_ids) == len(frame.token_ids) == len(frame.logprobs) == num_tokens
        for start in frame.header.groups:
            msgspec.structs.replace(start.params)  # which are within bounds
            assert 1 <= start.params.n <= MAX_SAMPLES
        if "mask_offsets" in frame.extras:
            offsets = frame.extras["mask_offsets"]
            assert (offsets[1:] >= offsets[:-1]).all()
        TokenFrame.decode(frame.encode())
    return 0


def _assemble(parts: Parts) -> int:
    """All frames that can be read, one after another, and what there is at the end."""
    assembler, meter, groups, samples, num_read, error = Assembler(), StalenessMeter(), [], 0, 0, None
    for part in parts:
        try:
            frame = TokenFrame.decode(part)
            samples += sum(start.params.n for start in frame.header.groups)
            meter.frame(frame)
            groups += assembler.add(frame)
            num_read += 1
        except FrameError as caught:  # the stream goes on behind it
            error = caught
    if samples <= _READ_OUT:
        for group_id in range(8):
            groups.append(assembler.partial(group_id))
        groups += assembler.abandon()
    for group in groups:
        for rollout in group:
            _check(rollout)
    if error is not None and not num_read:
        raise error
    return samples


def _check(rollout: Rollout) -> None:
    num_tokens = len(rollout.token_ids)
    rows = [rollout.logprobs, rollout.weight_versions, rollout.sampled_at_ns, *rollout.columns.values()]
    assert all(len(column) == num_tokens for column in rows)
    assert 0 <= rollout.sample < rollout.params.n
    if (mask := rollout.sampling_mask) is not None:
        assert len(mask.offsets) == num_tokens + 1
        assert mask.offsets[-1] == len(mask.token_ids)
    if rollout.routed_experts is not None:
        assert len(rollout.routed_experts) == len(rollout.prompt_token_ids) + num_tokens - 1
    if (scores := rollout.prompt_scores) is not None:
        assert len(scores.logprobs) == max(0, len(rollout.prompt_token_ids) - 1)
    assert rollout.nbytes >= 0


# ---- weights ----------------------------------------------------------------------------------------------------

_LAYOUT = WeightLayout.build([("a.weight", (4, 8), "float32"), ("b.weight", (8,), "bfloat16"), ("c", (), "int64")])


def _version_files(directory: Path) -> Iterator[Target]:
    """A version, and the difference to one, as files."""
    slot, changed = torch.zeros(_LAYOUT.total_bytes, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    whole = write_version(directory, _LAYOUT, 1, slot).read_bytes()
    part = write_version(directory, _LAYOUT, 1, slot, delta=changed, base=0).read_bytes()
    file = os.memfd_create("version")
    path = f"/proc/self/fd/{file}"

    def reads(reader: Callable[[], object]) -> Callable[[Parts], int]:
        def run(parts: Parts) -> int:
            os.ftruncate(file, 0)
            os.pwrite(file, b"".join(parts), 0)
            reader()
            return 0

        return run

    yield Target("read_version", lambda _: [whole], reads(lambda: read_version(path, _LAYOUT, 1, slot)), open_file)
    yield Target("read_changes", lambda _: [part], reads(lambda: read_changes(path, _LAYOUT, 1, 0)), open_file)


def open_file(data: bytes) -> Tree:
    """The header of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    rest = data[end:]

    def close(root: Any) -> bytes:
        header = msgspec.json.encode(root)
        return len(header).to_bytes(8, "little") + header + rest

    return Tree(msgspec.json.decode(data[8:end]), close)


def _delta() -> Target:
    """The difference between two slots, once it has arrived."""
    old = torch.zeros(512, dtype=torch.uint8)

    def make(draw: random.Random) -> Parts:
        new = old.clone()
        for _ in range(draw.randrange(20)):
            new[draw.randrange(len(new))] = draw.randrange(256)
        changes = delta.encode(old, new, limit=2)
        assert changes is not None
        return [changes.numpy().tobytes()]

    def run(parts: Parts) -> int:
        delta.apply(old.clone(), torch.frombuffer(bytearray(b"".join(parts) or b"\0"), dtype=torch.uint8))
        return 0

    return Target("delta.apply", make, run)


def _slot_descriptors(directory: Path) -> Target:
    """What an engine says of its slots; a file lies there, and none that the descriptor could name besides."""
    path = directory / "slot"
    path.write_bytes(bytes(4096))

    def make(draw: random.Random) -> Parts:
        return [encode(SharedMemoryDescriptor(str(path), 1024, 1024 * draw.randrange(4), 4096))]

    def run(parts: Parts) -> int:
        for part in parts:
            descriptor = read(_DESCRIPTOR, part)
            if str(directory) in descriptor.path or not descriptor.path.strip("/."):
                assert len(SharedMemorySlot.attach(descriptor)) == descriptor.nbytes
        return 0

    return Target("SharedMemorySlot.attach", make, run, open_message)


_DESCRIPTOR = msgspec.msgpack.Decoder(SharedMemoryDescriptor)
