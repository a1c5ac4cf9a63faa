"""`inflight bench swap`: what a running generator feels of new weights, and what another engine does.

The engine draws for a fixed number of sequences in a process of its own; this process receives its frames and
publishes. Windows without publishes, windows of publishes one after another, and copies of the same size between two
plain buffers alternate. On a CPU each side keeps to its half of the cores.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from rich.table import Table

from inflight.bench.options import SwapOptions
from inflight.bench.peer_worker import Job, Setup
from inflight.bench.peers import Worker, interpreter
from inflight.bench.pinning import halves_of_cores, pinned_to_halves
from inflight.bench.throughput import OURS, kv_bytes_per_token, prepare_model
from inflight.core.clock import NS_PER_MS
from inflight.core.frames import TokenFrame
from inflight.core.messages import Prompt, Status
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.device import resolve_device
from inflight.engine.launcher import EngineLauncher
from inflight.engine.loading import load_model
from inflight.stream.reader import StreamReader
from inflight.weights.link import Address
from inflight.weights.publisher import Publisher
from inflight.weights.shared_memory import default_directory

QUIET_PASSES = 16
WARM_UP_PASSES = 8
"""Passes at the beginning of each quiet window that are not counted."""
PEER_PUBLISHES = 20
PASSES_BETWEEN_PAUSES = 16
_MOST_COPIED_BYTES = 2 << 30
"""Bytes, at most, of the plain copy that a publish is compared with."""
_TIMEOUT_MS = 60_000


@dataclass(slots=True)
class _Samples:
    """What was measured, in milliseconds where the name has no other unit."""

    quiet_gaps: list[float] = field(default_factory=list)
    """Times between two passes while nothing is published."""
    copy_gaps: list[float] = field(default_factory=list)
    """Times between two passes of one version while a publish is under way."""
    swap_gaps: list[float] = field(default_factory=list)
    """Times between the last pass with one version and the first with the next."""
    swaps: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    paused_stalls: list[float] = field(default_factory=list)
    """Stalls of an engine that was paused, loaded and resumed."""
    copies_s: list[float] = field(default_factory=list)
    memcpys_gb_s: list[float] = field(default_factory=list)


def measure(settings: SwapOptions, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Publish `publishes` times while the engine draws, and compare with passes between which nothing happens.

    swap_ms, stall_ms, forward_ms (from pass to pass without publishes), gap_ms: {p50, p99}; gap_ratio: p99 of the gap
    between a sequence's tokens across a swap over that without; copy_gb_s and memcpy_gb_s count bytes read and bytes
    written per second, of a publish and of a plain copy of as many bytes (at most 2 GiB) while the engine draws; grown:
    what both processes and the device hold more at the end than after the first round. paused_stall_ms: pausing our own
    engine, publishing, and resuming it with the new weights, as engines do that load in place; with a peer,
    peer_stall_ms: pausing it, loading the same weights from a directory and resuming. Requests keep their caches in
    both, and p99 is the longest of at most 20.
    Raises InflightError or ValueError; `progress` is told what is going on.
    """
    if settings.peer:
        interpreter(settings.peer)
    device = resolve_device(settings.device).type
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as temporary:
        progress("saving the model")
        model = prepare_model(
            settings.model, settings.dtype, settings.seed, device, Path(temporary) if settings.peer else None
        )
        setup = Setup(
            model=model.path,
            device=device,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=model.config.get_text_config().vocab_size,
            max_sequences=settings.sequences,
            max_context=settings.prompt_tokens + settings.tokens,
            kv_bytes_per_token=kv_bytes_per_token(model.config, model.dtype),
            threads=len(halves_of_cores()[0]) if device == "cpu" else 0,
            seed=settings.seed,
        )
        with pinned_to_halves(device) as (engine_side, trainer_side):
            samples, read_bytes, written_bytes, run = _measure_ours(
                settings, setup, engine_side, trainer_side, progress
            )
            peer = _measure_peer(settings, setup, engine_side, Path(temporary), progress)
    copy_s = float(np.median(samples.copies_s))
    quiet, across = percentiles(samples.quiet_gaps), percentiles(samples.swap_gaps)
    return {
        "bench": "swap",
        **asdict(settings),
        "device": setup.device,
        "dtype": setup.dtype,
        "num_swaps": len(samples.swaps),
        "swap_ms": percentiles(samples.swaps),
        "stall_ms": percentiles(samples.stalls),
        "paused_stall_ms": percentiles(samples.paused_stalls),
        "forward_ms": quiet,
        "gap_ms": {"across_swaps": across, "while_copying": percentiles(samples.copy_gaps), "without": quiet},
        "gap_ratio": across["p99"] / quiet["p99"],
        "weight_bytes": written_bytes,
        "copy_ms": percentiles([1e3 * seconds for seconds in samples.copies_s]),
        "copy_gb_s": (read_bytes + written_bytes) / copy_s / 1e9,
        "memcpy_gb_s": float(np.median(samples.memcpys_gb_s)),
        **run,
        **peer,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Return {"p50": …, "p99": …} of at least one value."""
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def table(result: dict[str, Any]) -> Table:
    shown = Table(
        title=f"{result['model']} {result['dtype']} on {result['device']}: {result['num_swaps']} publishes, "
        f"{result['sequences']} sequences in flight",
        title_justify="left",
    )
    for name in ("ms", "p50", "p99"):
        shown.add_column(name, justify="left" if name == "ms" else "right")

    def row(name: str, values: dict[str, float] | None) -> None:
        if values:
            shown.add_row(name, f"{values['p50']:,.3g}", f"{values['p99']:,.3g}")

    row("stall: work, and no pass because of a swap", result["stall_ms"])
    row("swap: publish() to the first token", result["swap_ms"])
    row("copy of the parameters into a slot", result["copy_ms"])
    row("token to token without publishes", result["gap_ms"]["without"])
    row("token to token while a publish is copied", result["gap_ms"]["while_copying"])
    row("token to token across a swap", result["gap_ms"]["across_swaps"])
    row("ours as others do it: pause, publish, resume", result["paused_stall_ms"])
    row(f"{result['peer']}: pause, load, resume", result["peer_stall_ms"])
    shown.caption = (
        f"gap ratio {result['gap_ratio']:.2f}; copy {result['copy_gb_s']:.1f} GB/s, plain copy of as much "
        f"{result['memcpy_gb_s']:.1f} GB/s"
    )
    return shown


# ---- ours -----------------------------------------------------------------------------------------------------------


def _measure_ours(
    settings: SwapOptions,
    setup: Setup,
    engine_side: Callable[[], None],
    trainer_side: Callable[[], None],
    progress: Callable[[str], None],
) -> tuple[_Samples, int, int, dict[str, Any]]:
    """Return (samples, bytes that a publish reads, bytes that it writes, and how the engine runs, how many rounds of
    prompts it took, what has grown meanwhile)."""
    samples = _Samples()
    with ExitStack() as stack:
        progress(f"{OURS} is loading the model")
        zmq.Context.instance().socket(zmq.DEALER).close()  # its threads begin here, on both halves
        engine_side()
        options = EngineOptions(
            model=setup.model,
            device=setup.device,
            dtype=setup.dtype,
            slots=settings.slots,
            max_sequences=settings.sequences,
            max_context=setup.max_context,
            threads=setup.threads,
            seed=settings.seed,
        )
        launcher = EngineLauncher(options)
        stack.callback(launcher.close)
        trainer_side()
        reader = StreamReader(launcher.welcome.stream_endpoint)
        stack.callback(reader.close)
        masters = setup.dtype if settings.masters == "auto" else settings.masters
        dtype, device = getattr(torch, masters), resolve_device(setup.device)
        trainer = load_model(setup.model, dtype=dtype, device=device, seed=settings.seed)
        publisher = stack.enter_context(
            Publisher(Address(launcher.client.endpoint, launcher.check), trainer, timeout_s=600)
        )
        read_bytes, written_bytes = copied_bytes(trainer, getattr(torch, setup.dtype))
        source = torch.ones(min(written_bytes, _MOST_COPIED_BYTES), dtype=torch.uint8, device=setup.device)
        target = torch.empty_like(source).copy_(source)
        rounds, held = 0, {}
        while len(samples.swaps) < settings.publishes:
            before = len(samples.swaps)
            progress(f"{before} of {settings.publishes} publishes")
            _round(settings, setup, launcher, reader, publisher, (source, target), samples, seed=rounds)
            rounds += 1
            if rounds == 1:
                held = _held(launcher.pid, device)
            if len(samples.swaps) == before:
                raise ValueError(f"--tokens {settings.tokens} is too few for a window of publishes; raise it")
        grown = {name: value - held[name] for name, value in _held(launcher.pid, device).items()}
        how = launcher.welcome.execution()
        progress("pause, publish and resume")
        _pausing_round(settings, setup, launcher, reader, publisher, samples)
    return samples, read_bytes, written_bytes, {"engine": how, "num_rounds": rounds, "grown": grown}


def _held(engine_pid: int, device: torch.device) -> dict[str, int]:
    """Count what a leak would make grow."""
    held = {
        "engine_open_files": len(os.listdir(f"/proc/{engine_pid}/fd")),
        "trainer_open_files": len(os.listdir("/proc/self/fd")),
        "shared_memory_files": len(os.listdir(default_directory())),
        "trainer_mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held |= {"device_bytes": total - free, "trainer_allocated_bytes": torch.cuda.memory_allocated(device)}
    return held


def _round(
    settings: SwapOptions,
    setup: Setup,
    launcher: EngineLauncher,
    reader: StreamReader,
    publisher: Publisher,
    buffers: tuple[torch.Tensor, torch.Tensor],
    samples: _Samples,
    *,
    seed: int,
) -> None:
    """Draw all sequences from their prompts to their ends, and publish in every other window."""
    _submit(settings, setup, launcher, seed=seed)
    windows = _windows(settings.window)
    window, left = next(windows)
    last: TokenFrame | None = None
    awaited = 0
    """The version that was published and is not live yet."""
    for frame in _full_passes(launcher, reader, settings.sequences):
        gap = (frame.header.time_ns - last.header.time_ns) / NS_PER_MS if last else 0.0
        last, swap = frame, frame.header.swap
        if swap is not None and swap.version == awaited:
            awaited = 0
            left -= 1
            samples.swap_gaps.append(gap)
            samples.stalls.append(swap.stall_ns / NS_PER_MS)
            samples.swaps.append((frame.header.time_ns - swap.published_ns) / NS_PER_MS)
            samples.copies_s.append(publisher.last_copy_s)
        elif awaited:
            samples.copy_gaps.append(gap)
        elif window == "quiet":
            left -= 1
            if left < QUIET_PASSES:
                samples.quiet_gaps.append(gap)
        if not left:
            if window == "publishes":
                samples.memcpys_gb_s.append(_timed_copy(*buffers))  # passes that felt it are the next window's warm-up
            window, left = next(windows)
        if window == "publishes" and not awaited:
            awaited = publisher.publish()


def _pausing_round(
    settings: SwapOptions,
    setup: Setup,
    launcher: EngineLauncher,
    reader: StreamReader,
    publisher: Publisher,
    samples: _Samples,
) -> None:
    """Measure what it would cost to stop for new weights: the same engine, the same copy, the same sequences in
    flight."""
    _submit(settings, setup, launcher, seed=-1)
    for passes, _ in enumerate(_full_passes(launcher, reader, settings.sequences), start=1):
        if passes % PASSES_BETWEEN_PAUSES or len(samples.paused_stalls) == PEER_PUBLISHES:
            continue
        began = time.perf_counter()
        launcher.client.call("pause")
        version = publisher.publish()
        while launcher.client.call("status", returns=Status).version < version:
            publisher.check()
        launcher.client.call("resume")
        samples.paused_stalls.append((time.perf_counter() - began) * 1e3)


def _submit(settings: SwapOptions, setup: Setup, launcher: EngineLauncher, *, seed: int) -> None:
    draw = random.Random(settings.seed * 1_000_003 + seed)
    params = SamplingParams(max_tokens=settings.tokens, ignore_eos=True, seed=draw.getrandbits(32))
    prompts = [
        Prompt([draw.randrange(setup.vocab_size) for _ in range(settings.prompt_tokens)], params)
        for _ in range(settings.sequences)
    ]
    launcher.client.call("submit", {"prompts": prompts}, list[int])


def copied_bytes(model: torch.nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that a publish of all parameters into slots of this dtype reads and writes."""
    parameters = list(model.parameters())
    return sum(p.nbytes for p in parameters), sum(p.numel() * dtype.itemsize for p in parameters)


def _windows(publishes: int) -> Iterator[tuple[str, int]]:
    """Yield (what happens, how many passes or publishes it lasts), in alternation."""
    while True:
        yield "quiet", WARM_UP_PASSES + QUIET_PASSES
        yield "publishes", publishes


def _full_passes(launcher: EngineLauncher, reader: StreamReader, sequences: int) -> Iterator[TokenFrame]:
    """Yield the frames of passes that drew a token for each sequence and started none, until all have ended."""
    num_finished = 0
    while num_finished < sequences:
        frame = reader.receive(_TIMEOUT_MS)
        if frame is None:
            launcher.check()
            raise TimeoutError(f"no frame within {_TIMEOUT_MS / 1000:.0f} s")
        num_finished += len(frame.header.finishes)
        if frame.header.num_tokens == sequences and not frame.header.starts and not frame.header.finishes:
            yield frame


def _timed_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the GB/s of a copy, counting bytes read and bytes written."""
    began = time.perf_counter()
    target.copy_(source)
    if source.is_cuda:
        torch.cuda.synchronize()
    return 2 * source.nbytes / (time.perf_counter() - began) / 1e9


# ---- the peer -------------------------------------------------------------------------------------------------------


def _measure_peer(
    settings: SwapOptions,
    setup: Setup,
    engine_side: Callable[[], None],
    directory: Path,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    if not settings.peer:
        return {"peer_stall_ms": None, "peer_mode": None, "peer_versions": None}
    progress(f"{settings.peer} is loading the model")
    engine_side()
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
        "peer_mode": hello.mode,
        "peer_versions": hello.versions,
    }
