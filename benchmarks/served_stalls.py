"""Measures how long clients of a server wait for tokens because of a weight update: our server and vLLM's.

    python benchmarks/served_stalls.py [FILE] [UPDATES]

Each server is a separate process with one thread for forward passes. The servers run alternately, in two rounds, with
the same load: RATE streamed requests per second at the same random times, and a checkpoint to load every second. vLLM
is paused (mode "keep") around its update. `stall_ms`: per update, the longest time between two tokens of a request that
overlaps with the update, over all requests. `quiet_ms`: the longest such time that ends in the half second before the
call. Updates without a running request have no stall. Percentiles leave out the first updates of a round.
`engine_stall_ms`: our engine's own measure. 100 UPDATES of each server take five minutes on an idle machine. `make
peers` installs vLLM.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from time import monotonic, monotonic_ns
from typing import Any

import aiohttp
import numpy as np
import torch
from harness import finish
from serve import CONTEXT, MODEL, prompt, save_model
from transformers import AutoModelForCausalLM
from vllm_server import vllm_server, vllm_version

from inflight.engine.model.shapes import shape_config
from inflight.tools.bench.spread import percentiles

RATE, TOKENS, ROUNDS, WARM_UP, SEQUENCES = 4.0, 96, 2, 2, "64"


@contextmanager
def our_server(model: str) -> Iterator[str]:
    command = [sys.executable, "-m", "inflight.tools.cli", "serve", model, "--served-model-name", MODEL, "--port", "0"]
    command += ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-sequences", SEQUENCES]
    command += ["--max-context", str(CONTEXT), "--stream-interval-ms", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield next(word for line in process.stdout or () for word in line.split() if word.startswith("http://"))
        finally:
            process.terminate()


class Server:
    """A server, and the times of its tokens and updates in nanoseconds."""

    def __init__(self, url: str, kind: str, http: aiohttp.ClientSession):
        self._url, self._kind, self._http = url, kind, http
        self._arrivals, self._updates = list[np.ndarray](), list[tuple[int, int]]()
        self._metrics: list[str] = []

    async def _ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> str:
        async with self._http.request(method, self._url + path, json=body) as answer:
            return await answer.text()

    async def update(self, directory: str) -> str:
        """Load a checkpoint. Returns the tokens that it draws."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        calls: list[Any] = [("/pause?mode=keep&clear_cache=false",), ("/collective_rpc", reload), ("/resume",)]
        if self._kind == "inflight":
            calls = [("/update_weights", {"weight_dir": directory})]
        called = monotonic_ns()
        for call in calls:
            await self._ask(*call)
        self._updates.append((called, monotonic_ns()))
        answer = await self._ask("/v1/completions", {"model": MODEL, "prompt": [1], "max_tokens": 4, "temperature": 0})
        return json.loads(answer)["choices"][0]["text"]

    async def _draw(self, index: int, at: float) -> None:
        await asyncio.sleep(at - monotonic())
        body = {"model": MODEL, "prompt": prompt(index), "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with self._http.post(self._url + "/v1/completions", json=body) as answer:
            lines = [(line, monotonic_ns()) async for line in answer.content if line.startswith(b"data: {")]
        if not lines or b'"length"' not in lines[-1][0]:
            raise RuntimeError(f"{self._kind} has not finished an answer: {lines[-1:]}")
        self._arrivals.append(np.array([time for _, time in lines]))

    async def measure(self, directories: list[str], updates: int, seed: int) -> None:
        """Draw at random times, and update. Raises RuntimeError if the weights do not change."""
        starts = monotonic() + np.random.default_rng(seed).exponential(1 / RATE, int(RATE * (updates + 4))).cumsum()
        drawing = [asyncio.create_task(self._draw(seed * 10_000 + i, at)) for i, at in enumerate(starts)]
        began, texts = monotonic(), list[str]()
        for index in range(updates):
            await asyncio.sleep(began + 2 + index - monotonic())
            texts.append(await self.update(directories[index % 2]))
        if len(set(texts[::2])) != 1 or len(set(texts[1::2])) != 1 or texts[0] == texts[1]:
            raise RuntimeError(f"{self._kind} draws these texts by the two checkpoints: {texts}")
        await asyncio.gather(*drawing)

        self._metrics = (await self._ask("/metrics", None, "GET")).splitlines()

    def waits(self) -> tuple[list[float], list[float], list[float]]:
        """Return milliseconds of each update after the first ones: the longest wait, the longest one before, and the
        update itself. Updates without a running request have no wait."""
        begins, ends = (
            np.concatenate([times[part] for times in self._arrivals]) for part in (slice(-1), slice(1, None))
        )

        def longest(which: list[np.ndarray]) -> list[float]:
            return [round(float((ends - begins)[gaps].max()) / 1e6, 1) for gaps in which if gaps.any()]

        updates = self._updates[WARM_UP:]
        return (
            longest([(ends > called) & (begins < answered) for called, answered in updates]),
            longest([(ends > called - 500_000_000) & (ends < called) for called, _ in updates]),
            [(answered - called) / 1e6 for called, answered in updates],
        )

    def engine_stalls(self) -> dict[str, float]:
        """Return our engine's own stalls in milliseconds by quantile, or none for vLLM."""
        return {x.split('"')[1]: 1e3 * float(x.split()[1]) for x in self._metrics if "stall_seconds{" in x}


def result(servers: list[Server]) -> dict[str, Any]:
    stalls, quiet, updates = (
        list(chain.from_iterable(each)) for each in zip(*(server.waits() for server in servers), strict=True)
    )
    return {
        "stall_ms": percentiles(stalls),
        "quiet_ms": percentiles(quiet),
        "update_ms": percentiles(updates),
        "engine_stall_ms": [server.engine_stalls() for server in servers],
        "stalls_ms": stalls,
    }


async def main() -> None:
    updates = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    names = ("--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--max-num-seqs", SEQUENCES)
    rounds: dict[str, list[Server]] = {"inflight": [], "vllm": []}
    with ExitStack() as at_end:
        directories = [save_model(at_end.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(shape_config(MODEL), dtype=torch.float32).save_pretrained(directories[1])
        starts = {
            "inflight": lambda: our_server(directories[0]),
            "vllm": lambda: vllm_server(directories[0], *names, threads=1),
        }
        for seed in range(ROUNDS):
            for kind, servers in rounds.items():
                connector = aiohttp.TCPConnector(limit=0)
                async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as http:
                    with starts[kind]() as url:  # A server without requests would use processor time, too.
                        servers.append(Server(url, kind, http))
                        await servers[-1].measure(directories, updates // ROUNDS, seed)
    found = {kind: result(servers) for kind, servers in rounds.items()}
    load = {"model": MODEL, "requests_per_s": RATE, "tokens": TOKENS, "rounds": ROUNDS, "vllm": vllm_version()}
    finish("served-stalls", {"benchmark": "served_stalls", **load, "servers": found})


if __name__ == "__main__":
    asyncio.run(main())
