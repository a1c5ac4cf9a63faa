"""`inflight bench stream`: tokens per second from an engine's loop to a trainer, including sockets, acknowledgements
and the assembly of rollouts."""

import multiprocessing
import os
import resource
import tempfile
from contextlib import closing, nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.frames import Finish, FrameHeader, GroupStart, TokenFrame
from inflight.core.sampling import SamplingParams
from inflight.stream.group_table import GroupRecord
from inflight.stream.journal import JournalWriter
from inflight.stream.ledger import Ledger
from inflight.stream.reader import StreamReader
from inflight.stream.stream_thread import StreamThread
from inflight.stream.writer import StreamWriter
from inflight.tools.bench.options import StreamOptions
from inflight.tools.progress import Progress, untold

_WAITING_BYTES = 64 << 20
"""Unacknowledged bytes above which the writer pauses."""
_WAIT_S = 60.0
_PARAMS = SamplingParams(ignore_eos=True)
_PROMPT = [1] * 32


def measure(settings: StreamOptions, progress: Progress = untold) -> dict[str, Any]:
    """Send frames from one process to another for `seconds`, on one core each if there are two.

    Every sequence draws the tokens 0, 1, 2, …, so that lost, duplicated and misplaced tokens are recognized. The result
    has tokens_per_s from the first frame to the last group, bytes_per_token, lost and duplicated tokens, repeated
    frames, and the CPU time of each side per token in nanoseconds. Raises InflightError if the sender fails.
    """
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
        writer = context.Process(target=_write, args=(theirs, directory, settings, cores[-1]), daemon=True)
        writer.start()
        theirs.close()  # With a copy in this process, a read would wait for ever after the writer has ended.
        os.sched_setaffinity(0, cores[:1])
        try:
            progress(f"{settings.seconds:g} s of {settings.tokens_per_frame} tokens per frame")
            with closing(JournalWriter(f"{directory}/journal")) if settings.journal else nullcontext() as journal:
                result = _read(ours, settings.tokens, journal)
        except (EOFError, ConnectionError):
            raise InflightError("the process that sends the frames has failed; its error is printed above") from None
        finally:
            os.sched_setaffinity(0, cores)
            writer.join(_WAIT_S)
            writer.kill()
    return result


def _read(writer: Connection, length: int, journal: JournalWriter | None) -> dict[str, Any]:
    """Run the trainer side: take every group, and compare its tokens with the drawn tokens."""
    num_tokens = num_wrong = num_groups = 0

    def expect(frame: TokenFrame) -> None:
        ledger.expect([start.group_id for start in frame.header.groups])

    ledger = Ledger()
    ledger.frames.on_frame = expect
    reader = StreamReader(writer.recv(), begin=0, held=partial(ledger.held_of, None), journal=journal)
    thread = StreamThread(reader, ledger, check_engine=lambda: None, silence_s=_WAIT_S)
    expected = np.arange(2 * length, dtype=np.int32)
    began_ns, began_cpu_s = now_ns(), _cpu_s()
    total: dict[str, Any] | None = None
    with closing(thread):
        while total is None or num_groups < total["groups"]:
            answer = ledger.queue.next()
            if not isinstance(answer, GroupRecord):
                if answer is not None:
                    with suppress(TimeoutError):
                        answer.result(0.05)
                if writer.poll():  # totals, or the end of the sender
                    total = writer.recv()
                continue
            ledger.table.remove([answer.group_id])
            [rollout] = answer.rollouts
            num_groups += 1
            num_tokens += len(rollout.token_ids)
            num_wrong += int(np.count_nonzero(rollout.token_ids != expected[: len(rollout.token_ids)]))
        seconds, cpu_s = (now_ns() - began_ns) / 1e9, _cpu_s() - began_cpu_s
        writer.send("done")
        return {
            "tokens_per_s": total["tokens"] / seconds,
            "bytes_per_token": reader.num_bytes / total["tokens"],
            "lost": total["tokens"] - num_tokens + num_wrong,
            "duplicated": max(0, ledger.frames.num_tokens - total["tokens"]),
            "frames_sent_again": reader.num_duplicates,
            "num_tokens": total["tokens"],
            "seconds": seconds,
            "writer_ns_per_token": total["cpu_s"] / total["tokens"] * 1e9,
            "reader_ns_per_token": cpu_s / total["tokens"] * 1e9,
        }


def _write(reader: Connection, directory: str, settings: StreamOptions, core: int) -> None:
    """Run the engine side: draw a token for every sequence, as fast as the trainer takes them."""
    os.sched_setaffinity(0, [core])
    with closing(StreamWriter(f"ipc://{directory}/stream", spill_directory=Path(directory))) as writer:
        reader.send(writer.endpoint)
        began_ns, began_cpu_s = now_ns(), _cpu_s()
        num_tokens = num_groups = 0
        for frame in _frames(settings, lambda: now_ns() - began_ns < settings.seconds * 1e9):
            writer.send(frame)
            num_tokens += frame.header.num_tokens
            num_groups += len(frame.header.groups)
            while writer.kept.bytes_in_memory > _WAITING_BYTES:
                writer.wait(10)
                writer.flush()
        reader.send({"tokens": num_tokens, "groups": num_groups, "cpu_s": _cpu_s() - began_cpu_s})
        while not reader.poll():
            writer.wait(10)
            writer.flush()


def _frames(settings: StreamOptions, going_on: Any) -> Any:
    """Yield frames of sequences that start at different times. In every few frames some end and others start; finally
    all end."""
    count, length = settings.tokens_per_frame, settings.tokens
    draw = np.random.default_rng(settings.seed)
    ids = np.arange(count, dtype=np.uint64)
    lengths = draw.integers(1, length, count, endpoint=True)
    positions = np.zeros(count, np.int32)
    logprobs = np.full(count, -1.5, np.float32)
    new, next_id, sequence = ids.tolist(), count, 0
    while len(ids):
        positions += 1
        ended = positions == lengths
        finishes = [Finish(i, "length", n) for i, n in zip(ids[ended].tolist(), lengths[ended].tolist(), strict=True)]
        header = FrameHeader(
            engine_id="bench",
            sequence=sequence,
            version=sequence // 100,
            time_ns=now_ns(),
            step=sequence,
            num_tokens=len(ids),
            groups=[GroupStart(i, i, _PROMPT, _PARAMS) for i in new],
            starts=new,
            finishes=finishes,
            next_group_id=next_id,
        )
        yield TokenFrame(header, ids, positions - 1, logprobs)
        sequence, new = sequence + 1, []
        if finishes and going_on():
            new = list(range(next_id, next_id + len(finishes)))
            next_id += len(finishes)
            ids = ids.copy()
            ids[ended], positions[ended], lengths[ended] = new, 0, length
        elif finishes:
            ids, positions, lengths, logprobs = (column[~ended] for column in (ids, positions, lengths, logprobs))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
