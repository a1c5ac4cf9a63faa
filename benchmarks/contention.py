"""Measures an engine on a CPU next to a program that computes.

    python benchmarks/contention.py [FILE]

Tokens per second from `generate`, quiet and with one busy process, with the engine's choice of threads and with all
threads in every pass (a given GOMP_SPINCOUNT turns the choice off). Both sides run alternately. A ratio is the median
over pairs.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from harness import finish

import inflight
from inflight.core.sampling import SamplingParams

PAIRS, SECONDS = 3, 4.0
GCC_SPINS = "300000"
"""What libgomp spins by default."""
PROMPTS = [[5] * 32] * 4
PARAMS = SamplingParams(n=8, max_tokens=256, ignore_eos=True)


@contextmanager
def busy(is_busy: bool) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def tokens_per_s(model: str, *, chooses: bool) -> dict[str, float]:
    """Draw with a new engine, quiet and next to a busy process."""
    environment = {} if chooses else {"GOMP_SPINCOUNT": GCC_SPINS}
    os.environ.update(environment)
    threads = torch.get_num_threads()
    with inflight.launch(model, device="cpu", max_sequences=32, max_context=512, threads=threads) as engine:
        for name in environment:
            del os.environ[name]
        engine.generate(PROMPTS, PARAMS)
        speeds = {}
        for name in ("quiet", "busy"):
            with busy(name == "busy"):
                began, num_tokens = time.perf_counter(), 0
                while time.perf_counter() - began < SECONDS:
                    groups = engine.generate(PROMPTS, PARAMS)
                    num_tokens += sum(len(rollout.token_ids) for group in groups for rollout in group)
                speeds[name] = num_tokens / (time.perf_counter() - began)
    return speeds


def main() -> None:
    results: list[dict[str, Any]] = []
    for model in ("tiny", "small"):
        pairs = [
            {name: tokens_per_s(model, chooses=name == "chosen") for name in ("chosen", "all")} for _ in range(PAIRS)
        ]
        point: dict[str, Any] = {"model": model, "pairs": pairs}
        for load in ("quiet", "busy"):
            point[f"{load}_ratio"] = median(pair["chosen"][load] / pair["all"][load] for pair in pairs)
        point["busy_to_quiet"] = median(pair["chosen"]["busy"] / pair["all"]["quiet"] for pair in pairs)
        print(point, flush=True)
        results.append(point)
    finish("contention", {"threads": torch.get_num_threads(), "results": results})


if __name__ == "__main__":
    main()
