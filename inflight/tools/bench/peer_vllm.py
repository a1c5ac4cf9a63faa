"""vLLM as a worker of `inflight bench throughput` and of `inflight bench swap` (pause and keep, load, resume). It runs
in the interpreter of `make peers`."""

import asyncio
import importlib.metadata
import statistics
import sys
import time
import uuid
from typing import Any

from inflight.tools.bench.peer_worker import Generate, Hello, Job, Run, Setup, random_requests, serve

LEAST_KV_CACHE_BYTES = 2 << 30
FREE_SHARE = 0.9
"""Share of the free memory of a GPU that vLLM may use at most."""
PAUSE_BETWEEN_S = 0.3
"""Seconds between two pauses. Sequences continue in this time."""


def load(setup: Setup) -> tuple[Hello, Generate]:
    import torch
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    llm = LLM(**engine_arguments(setup))

    def generate(job: Job) -> Run:
        requests = random_requests(job, setup.vocab_size)
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [sampling_params(tokens) for _, tokens in requests]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        logprobs = [logprob for output in outputs for logprob in drawn_logprobs(output.outputs[0])]
        return Run(seconds=seconds, tokens=len(logprobs), logprob_mean=sum(logprobs) / len(logprobs))

    return Hello(mode="LLM.generate", threads=torch.get_num_threads(), versions=versions()), generate


def load_swap(setup: Setup) -> tuple[Hello, Generate]:
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    arguments = engine_arguments(setup)

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    engine = loop.run_until_complete(start())

    async def swap(job: Job) -> Run:
        started = 0
        logprobs: list[float] = []

        async def draw(ids: list[int], tokens: int) -> None:
            nonlocal started
            first = True
            async for output in engine.generate({"prompt_token_ids": ids}, sampling_params(tokens), uuid.uuid4().hex):
                started += first
                first = False
                sample = output.outputs[0]
            logprobs.extend(drawn_logprobs(sample))

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
            tokens=len(logprobs),
            logprob_mean=sum(logprobs) / len(logprobs),
            detail={
                "stall_p50_ms": statistics.median(stalls_ms),
                "stall_p99_ms": max(stalls_ms),
                "num_stalls": len(stalls_ms),
            },
        )

    mode = "pause_generation(keep), reload_weights, resume_generation"
    hello = Hello(mode=mode, threads=setup.threads, versions=versions())
    return hello, lambda job: loop.run_until_complete(swap(job))


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """Return the arguments of vLLM. Raises RuntimeError if vLLM runs on another device."""
    import torch
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.device_type != setup.device:
        raise RuntimeError(f"this vLLM runs on {current_platform.device_type}, and {setup.device} was asked for")
    blocks_tokens = setup.max_context + 256  # whole blocks of up to 128 tokens, and one to spare
    kv_cache_bytes = setup.max_sequences * blocks_tokens * setup.kv_bytes_per_token
    arguments: dict[str, Any] = {}
    if setup.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        # vLLM refuses to start if less than this share is free. Our engine runs at the same time.
        arguments["gpu_memory_utilization"] = FREE_SHARE * free / total
    return arguments | {
        "model": setup.model,
        "dtype": setup.dtype,
        "seed": setup.seed,
        "max_num_seqs": setup.max_sequences,
        "max_model_len": setup.max_context,
        "kv_cache_memory_bytes": max(LEAST_KV_CACHE_BYTES, kv_cache_bytes),
        "enable_prefix_caching": setup.shared_prompts,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }


def sampling_params(tokens: int) -> Any:
    """Draw at temperature 1 from all tokens, and return only the log-probability of the drawn token."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return SamplingParams(**whole, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)


def drawn_logprobs(sample: Any) -> list[float]:
    return [row[token].logprob for token, row in zip(sample.token_ids, sample.logprobs, strict=True)]


def versions() -> dict[str, str]:
    """Return the versions of vLLM, under the name of its distribution, and of its main dependencies."""
    vllm = importlib.metadata.packages_distributions().get("vllm", ["vllm"])[0]
    return {name: importlib.metadata.version(name) for name in (vllm, "torch", "transformers")}


if __name__ == "__main__":
    serve(load_swap if sys.argv[2] == "vllm_swap" else load)
