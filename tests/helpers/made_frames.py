"""Frames made by hand, and a wire that carries them."""

from typing import Any

import numpy as np

from inflight.core.frames import Finish, FrameHeader, GroupStart, TokenFrame
from inflight.core.sampling import SamplingParams
from inflight.observability.staleness_meter import StalenessMeter
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

    def __init__(self, directory):
        self.writer = StreamWriter(f"ipc://{directory}/stream")
        self.dead: Exception | None = None
        self.stream = RolloutStream(
            self.writer.endpoint, tokenizer=None, meter=StalenessMeter(), check_engine=self.check_engine
        )

    def check_engine(self) -> None:
        if self.dead is not None:
            raise self.dead

    def send(self, *frames: TokenFrame | list[bytes]) -> None:
        self.writer._waiting.extend(frame if isinstance(frame, list) else frame.encode() for frame in frames)
        while self.writer._waiting:
            self.writer.flush()


def starts(*group_ids: int) -> list[GroupStart]:
    """Groups of one sample, whose request id is the group's."""
    return [GroupStart(g, g, [1], SamplingParams()) for g in group_ids]


def ends(*request_ids: int) -> list[Finish]:
    return [Finish(request_id, "stop", 1) for request_id in request_ids]
