"""Our engine as a worker of `inflight bench throughput`."""

import gc
import time

import numpy as np
import torch
import transformers

import inflight
from inflight.bench.peer_worker import Generate, Hello, Job, Run, Setup, random_requests, serve
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.engine import Engine

COPY_BYTES = 1 << 30
NUM_COPIES = 20


def load(setup: Setup) -> tuple[Hello, Generate]:
    copy_gb_s = _copy_gb_s() if setup.device == "cuda" else None
    engine = Engine(
        EngineOptions(
            model=setup.model,
            device=setup.device,
            dtype=setup.dtype,
            max_sequences=setup.max_sequences,
            max_context=setup.max_context,
            threads=setup.threads,
        )
    )
    gc.collect()
    gc.freeze()  # as the engine's own process does

    def generate(job: Job) -> Run:
        prompts = [
            Prompt(ids, SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=job.seed + index))
            for index, (ids, tokens) in enumerate(random_requests(job, setup.vocab_size))
        ]
        frames, times = [], []
        began = time.perf_counter()
        engine.submit(prompts)
        while engine.has_work:
            frame = engine.step()
            if frame is not None:
                frames.append(frame)
                times.append(time.perf_counter() - began)
        logprobs = np.concatenate([frame.logprobs for frame in frames])
        prefilled = max(index for index, frame in enumerate(frames) if frame.header.starts)
        detail = {"prefill_s": times[prefilled]}
        decoding = [i for i in range(prefilled + 1, len(frames)) if frames[i].header.num_tokens == job.sequences]
        if decoding:
            steps_s = [times[i] - times[i - 1] for i in decoding]
            drawn = np.cumsum([frame.header.num_tokens for frame in frames])
            context = sum(len(prompt.token_ids) for prompt in prompts) + drawn[np.array(decoding) - 1].mean()
            detail |= {
                "step_ms": float(np.median(steps_s)) * 1e3,
                "decode_step_s": float(np.mean(steps_s)),
                "context_tokens": float(context),
            }
        return Run(seconds=times[-1], tokens=len(logprobs), logprob_mean=float(logprobs.mean()), detail=detail)

    hello = Hello(
        mode=f"Engine.step: {engine.describe()}",
        threads=torch.get_num_threads(),
        versions={
            "inflight": inflight.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        copy_gb_s=copy_gb_s,
    )
    return hello, generate


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
    serve(load)
