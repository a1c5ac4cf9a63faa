"""vLLM as a worker of `inflight bench throughput`; runs in the interpreter of `make peers`."""

import importlib.metadata
import time
from typing import Any

from inflight.bench.peer_worker import Generate, Hello, Job, Run, Setup, random_requests, serve

LEAST_KV_CACHE_BYTES = 2 << 30


def load(setup: Setup) -> tuple[Hello, Generate]:
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    refuse_other_device(setup)
    llm = LLM(**engine_arguments(setup))

    def generate(job: Job) -> Run:
        requests = random_requests(job, setup.vocab_size)
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [
            SamplingParams(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=0,  # of the token drawn alone
                detokenize=False,
            )
            for _, tokens in requests
        ]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        samples = [output.outputs[0] for output in outputs]
        logprobs = [row[token].logprob for s in samples for token, row in zip(s.token_ids, s.logprobs, strict=True)]
        return Run(seconds=seconds, tokens=len(logprobs), logprob_mean=sum(logprobs) / len(logprobs))

    installed = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    versions = {name: importlib.metadata.version(name) for name in (installed[0], "torch", "transformers")}
    return Hello(mode="LLM.generate", threads=torch.get_num_threads(), versions=versions), generate


def engine_arguments(setup: Setup) -> dict[str, Any]:
    """Return the arguments that vLLM is started with."""
    blocks_tokens = setup.max_context + 256  # whole blocks of up to 128 tokens, and one to spare
    return {
        "model": setup.model,
        "dtype": setup.dtype,
        "seed": setup.seed,
        "max_num_seqs": setup.max_sequences,
        "max_model_len": setup.max_context,
        "kv_cache_memory_bytes": max(
            LEAST_KV_CACHE_BYTES, setup.max_sequences * blocks_tokens * setup.kv_bytes_per_token
        ),
        "enable_prefix_caching": False,  # no two prompts share a prefix
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }


def refuse_other_device(setup: Setup) -> None:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.device_type != setup.device:
        raise RuntimeError(f"this vLLM runs on {current_platform.device_type}, and {setup.device} was asked for")


if __name__ == "__main__":
    serve(load)
