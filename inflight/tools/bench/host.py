"""`inflight bench host`: host time of a decoding pass, with a device that computes nothing.

The real engine runs as on a GPU: one pass ahead, with FlashInfer and CUDA graphs. The computation of the device and the
planner of FlashInfer are replaced (`stubbed_device.py`). The remaining time belongs to our Python code: choosing rows,
filling the inputs of kernels, reading the drawn tokens, ending sequences, and building the frame.
"""

import random
import time
from typing import Any

from inflight.core.errors import InflightError
from inflight.core.garbage import without_full_collections
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.tools.bench.options import HostOptions
from inflight.tools.bench.spread import p50_and_p99
from inflight.tools.bench.stubbed_device import stubbed
from inflight.tools.progress import Progress, untold

WARM_UP_STEPS = 20
"""Number of decoding passes before the timed ones."""


def measure(settings: HostOptions, progress: Progress = untold) -> dict[str, Any]:
    """Time steps in which every sequence draws one token and no sequence starts or ends. With `backlog`, time all
    steps, while groups of 8 end at different lengths and others replace them.

    host_ms is the wall time from `step()` to the encoded frame, and cpu_ms the CPU time of its thread. Those of the
    result belong to the largest number of sequences.
    """
    points, sizes = [], sorted(set(settings.sequences))
    for done, sequences in enumerate(sizes):
        progress(f"{sequences} sequences", done / len(sizes))
        points.append(_measure_point(settings, sequences))
    return {
        "host_ms": points[-1]["host_ms"],
        "cpu_ms": points[-1]["cpu_ms"],
        "points": points,
    }


def _measure_point(settings: HostOptions, sequences: int) -> dict[str, Any]:
    draw = random.Random(settings.seed)
    num_steps, (least, most) = settings.steps, settings.prompt_tokens
    draws_at_most = WARM_UP_STEPS + num_steps + sequences + 10  # the prompts join within as many passes
    options = EngineOptions(
        model=settings.model,
        device="cpu",
        max_sequences=sequences,
        max_context=most + draws_at_most,
        max_prefill_tokens=8192,
        threads=1,
        seed=settings.seed,
    )

    def prompt() -> Prompt:
        ids = [draw.randrange(engine.vocab_size) for _ in range(draw.randint(least, most))]
        if settings.backlog:  # a sample can end after any token, as with an end-of-sequence id
            return Prompt(ids, SamplingParams(n=8, max_tokens=draws_at_most, seed=draw.getrandbits(32)))
        return Prompt(ids, SamplingParams(max_tokens=draws_at_most, seed=draw.getrandbits(32)))

    with (
        Engine(options, overlap=True) as engine,
        stubbed(engine, end_after=settings.backlog),
        without_full_collections(),
    ):
        count = sequences if not settings.backlog else 2 * sequences // 8 + 4
        engine.requests.submit([prompt() for _ in range(count)])
        for _ in range(WARM_UP_STEPS + sequences):
            engine.step()
        wall_ms: list[float] = []
        cpu_ms: list[float] = []
        while len(wall_ms) < num_steps:
            if settings.backlog and engine.load().num_waiting < sequences:
                engine.requests.submit([prompt() for _ in range(max(1, sequences // 8))])
            began_cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
            frame = engine.step()
            if frame is None:
                raise InflightError(f"the engine of {sequences} sequences had nothing to do")
            frame.encode()
            ended_ns, ended_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            if settings.backlog or (frame.header.num_tokens == sequences and not frame.header.starts):
                wall_ms.append((ended_ns - began_ns) / 1e6)
                cpu_ms.append((ended_cpu_ns - began_cpu_ns) / 1e6)
    return {
        "sequences": sequences,
        "host_ms": p50_and_p99(wall_ms),
        "cpu_ms": p50_and_p99(cpu_ms),
        "num_steps": num_steps,
    }
