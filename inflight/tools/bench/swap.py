"""`inflight bench swap`: the effect of new weights on a running generator, compared with another engine.

The engine draws for a fixed number of sequences in its own process. This process receives its frames and publishes. It
alternates windows without publishes, windows with publishes one after another, and copies of the same size between two
plain buffers. Then it repeats them while it computes products without a pause, as a trainer does. On a CPU each side
keeps to its half of the cores.
"""

import os
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from inflight.core.clock import NS_PER_MS
from inflight.core.errors import InflightError
from inflight.core.frames import TokenFrame
from inflight.core.messages import Prompt, Status
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.model.device import resolve_device
from inflight.engine.model.loading import load_model
from inflight.fleet.process.local import LocalProcess
from inflight.stream.reader import StreamReader
from inflight.tools.bench.options import SwapOptions
from inflight.tools.bench.peer_inflight import drawn_frames
from inflight.tools.bench.peer_worker import Job, Setup
from inflight.tools.bench.peers import OURS, Worker, interpreter, make_setup, vllm_python
from inflight.tools.bench.spread import p50_and_p99, spread
from inflight.tools.demo.trainer import torch_threads
from inflight.tools.progress import Progress, untold
from inflight.weights.shared_memory import default_directory
from inflight.weights.trainer.engine_link import LoneEngine
from inflight.weights.trainer.publisher import Publisher

QUIET_PASSES = 16
WARM_UP_PASSES = 8
"""Number of ignored passes at the beginning of each quiet window."""
PEER_PUBLISHES = 20
PASSES_BETWEEN_PAUSES = 16
_PRODUCT = {"cuda": 8192, "cpu": 256}
"""Rows and columns of the products of a busy trainer: a millisecond or two each on a GPU."""
_QUEUED_PRODUCTS = 4
_MOST_COPIED_BYTES = 2 << 30
"""Maximum size of the plain copy that is compared with a publish, in bytes."""


@dataclass(slots=True)
class _Samples:
    """Measured values, in milliseconds unless the name has another unit."""

    quiet_gaps: list[float] = field(default_factory=list)
    """Times between two passes without a publish."""
    swap_gaps: list[float] = field(default_factory=list)
    """Times between the last pass of one version and the first pass of the next."""
    swaps: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    paused_stalls: list[float] = field(default_factory=list)
    """Stalls of a paused, loaded and resumed engine."""
    copies_s: list[float] = field(default_factory=list)
    memcpys_gb_s: list[float] = field(default_factory=list)

    def gaps_ms(self) -> dict[str, dict[str, float]]:
        return {"across_swaps": p50_and_p99(self.swap_gaps), "without": p50_and_p99(self.quiet_gaps)}


def measure(settings: SwapOptions, progress: Progress = untold) -> dict[str, Any]:
    """Publish `publishes` times while the engine draws, and compare with passes without publishes.

    swap_ms, stall_ms, forward_ms (from pass to pass without publishes), gap_ms: {p50, p99}. gap_ratio: p99 of the gap
    between the tokens of a sequence across a swap / p99 without a swap. copy_gb_s and memcpy_gb_s count bytes read and
    written per second, of a publish and of a plain copy of the same size (at most 2 GiB) while the engine draws. grown:
    additional memory of both processes and the device since the first round. busy: num_swaps, gap_ms
    and copy_ms of `busy_publishes` publishes while the trainer computes; None if that is 0. paused_stall_ms: pausing
    our engine, publishing, and resuming it with the new weights, as engines do that load in place. With a peer,
    peer_stall_ms: pausing it, loading the same weights from a directory, and resuming. Requests keep their caches in
    both, and p99 is the longest of at most 20.
    """
    if settings.peer:
        interpreter(settings.peer)
    device = resolve_device(settings.device)
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as temporary:
        progress("saving the model")
        setup = make_setup(
            settings,
            settings.sequences,
            settings.prompt_tokens + settings.tokens,
            threads=len(halves_of_cores()[0]) if device.type == "cpu" else 0,
            directory=Path(temporary) if settings.peer else None,
        )
        with pinned_to_halves(setup.device) as (engine_side, trainer_side):
            progress(f"{OURS} is loading the model")
            zmq.Context.instance().socket(zmq.DEALER).close()  # its threads begin here, on both halves
            engine_side()
            with _Ours(settings, setup, device, trainer_side) as ours:
                run = ours.measure(progress)
            engine_side()
            peer = _measure_peer(settings, setup, Path(temporary), progress)
    samples, written_bytes = ours.samples, ours.written_bytes
    copy_s = float(np.median(samples.copies_s))
    gaps = samples.gaps_ms()
    return {
        "device": setup.device,
        "dtype": setup.dtype,
        "num_swaps": len(samples.swaps),
        "swap_ms": p50_and_p99(samples.swaps),
        "stall_ms": p50_and_p99(samples.stalls),
        "paused_stall_ms": p50_and_p99(samples.paused_stalls),
        "forward_ms": gaps["without"],
        "gap_ms": gaps,
        "gap_ratio": gaps["across_swaps"]["p99"] / gaps["without"]["p99"],
        "weight_bytes": written_bytes,
        "copy_ms": p50_and_p99([1e3 * seconds for seconds in samples.copies_s]),
        "copy_gb_s": (ours.read_bytes + written_bytes) / copy_s / 1e9,
        "memcpy_gb_s": float(np.median(samples.memcpys_gb_s)),
        **run,
        **peer,
        **spread({"swap_ms": samples.swaps, "stall_ms": samples.stalls, "forward_ms": samples.quiet_gaps}),
    }


