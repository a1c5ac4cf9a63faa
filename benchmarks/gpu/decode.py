"""The time of a decoding pass, plain and with each filter, and tokens per second with a backlog, in one process.

    python benchmarks/gpu/decode.py [--device cuda] [--model qwen3-1.7b] [--json PATH]

Prompts and weights are random, so that distributions are flat and top-p leaves most of the vocabulary in the sampling
mask. With a backlog, groups of 8 that end independently wait in
the queue, and passes also compute the prompts of starting groups.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from inflight.core.frames import TokenFrame
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.tools.environment import write_result

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy": {"return_entropy": True},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.95, sampling mask": {"top_p": 0.95, "return_sampling_mask": True},
}
GROUP = 8
ROUNDS = 3
"""Number of sequences of the backlog, as a multiple of the running sequences."""


class Bench:
    def __init__(self, model: str, device: str):
        on_gpu = device != "cpu"
        self._sequences, self._passes = (256, 40) if on_gpu else (8, 3)
        self._prompt_tokens, self._tokens = ((100, 1024), (100, 500)) if on_gpu else ((10, 40), (5, 20))
        self.engine = Engine(
            EngineOptions(
                model=model,
                device=device,
                dtype="bfloat16",
                max_sequences=self._sequences,
                max_context=self._prompt_tokens[1] + 2 * self._tokens[1],
            )
        )
        self._rng = np.random.default_rng(0)

    def pass_ms(self, **params: Any) -> dict[str, float]:
        """Return the time from pass to pass while all sequences decode, {p50, mean} in milliseconds."""
        ids = self._submit(self._sequences, max_tokens=self._tokens[1], **params)
        started = 0
        while started < self._sequences:
            frame = self.engine.step()
            started += len(frame.header.starts) if frame is not None else 0
        times_s = []
        for _ in range(4 + self._passes):
            began = time.perf_counter()
            self.engine.step()
            times_s.append(time.perf_counter() - began)
        self.engine.requests.cancel(ids)
        self._finish()
        times_ms = 1e3 * np.array(times_s[4:])
        return {"p50": float(np.median(times_ms)), "mean": float(times_ms.mean())}

    def backlog(self) -> dict[str, float]:
        """Return the tokens per second of three times as many sequences as run at a time, in groups."""
        for length in self._rng.integers(*self._tokens, ROUNDS * self._sequences // GROUP):
            self._submit(1, n=GROUP, max_tokens=int(length))
        began = time.perf_counter()
        frames = self._finish()
        seconds = time.perf_counter() - began
        headers = [frame.header for frame in frames]
        return {
            "tokens_per_s": sum(header.num_tokens for header in headers) / seconds,
            "passes": len(headers),
            "passes_with_starts": sum(bool(header.starts) for header in headers),
        }

    def _submit(self, count: int, **params: Any) -> list[int]:
        prompts = [
            Prompt(
                self._rng.integers(self.engine.vocab_size, size=self._rng.integers(*self._prompt_tokens)).tolist(),
                SamplingParams(ignore_eos=True, **params),
            )
            for _ in range(count)
        ]
        return list(self.engine.requests.submit(prompts))

    def _finish(self) -> list[TokenFrame]:
        frames = []
        while self.engine.has_work:
            if (frame := self.engine.step()) is not None:
                frames.append(frame)
        return frames


def main(model: str, device: str) -> dict[str, Any]:
    bench = Bench(model, device)
    bench.pass_ms()  # compiles kernels
    pass_ms = {name: bench.pass_ms(**params) for name, params in SETTINGS.items()}
    return {
        "bench": "decode",
        "model": model,
        "device": device,
        "engine": bench.engine.description,
        "pass_ms": pass_ms,
        "backlog": bench.backlog(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="qwen3-1.7b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = main(options.model, options.device)
    for name, times in measured["pass_ms"].items():
        print(f"{name:28} {times['p50']:8.2f} ms")
    print(f"{'backlog':28} {measured['backlog']['tokens_per_s']:8,.0f} tokens/s")
    if options.json:
        write_result(options.json, measured)
