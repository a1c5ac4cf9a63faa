"""Frames made by hand, and a wire that carries them."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from inflight.core.frames import MAGIC, Finish, FrameHeader, GroupStart, TokenFrame
from inflight.core.sampling import SamplingParams
from inflight.observability.staleness_meter import StalenessMeter
from inflight.stream.ledger import Ledger
from inflight.stream.reader import StreamReader
from inflight.stream.writer import StreamWriter
from inflight.training.data.rollout_stream import RolloutStream


def make_frame(num_tokens: int = 3, sequence: int = 0, time_ns: int = 123, **header: Any) -> TokenFrame:
    """A frame of requests 0, 1, … that drew the tokens 100, 101, …"""
    return TokenFrame(
        FrameHeader("engine", sequence, 5, time_ns, 9, num_tokens, **header),
        np.arange(num_tokens, dtype=np.uint64),
        np.arange(num_tokens, dtype=np.int32) + 100,
        -np.arange(num_tokens, dtype=np.float32),
    )


class Wire:
    """A writer and a stream that reads from it."""

    def __init__(self, directory, **options: Any):
        self.writer = StreamWriter(f"ipc://{directory}/stream")
        self.dead: Exception | None = None
        ledger = Ledger()
        held = partial(ledger.held_of, None)
        reader = StreamReader(self.writer.endpoint, begin=0, held=held, journal=options.pop("journal", None))
        self.stream = RolloutStream(
            reader, ledger, tokenizer=None, meter=StalenessMeter(), check_engine=self.check_engine, **options
        )

    def close(self) -> None:
        self.stream.close()
        self.writer.close()

    def check_engine(self) -> None:
        if self.dead is not None:
            raise self.dead

    def send(self, *frames: TokenFrame | bytes) -> None:
        """Send frames, and what is none, and wait for a while until all was acknowledged."""
        for frame in frames:
            self.writer.kept.append(frame if isinstance(frame, bytes) else frame.encode())
        deadline = time.monotonic() + 2
        while self.writer.num_unsent or (
            self.writer.kept.oldest < self.writer.kept.next and time.monotonic() < deadline
        ):
            self.writer.flush()


def open_frame(data: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """The header of an encoded frame, as a mapping, and what encodes the frame with another header."""
    length = int.from_bytes(data[4:8], "little")
    columns = data[8 + length + -length % 8 :]

    def close(header: Any) -> bytes:
        encoded = msgspec.msgpack.encode(header)
        return MAGIC + len(encoded).to_bytes(4, "little") + encoded + bytes(-len(encoded) % 8) + columns

    return msgspec.msgpack.decode(data[8 : 8 + length]), close


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """An encoded frame whose header, as a mapping, was changed."""
    header, close = open_frame(data)
    change(header)
    return close(header)


def starts(*group_ids: int) -> list[GroupStart]:
    """Groups of one sample, whose request id is the group's."""
    return [GroupStart(g, g, [1], SamplingParams()) for g in group_ids]


def ends(*request_ids: int) -> list[Finish]:
    return [Finish(request_id, "stop", 1) for request_id in request_ids]
