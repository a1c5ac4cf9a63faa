"""Measures what streaming takes of the generator's time.

    python benchmarks/stream_cost.py [FILE]

An engine draws the same sequences again and again, in alternation for nobody and for a reader in another process that
acknowledges every frame; each has a core, that of the engine with ZeroMQ's sending thread. By number of sequences:
`share` is the time that streaming adds to a round, as a share of the round without it (median over pairs), `cpu_share`
the same of the CPU time of the engine's process, which other work on the machine moves less. `interval` and
`cpu_interval` hold them with 95 % confidence (from ranks).
"""

import multiprocessing
import os
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing.synchronize import Event
from statistics import median
from typing import Any

import msgspec
from harness import finish

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.engine import Engine
from inflight.stream.reader import StreamReader
from inflight.stream.writer import StreamWriter

PAIRS, TOKENS, SEQUENCES = 200, 64, (32, 128)


def read(endpoint: str, core: int, stop: Event) -> None:
    os.sched_setaffinity(0, [core])
    with closing(StreamReader(endpoint)) as reader:
        while not stop.is_set():
            reader.receive(100)


class Rounds:
    """Draws with one engine, which numbers its frames; here only those that are sent have numbers."""

    def __init__(self, engine: Engine, writer: StreamWriter):
        self._engine, self._writer, self._next = engine, writer, 0

    def draw(self, num_sequences: int, *, streams: bool) -> tuple[float, float]:
        """Returns the time and the CPU time that it took."""
        engine, params = self._engine, SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0)
        engine.submit([Prompt([1 + index] * 8, params) for index in range(num_sequences)])
        began, began_cpu = time.perf_counter(), time.process_time()
        while engine.has_work:
            frame = engine.step()
            if frame is None:
                continue
            frame = replace(frame, header=msgspec.structs.replace(frame.header, sequence=self._next))
            if streams:
                self._next += 1
                self._writer.send(frame, at_once=engine.idle)
        return time.perf_counter() - began, time.process_time() - began_cpu


def measure(rounds: Rounds, num_sequences: int) -> dict[str, Any]:
    pairs = []
    for pair in range(PAIRS + 1):
        order = (False, True) if pair % 2 else (True, False)
        spent = {streams: rounds.draw(num_sequences, streams=streams) for streams in order}
        pairs.append((spent[False], spent[True]))
    del pairs[0]  # the first round of each
    by_time, by_cpu = shares(pairs, 0), shares(pairs, 1)
    rank = PAIRS // 2 - round(1.96 * PAIRS**0.5 / 2)
    return {
        "tokens_per_s": num_sequences * TOKENS / median(alone[0] for alone, _ in pairs),
        "tokens_per_s_streamed": num_sequences * TOKENS / median(streamed[0] for _, streamed in pairs),
        "share": median(by_time),
        "interval": [by_time[rank - 1], by_time[-rank]],
        "cpu_share": median(by_cpu),
        "cpu_interval": [by_cpu[rank - 1], by_cpu[-rank]],
    }


def shares(pairs: list[tuple[tuple[float, float], tuple[float, float]]], of: int) -> list[float]:
    """What streaming adds, pair by pair, in rising order."""
    return sorted(streamed[of] / alone[of] - 1 for alone, streamed in pairs)


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    os.sched_setaffinity(0, cores[-1:])
    options = EngineOptions("tiny", device="cpu", max_sequences=max(SEQUENCES), max_context=TOKENS + 64, threads=1)
    with tempfile.TemporaryDirectory() as directory, Engine(options) as engine:
        writer = StreamWriter(f"ipc://{directory}/stream")
        reader = context.Process(target=read, args=(writer.endpoint, cores[0], stop), daemon=True)
        reader.start()
        rounds = Rounds(engine, writer)
        found = {str(number): measure(rounds, number) for number in SEQUENCES}
        if not reader.is_alive():
            raise RuntimeError("the reader has ended")
        stop.set()
        reader.join(10)
        writer.close()
    finish("stream-cost", {"model": "tiny", "tokens": TOKENS, "pairs": PAIRS, "by_sequences": found})


if __name__ == "__main__":
    main()
