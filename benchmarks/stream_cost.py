"""Measures what streaming takes of the generator's time.

    python benchmarks/stream_cost.py [FILE]

An engine draws the same sequences again and again, a quarter of its passes after the other for nobody and for a reader
in another process that acknowledges what it gets; each has a core, that of the engine with ZeroMQ's sending thread. In
one round the quarters in the middle are for the reader, in the next one the first and the last, so that other work on
the machine, and what longer sequences cost, fall on both. By number of sequences: `share` is the time that streaming
adds, as a share of the time without it (median over pairs of rounds), `cpu_share` the same of the CPU time of the
engine's process. `interval` and `cpu_interval` hold them with 95 % confidence (from ranks).
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
import numpy as np
from harness import finish

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.engine import Engine
from inflight.stream.reader import StreamReader
from inflight.stream.writer import StreamWriter

PAIRS, WARMUP = 100, 4
PASSES = {32: 128, 128: 48}
"""Of a quarter of a round, by the number of sequences: a fifth of a second."""


def read(endpoint: str, core: int, stop: Event) -> None:
    os.sched_setaffinity(0, [core])
    with closing(StreamReader(endpoint)) as reader:
        while not stop.is_set():
            reader.receive(100)


class Rounds:
    """Draws with one engine, which numbers its frames; here only those that are sent have numbers."""

    def __init__(self, engine: Engine, writer: StreamWriter):
        self._engine, self._writer, self._next = engine, writer, 0

    def draw(self, num_sequences: int) -> dict[bool, np.ndarray]:
        """Draw two rounds. Returns the time and the CPU time of the passes without streaming, and of those with it."""
        engine, passes = self._engine, PASSES[num_sequences]
        params = SamplingParams(max_tokens=4 * passes + WARMUP + 8, ignore_eos=True, seed=0)
        spent = {False: np.zeros(2), True: np.zeros(2)}
        for order in ((False, True, True, False), (True, False, False, True)):
            engine.submit([Prompt([1 + index] * 8, params) for index in range(num_sequences)])
            self._passes(WARMUP, streams=False)
            for streams in order:
                spent[streams] += self._passes(passes, streams=streams)
            self._writer.flush()
            while engine.has_work:
                engine.step()
        return spent

    def _passes(self, count: int, *, streams: bool) -> np.ndarray:
        engine, writer = self._engine, self._writer
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            frame = engine.step()
            assert frame is not None
            frame = replace(frame, header=msgspec.structs.replace(frame.header, sequence=self._next))
            if streams:
                self._next += 1
                writer.send(frame, at_once=False)
        return np.array([time.perf_counter() - began, time.process_time() - began_cpu])


def measure(rounds: Rounds, num_sequences: int) -> dict[str, Any]:
    rounds.draw(num_sequences)  # kernels are compiled
    spent = [rounds.draw(num_sequences) for _ in range(PAIRS)]
    num_tokens = num_sequences * 4 * PASSES[num_sequences]
    by_time, by_cpu = shares(spent, 0), shares(spent, 1)
    rank = PAIRS // 2 - round(1.96 * PAIRS**0.5 / 2)
    return {
        "tokens_per_s": num_tokens / median(float(each[False][0]) for each in spent),
        "tokens_per_s_streamed": num_tokens / median(float(each[True][0]) for each in spent),
        "share": median(by_time),
        "interval": [by_time[rank - 1], by_time[-rank]],
        "cpu_share": median(by_cpu),
        "cpu_interval": [by_cpu[rank - 1], by_cpu[-rank]],
    }


def shares(spent: list[dict[bool, np.ndarray]], of: int) -> list[float]:
    """What streaming adds, pair by pair, in rising order."""
    return sorted(float(each[True][of] / each[False][of]) - 1 for each in spent)


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    os.sched_setaffinity(0, cores[-1:])
    options = EngineOptions(
        "tiny", device="cpu", max_sequences=max(PASSES), max_context=4 * max(PASSES.values()) + 64, threads=1
    )
    with tempfile.TemporaryDirectory() as directory, Engine(options) as engine:
        writer = StreamWriter(f"ipc://{directory}/stream")
        reader = context.Process(target=read, args=(writer.endpoint, cores[0], stop), daemon=True)
        reader.start()
        rounds = Rounds(engine, writer)
        found = {str(number): measure(rounds, number) for number in PASSES}
        if not reader.is_alive():
            raise RuntimeError("the reader has ended")
        stop.set()
        reader.join(10)
        writer.close()
    finish("stream-cost", {"model": "tiny", "pairs": PAIRS, "by_sequences": found})


if __name__ == "__main__":
    main()
