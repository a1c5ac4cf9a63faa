"""Measures what streaming takes of the generator's time.

    python benchmarks/stream_cost.py [FILE]

An engine draws the same sequences again and again, in alternation for nobody and for a reader in another process that
acknowledges every frame; each has a core. `share` is the time that streaming adds to a round, as a share of the round
without it (median over pairs), and `cpu_share` the same of the CPU time of the engine's process, the sending thread of
ZeroMQ included, which other work on the machine moves less. `interval` holds `share` with 95 % confidence (from ranks).
"""

import multiprocessing
import os
import tempfile
import time
from contextlib import closing
from multiprocessing.synchronize import Event
from statistics import median

from harness import finish

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.engine import Engine
from inflight.stream.reader import StreamReader
from inflight.stream.writer import StreamWriter

PAIRS, TOKENS, SEQUENCES = 60, 128, 32


def read(endpoint: str, core: int, stop: Event) -> None:
    os.sched_setaffinity(0, [core])
    with closing(StreamReader(endpoint)) as reader:
        while not stop.is_set():
            reader.receive(20)


def seconds_of_round(engine: Engine, writer: StreamWriter | None) -> tuple[float, float]:
    """Draw all sequences; without a writer the frames go nowhere. Returns the time and the CPU time that it took."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0)
    engine.submit([Prompt([1 + index] * 8, params) for index in range(SEQUENCES)])
    began, began_cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        frame = engine.step()
        if writer is not None and frame is not None:
            writer.send(frame)
    return time.perf_counter() - began, time.process_time() - began_cpu


def shares(pairs: list[tuple[tuple[float, float], tuple[float, float]]], of: int) -> list[float]:
    """What streaming adds, pair by pair, in rising order."""
    return sorted(streamed[of] / alone[of] - 1 for alone, streamed in pairs)


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    os.sched_setaffinity(0, cores[-1:])
    options = EngineOptions("tiny", device="cpu", max_sequences=SEQUENCES, max_context=TOKENS + 64, threads=1)
    with tempfile.TemporaryDirectory() as directory, Engine(options) as streamed, Engine(options) as alone:
        writer = StreamWriter(f"ipc://{directory}/stream")
        reader = context.Process(target=read, args=(writer.endpoint, cores[0], stop), daemon=True)
        reader.start()
        writers = {streamed: writer, alone: None}
        pairs = []
        for pair in range(PAIRS + 1):
            order = (alone, streamed) if pair % 2 else (streamed, alone)
            seconds = {engine: seconds_of_round(engine, writers[engine]) for engine in order}
            pairs.append((seconds[alone], seconds[streamed]))
        del pairs[0]  # the first round of each
        stop.set()
        reader.join(10)
        writer.close()
    by_time, by_cpu = shares(pairs, 0), shares(pairs, 1)
    rank = PAIRS // 2 - round(1.96 * PAIRS**0.5 / 2)
    finish(
        "stream-cost",
        {
            "model": "tiny",
            "sequences": SEQUENCES,
            "tokens": TOKENS,
            "pairs": PAIRS,
            "tokens_per_s": SEQUENCES * TOKENS / median(alone[0] for alone, _ in pairs),
            "tokens_per_s_streamed": SEQUENCES * TOKENS / median(streamed[0] for _, streamed in pairs),
            "share": median(by_time),
            "interval": [by_time[rank - 1], by_time[-rank]],
            "cpu_share": median(by_cpu),
            "cpu_interval": [by_cpu[rank - 1], by_cpu[-rank]],
        },
    )


if __name__ == "__main__":
    main()