class _Ours(ExitStack):
    """Our engine in its own process, and its trainer in this process, which receives the frames and publishes.

    `on_trainer_side` is called between the starts of the two.
    """

    def __init__(self, settings: SwapOptions, setup: Setup, device: torch.device, on_trainer_side: Callable[[], None]):
        super().__init__()
        self._settings, self._setup, self._device = settings, setup, device
        self.samples = _Samples()
        options = EngineOptions(
            model=setup.model,
            backend=settings.backend,
            backend_python=vllm_python(settings.backend),
            device=setup.device,
            dtype=setup.dtype,
            slots=settings.slots,
            max_sequences=settings.sequences,
            max_context=setup.max_context,
            threads=setup.threads,
            seed=settings.seed,
        )
        self._launcher = self.enter_context(closing(LocalProcess(options)))
        on_trainer_side()
        self._reader = self.enter_context(closing(StreamReader(self._launcher.welcome.stream_endpoint)))
        dtype = getattr(torch, setup.dtype if settings.masters == "auto" else settings.masters)
        self._trainer = load_model(setup.model, dtype=dtype, device=device, seed=settings.seed)
        endpoint = LoneEngine(self._launcher.client.endpoint, self._launcher.check)
        self._publisher = self.enter_context(Publisher(endpoint, self._trainer, timeout_s=600))
        parameters, slot_dtype = list(self._trainer.parameters()), getattr(torch, setup.dtype)
        self.read_bytes = sum(parameter.nbytes for parameter in parameters)
        self.written_bytes = sum(parameter.numel() * slot_dtype.itemsize for parameter in parameters)
        copied_bytes = min(self.written_bytes, _MOST_COPIED_BYTES)
        self._source = torch.ones(copied_bytes, dtype=torch.uint8, device=setup.device)
        self._target = torch.empty_like(self._source).copy_(self._source)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Return the execution of the engine, the growth, and the publishes next to a busy trainer."""
        settings, rounds, held = self._settings, 0, {}
        while (before := len(self.samples.swaps)) < settings.publishes:
            progress(f"{before} of {settings.publishes} publishes", before / settings.publishes)
            self._round(self.samples, seed=rounds)
            rounds += 1
            held = held or self._held()
        grown = {name: value - held[name] for name, value in self._held().items()}
        progress("pause, publish and resume")
        self._pausing_round()
        busy = self._measure_busy(progress) if settings.busy_publishes else None
        return {"engine": self._launcher.welcome.execution(), "grown": grown, "busy": busy}

    def _measure_busy(self, progress: Progress) -> dict[str, Any]:
        """Publish while this process computes."""
        samples, rounds = _Samples(), 0
        with computing(self._device):
            while len(samples.swaps) < self._settings.busy_publishes:
                done, asked = len(samples.swaps), self._settings.busy_publishes
                progress(f"{done} of {asked} publishes next to a busy trainer", done / asked)
                self._round(samples, seed=-2 - rounds)
                rounds += 1
        return {
            "num_swaps": len(samples.swaps),
            "gap_ms": samples.gaps_ms(),
            "copy_ms": p50_and_p99([1e3 * seconds for seconds in samples.copies_s]),
        }

    def _held(self) -> dict[str, int]:
        """Return sizes that would grow with a leak."""
        held = {
            "engine_open_files": len(os.listdir(f"/proc/{self._launcher.pid}/fd")),
            "trainer_open_files": len(os.listdir("/proc/self/fd")),
            "shared_memory_files": len(os.listdir(default_directory())),
            "trainer_mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            held |= {"device_bytes": total - free, "trainer_allocated_bytes": torch.cuda.memory_allocated(self._device)}
        return held

    def _round(self, samples: _Samples, *, seed: int) -> None:
        """Draw all sequences from their prompts to their ends, and publish in every other window. Raises ValueError
        without a whole window."""
        before = len(samples.swaps)
        windows = cycle([("quiet", WARM_UP_PASSES + QUIET_PASSES), ("publishes", self._settings.window)])
        window, left = next(windows)  # what happens, and for how many passes or publishes
        last: TokenFrame | None = None
        awaited = 0
        """Published version that is not live yet."""
        for frame in self._full_passes(seed):
            gap = (frame.header.time_ns - last.header.time_ns) / NS_PER_MS if last else 0.0
            last, swap = frame, frame.header.swap
            if swap is not None and swap.version == awaited:
                awaited = 0
                left -= 1
                samples.swap_gaps.append(gap)
                samples.stalls.append(swap.stall_ns / NS_PER_MS)
                samples.swaps.append((frame.header.time_ns - swap.published_ns) / NS_PER_MS)
                samples.copies_s.append(self._publisher.last_copy_s)
            elif not awaited and window == "quiet":
                left -= 1
                if left < QUIET_PASSES:
                    samples.quiet_gaps.append(gap)
            if not left:
                if window == "publishes":
                    samples.memcpys_gb_s.append(self._timed_copy())  # passes that felt it are the next window's warm-up
                window, left = next(windows)
            if window == "publishes" and not awaited:
                awaited = self._publisher.publish()
        if len(samples.swaps) == before or not samples.memcpys_gb_s:
            raise ValueError(
                f"--tokens {self._settings.tokens} is too few for a window of publishes; raise it, or lower --window"
            )

    def _pausing_round(self) -> None:
        """Measure the cost of a pause for new weights: the same engine, the same copy, the same running sequences."""
        client, stalls = self._launcher.client, self.samples.paused_stalls
        for passes, _ in enumerate(self._full_passes(seed=-1), start=1):
            if passes % PASSES_BETWEEN_PAUSES or len(stalls) == PEER_PUBLISHES:
                continue
            began = time.perf_counter()
            client.call("pause")
            version = self._publisher.publish()
            while client.call("status", returns=Status).version < version:
                self._publisher.check()
            client.call("resume")
            stalls.append((time.perf_counter() - began) * 1e3)

    def _full_passes(self, seed: int) -> Iterator[TokenFrame]:
        """Submit random prompts, and yield the frames of passes that drew a token for each and started none, until all
        have ended."""
        settings = self._settings
        draw = random.Random(settings.seed * 1_000_003 + seed)
        params = SamplingParams(max_tokens=settings.tokens, ignore_eos=True, seed=draw.getrandbits(32))
        prompts = [
            Prompt([draw.randrange(self._setup.vocab_size) for _ in range(settings.prompt_tokens)], params)
            for _ in range(settings.sequences)
        ]
        for frame in drawn_frames(self._launcher, self._reader, prompts):
            header = frame.header
            if header.num_tokens == settings.sequences and not header.starts and not header.finishes:
                yield frame

    def _timed_copy(self) -> float:
        """Return the GB/s of a copy, counting bytes read and bytes written."""
        began = time.perf_counter()
        self._target.copy_(self._source)
        if self._source.is_cuda:
            torch.cuda.synchronize()
        return 2 * self._source.nbytes / (time.perf_counter() - began) / 1e9


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Compute products in a thread until the block ends, with a few always queued."""
    began, stop = threading.Event(), threading.Event()

    def multiply() -> None:
        size = _PRODUCT[device.type]
        a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        out, queued = torch.empty_like(a), deque[Any]()
        while not stop.is_set():
            torch.mm(a, b, out=out)
            began.set()
            if device.type == "cuda":
                queued.append(torch.cuda.current_stream(device).record_event())
                if len(queued) > _QUEUED_PRODUCTS:
                    queued.popleft().synchronize()

    with ThreadPoolExecutor(1, "inflight-busy-trainer") as a_thread:
        computed = a_thread.submit(multiply)
        computed.add_done_callback(lambda _: began.set())
        try:
            began.wait()
            yield
        finally:
            stop.set()
    if error := computed.exception():  # measurements next to an idle trainer would look too good
        raise InflightError(f"the trainer did not compute: {error!r}") from error


