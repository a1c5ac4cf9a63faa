"""vLLM as a worker of `inflight bench swap`: pause and keep, load, resume; runs in the interpreter of `make peers`."""

import asyncio
import importlib.metadata
import statistics
import time
import uuid

from inflight.bench.peer_vllm import engine_arguments, refuse_other_device
from inflight.bench.peer_worker import Generate, Hello, Job, Run, Setup, random_requests, serve

PAUSE_BETWEEN_S = 0.3
"""Seconds between two pauses, in which sequences go on."""


def load(setup: Setup) -> tuple[Hello, Generate]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    refuse_other_device(setup)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(setup)))

    engine = loop.run_until_complete(start())

    async def swap(job: Job) -> Run:
        num_tokens, started = 0, 0
        logprobs: list[float] = []

        async def draw(ids: list[int], tokens: int) -> None:
            nonlocal num_tokens, started
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
            first = True
            async for output in engine.generate({"prompt_token_ids": ids}, params, uuid.uuid4().hex):
                started += first
                first = False
                sample = output.outputs[0]
            num_tokens += len(sample.token_ids)
            logprobs.extend(row[t].logprob for t, row in zip(sample.token_ids, sample.logprobs, strict=True))

        began = time.perf_counter()
        drawing = [asyncio.create_task(draw(ids, tokens)) for ids, tokens in random_requests(job, setup.vocab_size)]
        while started < job.sequences:
            await asyncio.sleep(0.01)
        stalls_ms = []
        for _ in range(job.publishes):
            await asyncio.sleep(PAUSE_BETWEEN_S)
            if any(task.done() for task in drawing):
                break
            paused = time.perf_counter()
            await engine.pause_generation(mode="keep", clear_cache=False)
            await engine.collective_rpc("reload_weights", kwargs={"weights_path": setup.model})
            await engine.resume_generation()
            stalls_ms.append((time.perf_counter() - paused) * 1e3)
        await asyncio.gather(*drawing)
        if len(stalls_ms) < 2:
            raise RuntimeError("the sequences ended before weights could be loaded twice; draw more tokens")
        return Run(
            seconds=time.perf_counter() - began,
            tokens=num_tokens,
            logprob_mean=sum(logprobs) / len(logprobs),
            detail={
                "stall_p50_ms": statistics.median(stalls_ms),
                "stall_p99_ms": max(stalls_ms),
                "num_stalls": len(stalls_ms),
            },
        )

    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions["vllm"] = importlib.metadata.version(importlib.metadata.packages_distributions().get("vllm", ["vllm"])[0])
    hello = Hello(
        mode="pause_generation(keep), reload_weights, resume_generation", threads=setup.threads, versions=versions
    )
    return hello, lambda job: loop.run_until_complete(swap(job))


if __name__ == "__main__":
    serve(load)
