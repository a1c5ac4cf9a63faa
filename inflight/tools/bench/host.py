"""`inflight bench host`: host time of a decoding pass, with a device that computes nothing.

The real engine runs as on a GPU: one pass ahead, with FlashInfer and CUDA graphs. The computation of the device and the
planner of FlashInfer are replaced (`stubbed_device.py`). The remaining time belongs to our Python code: choosing rows,
filling the inputs of kernels, reading the drawn tokens, ending sequences, and building the frame.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.table import Table

from inflight.core.errors import InflightError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.tools.bench.options import HostOptions
from inflight.tools.bench.spread import p50_and_p99
from inflight.tools.bench.stubbed_device import stubbed
from inflight.tools.demo.trainer import without_full_collections
from inflight.tools.plots import new_table
from inflight.tools.progress import Progress, untold

PARTS = ("swap", "schedule", "build batch", "forward", "sample", "collect", "emit", "encode")
"""Parts of a step in the order in which they run."""
WARM_UP_STEPS = 20
"""Number of decoding passes before the timed ones."""


def measure(settings: HostOptions, progress: Progress = untold) -> dict[str, Any]:
    """Time steps in which every sequence draws one token and no sequence starts or ends. With `backlog`, time all
    steps, while groups of 8 end at different lengths and others replace them.

    host_ms is the wall time from `step()` to the encoded frame, cpu_ms the CPU time of its thread, and parts_ms the
    median time of each part. `host_ms` of the result belongs to the largest number of sequences.
    """
    points, sizes = [], sorted(set(settings.sequences))
    for done, sequences in enumerate(sizes):
        progress(f"{sequences} sequences", done / len(sizes))
        points.append(_measure_point(settings, sequences))
    return {
        "bench": "host",
        **asdict(settings),
        "prompt_tokens": list(settings.prompt_tokens),
        "host_ms": points[-1]["host_ms"],
        "cpu_ms": points[-1]["cpu_ms"],
        "points": points,
    }


def table(result: dict[str, Any]) -> Table:
    """Show a row for each number of sequences, with the time of each part."""
    kind = "all passes of a backlog" if result["backlog"] else "decoding passes"
    title = f"Host time of {kind}, median of {result['steps']}, in ms"
    shown = new_table(title, "sequences", "p50", "p99", "CPU p50", *PARTS)
    for point in result["points"]:
        times = [point["host_ms"]["p50"], point["host_ms"]["p99"], point["cpu_ms"]["p50"]]
        shown.add_row(
            str(point["sequences"]), *(f"{ms:.3f}" for ms in (*times, *(point["parts_ms"][part] for part in PARTS)))
        )
    return shown


def _measure_point(settings: HostOptions, sequences: int) -> dict[str, Any]:
    draw = random.Random(settings.seed)
    num_steps, (least, most) = settings.steps, settings.prompt_tokens
    draws_at_most = WARM_UP_STEPS + 2 * num_steps + sequences + 10  # the prompts join within as many passes
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
        measured: list[_Steps] = []
        for by_parts in (False, True):
            steps = _Steps(engine, by_parts=by_parts)
            measured.append(steps)
            while len(steps.wall_ms) < num_steps:
                if settings.backlog and engine.load().num_waiting < sequences:
                    engine.requests.submit([prompt() for _ in range(max(1, sequences // 8))])
                frame = steps.step()
                if frame is None:
                    raise InflightError(f"the engine of {sequences} sequences had nothing to do")
                if not settings.backlog and (frame.header.num_tokens != sequences or frame.header.starts):
                    steps.forget()
    whole, parts = measured
    return {
        "sequences": sequences,
        "host_ms": p50_and_p99(whole.wall_ms),
        "cpu_ms": p50_and_p99(whole.cpu_ms),
        "parts_ms": {part: float(np.median(parts.parts_ms[part])) for part in PARTS},
        "num_steps": len(whole.wall_ms),
    }


class _Steps:
    """Times steps of an engine, and on request their parts. The time of a nested part is subtracted from its outer
    part. Parts are timed in additional steps, because timing them takes time."""

    def __init__(self, engine: Engine, *, by_parts: bool):
        self._engine = engine
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []
        self.parts_ms: dict[str, list[float]] = {part: [] for part in PARTS}
        self._spent_ns: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._within_ns = 0
        owners: list[tuple[str, Any, str]] = [
            ("swap", engine, "_swap"),
            ("schedule", engine, "_schedule"),
            ("build batch", engine.runner, "_places"),
            ("build batch", engine.runner, "_batch"),
            ("forward", engine.runner, "forward"),
            ("sample", engine, "_sample"),
            ("collect", engine, "_collect"),
            ("emit", engine, "_emit"),
        ]
        for part, owner, name in owners if by_parts else ():
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def step(self) -> Any:
        """Run one step, encode its frame, and return the frame."""
        self._spent_ns = dict.fromkeys(PARTS, 0)
        began_cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
        frame = self._engine.step()
        stepped_ns = time.perf_counter_ns()
        if frame is not None:
            frame.encode()
        ended_ns, ended_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        self._spent_ns["encode"] = ended_ns - stepped_ns
        self.wall_ms.append((ended_ns - began_ns) / 1e6)
        self.cpu_ms.append((ended_cpu_ns - began_cpu_ns) / 1e6)
        for part, spent_ns in self._spent_ns.items():
            self.parts_ms[part].append(spent_ns / 1e6)
        return frame

    def forget(self) -> None:
        """Ignore the last step."""
        for series in (self.wall_ms, self.cpu_ms, *self.parts_ms.values()):
            series.pop()

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before_ns, self._within_ns = self._within_ns, 0
            began_ns = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent_ns = time.perf_counter_ns() - began_ns
                self._spent_ns[part] += spent_ns - self._within_ns
                self._within_ns = before_ns + spent_ns

        return call
