"""Measures engines on a CPU next to a program that computes.

    python benchmarks/contention.py [FILE]

Tokens per second, quiet and with one busy process, of three sides: our engine with its choice of threads (`chosen`),
our engine with all threads in every pass (`all`; a given GOMP_SPINCOUNT turns the choice off), and vLLM (`make peers`
installs it). The sides run in turns with the same model and sizes. A ratio is the median over turns.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import finish

import inflight
from inflight.core.sampling import SamplingParams
from inflight.tools.bench.options import ThroughputOptions
from inflight.tools.bench.peer_worker import Job
from inflight.tools.bench.peers import Worker, make_setup

TURNS, SECONDS = 3, 4.0
GCC_SPINS = "300000"
"""What libgomp spins by default."""
PROMPT, GROUPS, SAMPLES, TOKENS, CONTEXT = 32, 4, 8, 256, 512
PARAMS = SamplingParams(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True)


@contextmanager
def busy(is_busy: bool) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def speeds(draw: Callable[[], int]) -> dict[str, float]:
    """Return tokens per second, quiet and next to a busy process. draw: draws once and returns the number of tokens."""
    draw()
    found = {}
    for name in ("quiet", "busy"):
        with busy(name == "busy"):
            began, num_tokens = time.perf_counter(), 0
            while time.perf_counter() - began < SECONDS:
                num_tokens += draw()
            found[name] = num_tokens / (time.perf_counter() - began)
    return found


def our_speeds(model: str, *, chooses: bool) -> dict[str, float]:
    environment = {} if chooses else {"GOMP_SPINCOUNT": GCC_SPINS}
    os.environ.update(environment)
    sizes: dict[str, Any] = {"max_sequences": GROUPS * SAMPLES, "max_context": CONTEXT}
    sizes["threads"] = torch.get_num_threads()
    with inflight.launch(model, device="cpu", dtype="float32", **sizes) as engine:
        for name in environment:
            del os.environ[name]

        def draw() -> int:
            groups = engine.generate([[5] * PROMPT] * GROUPS, PARAMS)
            return sum(len(rollout.token_ids) for group in groups for rollout in group)

        return speeds(draw)


def measure(model: str, vllm: Worker) -> dict[str, Any]:
    sequences = GROUPS * SAMPLES
    job = Job(sequences=sequences, tokens=(TOKENS, TOKENS), prompt_tokens=(PROMPT, PROMPT), seed=0, group=SAMPLES)
    turns = [
        {
            "chosen": our_speeds(model, chooses=True),
            "all": our_speeds(model, chooses=False),
            "vllm": speeds(lambda: vllm.run(job).tokens),
        }
        for _ in range(TURNS)
    ]
    ratios = {
        f"{load}_{name}": median(turn["chosen"][load] / turn[other][load] for turn in turns)
        for load in ("quiet", "busy")
        for name, other in (("ratio", "all"), ("over_vllm", "vllm"))
    }
    busy_to_quiet = median(turn["chosen"]["busy"] / turn["all"]["quiet"] for turn in turns)
    return {"model": model, "turns": turns, **ratios, "busy_to_quiet": busy_to_quiet}


def main() -> None:
    results: list[dict[str, Any]] = []
    for model in ("tiny", "small"):
        with tempfile.TemporaryDirectory() as directory:
            settings = ThroughputOptions(model=model, device="cpu", dtype="float32")
            setup = make_setup(settings, GROUPS * SAMPLES, CONTEXT, threads=0, directory=Path(directory))
            with Worker("vllm", replace(setup, shared_prompts=True), Path(directory)) as vllm:
                vllm.wait_until_ready()
                results.append(measure(model, vllm))
        print(results[-1], flush=True)
    finish("contention", {"threads": torch.get_num_threads(), "results": results})


if __name__ == "__main__":
    main()
