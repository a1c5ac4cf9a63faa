"""A process that calls one score function: `python -m inflight.training.data.score_process FUNCTION PATHS`.

It reads groups of rollouts from its standard input and writes their rewards to its standard output, until its input
ends. The function sees an empty standard input, and its output is redirected to standard error. No heavy module is
imported: of inflight, only the modules that read rollouts.
"""

import json
import os
import signal
import struct
import sys
import threading
import time
import traceback
from io import BufferedRWPair
from typing import Any, BinaryIO

import msgspec

from inflight.core.by_name import load_by_name
from inflight.stream.rollout_codec import RolloutHeader, arrays_of, decode, encode, header_of, make_rollout

_LENGTH = struct.Struct("<Q")
_POLL_S = 1.0


class Answer(msgspec.Struct):
    """Rewards that the function returned, or the error that it raised."""

    rewards: list[float | None] = []
    error: str = ""


class _Headers(msgspec.Struct, frozen=True):
    rollouts: list[RolloutHeader]


def encode_rollouts(rollouts: list[Any]) -> bytes:
    """Encode a request to the process. Raises InvalidRequestError for metadata that a message cannot hold."""
    headers = _Headers([header_of(rollout) for rollout in rollouts])
    return encode(headers, [arrays_of(rollout) for rollout in rollouts])


def write_message(file: BinaryIO | BufferedRWPair, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read_message(file: BinaryIO | BufferedRWPair) -> bytes | None:
    """Return the next message, or None at the end."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    data = file.read(size)
    return data if len(data) == size else None


def main() -> None:
    """Serve requests. Arguments: the function's name, whether it takes a whole group, and the module paths as JSON."""
    name, batched, paths = sys.argv[1], sys.argv[2] == "batched", json.loads(sys.argv[3])
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:  # The function and programs that it starts read this empty input.
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.path += [path for path in paths if path not in sys.path]
    try:
        function = load_by_name(name)
    except Exception:
        failed = Answer(error=f"{name} cannot be imported in a process: {traceback.format_exc()}")
        write_message(answers, msgspec.msgpack.encode(failed))
        return
    write_message(answers, msgspec.msgpack.encode(Answer()))
    while (data := read_message(requests)) is not None:
        write_message(answers, msgspec.msgpack.encode(_answer(function, batched, data)))


def _answer(function: Any, batched: bool, data: bytes) -> Answer:
    headers, arrays = decode(data, _Headers, lambda headers: len(headers.rollouts))
    rollouts = [make_rollout(header, of_one) for header, of_one in zip(headers.rollouts, arrays, strict=True)]
    try:
        values = function(rollouts) if batched else [function(rollout) for rollout in rollouts]
        values = [None] * len(rollouts) if values is None else values
        return Answer([None if value is None else float(value) for value in values])
    except Exception:
        return Answer(error=traceback.format_exc())


def _end_with(parent: int) -> None:
    """Once the parent has ended, end this process and programs that the function started, also in the middle of a
    call."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
