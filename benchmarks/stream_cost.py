"""Measures what streaming takes of the generator's time.

    python benchmarks/stream_cost.py [FILE]

An engine draws the same sequences again and again, in alternation for nobody and for a reader in another process that
acknowledges every frame; each has a core. `share` is the time that streaming adds to a round, as a share of the round
without it (median over pairs).
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

PAIRS, TOKENS, SEQUENCES = 15, 400, 32


def read(endpoint: str, core: int, stop: Event) -> None:
    os.sched_setaffinity(0, [core])
    with closing(StreamReader(endpoint)) as reader:
        while not stop.is_set():
            reader.receive(20)


def seconds_of_round(engine: Engine, writer: StreamWriter | None) -> float:
    """Draw all sequences; without a writer the frames go nowhere."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0)
    engine.submit([Prompt([1 + index] * 8, params) for index in range(SEQUENCES)])
    began = time.perf_counter()
    while engine.has_work:
        frame = engine.step()
        if writer is not None and frame is not None:
            writer.send(frame)
    return time.perf_counter() - began


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
    finish(
        "stream-cost",
        {
            "model": "tiny",
            "sequences": SEQUENCES,
            "tokens_per_s": SEQUENCES * TOKENS / median(without for without, _ in pairs),
            "tokens_per_s_streamed": SEQUENCES * TOKENS / median(streamed for _, streamed in pairs),
            "share": median(streamed / without for without, streamed in pairs) - 1,
            "shares": [round(streamed / without - 1, 4) for without, streamed in pairs],
        },
    )


if __name__ == "__main__":
    main()