def halves_of_cores() -> tuple[set[int], set[int]]:
    """Return the cores of the engine and of the trainer. On one core they are the same."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return set(cores[half:]), set(cores[:half] or cores)


@contextmanager
def pinned_to_halves(device: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield two functions that move this process and its later children to the half of the cores of the engine, and of
    the trainer. On a GPU they do nothing."""
    if device != "cpu":
        yield (lambda: None), (lambda: None)
        return
    everything = os.sched_getaffinity(0)
    engine, trainer = halves_of_cores()
    with torch_threads(len(trainer)):
        try:
            yield (lambda: _move_to(engine)), (lambda: _move_to(trainer))
        finally:
            _move_to(everything)


def _move_to(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(thread), cores)


def _measure_peer(settings: SwapOptions, setup: Setup, directory: Path, progress: Progress) -> dict[str, Any]:
    if not settings.peer:
        return {"peer_stall_ms": None, "num_peer_stalls": None, "peer_mode": None, "peer_versions": None}
    progress(f"{settings.peer} is loading the model")
    with Worker(f"{settings.peer}_swap", setup, directory) as worker:
        hello = worker.wait_until_ready()
        progress(f"{settings.peer}: {PEER_PUBLISHES} times pause, load and resume")
        job = Job(
            sequences=settings.sequences,
            tokens=(settings.tokens, settings.tokens),
            prompt_tokens=(settings.prompt_tokens, settings.prompt_tokens),
            seed=settings.seed,
            publishes=PEER_PUBLISHES,
        )
        detail = worker.run(job).detail
    return {
        "peer_stall_ms": {"p50": detail["stall_p50_ms"], "p99": detail["stall_p99_ms"]},
        "num_peer_stalls": int(detail["num_stalls"]),
        "peer_mode": hello.mode,
        "peer_versions": hello.versions,
    }
