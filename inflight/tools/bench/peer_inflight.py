"""Our engine as a worker of `inflight bench throughput`: our loop in this process, or vLLM in an engine process with a
stream to this process."""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import transformers

from inflight.core.frames import TokenFrame
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.core.version import __version__
from inflight.engine.process.process import make_backend
from inflight.fleet.process.local import LocalProcess
from inflight.stream.reader import StreamReader
from inflight.tools.bench.peer_worker import Generate, Hello, Job, Run, Setup, random_requests, serve

COPY_BYTES = 1 << 30
NUM_COPIES = 20
_TIMEOUT_MS = 60_000

Draw = Callable[[list[Prompt]], Iterator[TokenFrame]]
"""Submits prompts and yields the frames of all passes until all prompts have ended."""


def load(setup: Setup, backend: str) -> tuple[Hello, Generate]:
    copy_gb_s = _copy_gb_s() if setup.device == "cuda" else None
    options = EngineOptions(
        model=setup.model,
        backend=backend,
        device=setup.device,
        dtype=setup.dtype,
        max_sequences=setup.max_sequences,
        max_context=setup.max_context,
        prefix_caching=backend != "vllm",  # no two prompts share a prefix, and vLLM as a peer looks for none
        threads=setup.threads,
    )
    mode, draw = _on_stream(options) if backend == "vllm" else _in_process(options)

    def generate(job: Job) -> Run:
        prompts = [
            Prompt(ids, SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=job.seed + index))
            for index, (ids, tokens) in enumerate(random_requests(job, setup.vocab_size))
        ]
        frames, times = [], []
        began = time.perf_counter()
        for frame in draw(prompts):
            frames.append(frame)
            times.append(time.perf_counter() - began)
        logprobs = np.concatenate([frame.logprobs for frame in frames])
        prefilled = max(index for index, frame in enumerate(frames) if frame.header.starts)
        detail = {}
        decoding = [i for i in range(prefilled + 1, len(frames)) if frames[i].header.num_tokens == job.sequences]
        if decoding:
            steps_s = [times[i] - times[i - 1] for i in decoding]
            drawn = np.cumsum([frame.header.num_tokens for frame in frames])
            context = sum(len(prompt.token_ids) for prompt in prompts) + drawn[np.array(decoding) - 1].mean()
            detail = {
                "decode_step_s": float(np.mean(steps_s)),
                "context_tokens": float(context),
            }
        return Run(seconds=times[-1], tokens=len(logprobs), logprob_mean=float(logprobs.mean()), detail=detail)

    hello = Hello(
        mode=mode,
        threads=torch.get_num_threads(),
        versions={
            "inflight": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        copy_gb_s=copy_gb_s,
    )
    return hello, generate


def _in_process(options: EngineOptions) -> tuple[str, Draw]:
    """Prepare our loop. Returns a description and a function that draws."""
    engine = make_backend(options)
    gc.collect()
    gc.freeze()  # as the engine's own process does

    def draw(prompts: list[Prompt]) -> Iterator[TokenFrame]:
        engine.requests.submit(prompts)
        while engine.has_work:
            frame = engine.step()
            if frame is not None:
                yield frame

    return f"{type(engine).__name__}.step: {engine.description}", draw


def _on_stream(options: EngineOptions) -> tuple[str, Draw]:
    """Prepare an engine process, from `submit` to the stream. Returns the same values as `_in_process`."""
    launcher = LocalProcess(options)
    draw = partial(drawn_frames, launcher, StreamReader(launcher.welcome.stream_endpoint))
    return f"submit() to the stream, backend {options.backend}", draw


def drawn_frames(launcher: LocalProcess, reader: StreamReader, prompts: list[Prompt]) -> Iterator[TokenFrame]:
    """Submit prompts of one sample each, and yield the frames of all passes until all have ended."""
    launcher.client.call("submit", {"prompts": prompts}, list[int])
    num_finished = 0
    while num_finished < len(prompts):
        frame = reader.receive(_TIMEOUT_MS)
        if frame is None:
            launcher.check()
            raise TimeoutError(f"no frame within {_TIMEOUT_MS / 1000:.0f} s")
        num_finished += len(frame.header.finishes)
        yield frame


def _copy_gb_s() -> float:
    """Measure a copy within the device's memory in GB/s, counting bytes read and bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = []
    for _ in range(NUM_COPIES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    del source, target
    torch.cuda.empty_cache()
    return 2 * COPY_BYTES / float(np.median(milliseconds)) / 1e6


if __name__ == "__main__":
    serve(lambda setup: load(setup, "vllm" if sys.argv[2] == "inflight_vllm" else "inflight"))
