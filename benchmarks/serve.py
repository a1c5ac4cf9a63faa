"""Measures what HTTP costs: an engine asked from Python, and the same engine asked through its server.

    python benchmarks/serve.py [FILE]

throughput: 64 clients that ask for one answer after another, in alternation from asyncio tasks beside the engine
("alone"), over HTTP for whole answers, and over HTTP for streamed ones; tokens/s, and the ratios to the first. latency:
p50 and p99 of the time to the first token and to the last one, in milliseconds, of streamed answers, by the number of
clients, and tokens/s; beside it the same of vLLM's server, where `make peers` has installed vLLM, asked in alternation.
The clients of HTTP are one process, the server runs in the engine's user's process: on two cores all of them share one,
and the engine has the other. Forward passes have one thread on both sides.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import finish, median_ratio
from transformers import AutoModelForCausalLM
from vllm_server import PYTHON, vllm_server, vllm_version

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config

MODEL, CLIENTS, REQUESTS, TOKENS, PROMPT, ROUNDS = "small", 64, 2, 64, 32, 3
BY_CLIENTS, CONTEXT = (1, 16, 64, 256), 256


def prompt(index: int) -> list[int]:
    return [(index * 31 + place * 7) % 8000 for place in range(PROMPT)]


async def alone(engine: inflight.Engine) -> None:
    async def client(first: int) -> None:
        for index in range(first, first + REQUESTS):
            params = inflight.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            await engine.agenerate([prompt(index)], params)

    await asyncio.gather(*(client(REQUESTS * each) for each in range(CLIENTS)))


class ClientsError(Exception):
    """Not every client got its answer."""


def over_http(port: int, clients: int, requests: int, *, stream: bool) -> dict[str, list[float]]:
    """What a process of clients measured: "first" and "last", in seconds, one for each answer."""
    command = [sys.executable, __file__, "client", str(port), str(clients), str(requests), str(int(stream))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise ClientsError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


# ---- the process of the clients -------------------------------------------------------------------------------------


async def ask(port: int, index: int, stream: bool) -> tuple[float, float]:
    """Seconds to the first and to the last part of an answer, on a connection of its own."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": prompt(index),
            "max_tokens": TOKENS,
            "ignore_eos": True,  # and no seed, with which a worker of vLLM on a CPU ends now and then
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    began, first, tail = time.monotonic(), None, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    while part := await reader.read(65536):
        if first is None and (not stream or b"data: " in part):
            first = time.monotonic() - began
        tail = (tail + part)[-200:]
    writer.close()
    if first is None or (b"[DONE]" if stream else b'"total_tokens"') not in tail:
        raise RuntimeError(f"no answer: {tail!r}")
    return first, time.monotonic() - began


async def run_clients(port: int, clients: int, requests: int, stream: bool) -> dict[str, Any]:
    async def client(first: int) -> list[tuple[float, float]]:
        return [await ask(port, index, stream) for index in range(first, first + requests)]

    began = time.monotonic()
    times = [pair for all_ in await asyncio.gather(*(client(requests * i) for i in range(clients))) for pair in all_]
    return {
        "seconds": time.monotonic() - began,
        "first": [first for first, _ in times],
        "last": [last for _, last in times],
    }


# ---- the measurement ------------------------------------------------------------------------------------------------


def measure_throughput(engine: inflight.Engine, port: int) -> dict[str, Any]:
    def timed(function: Callable[[], Any]) -> float:
        began = time.monotonic()
        function()
        return time.monotonic() - began

    ways: dict[str, Callable[[], float]] = {
        "alone": lambda: timed(lambda: asyncio.run(alone(engine))),
        "whole": lambda: float(over_http(port, CLIENTS, REQUESTS, stream=False)["seconds"]),  # pyright: ignore
        "streamed": lambda: float(over_http(port, CLIENTS, REQUESTS, stream=True)["seconds"]),  # pyright: ignore
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name].append(way())
    tokens = CLIENTS * REQUESTS * TOKENS
    return {
        **{f"{name}_tokens_per_s": [round(tokens / s) for s in all_] for name, all_ in seconds.items()},
        **{f"{name}_ratio": median_ratio(seconds["alone"], seconds[name]) for name in ("whole", "streamed")},
    }


def measure_latency(ports: Mapping[str, int]) -> dict[str, Any]:
    """By server and number of clients."""
    times: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in ports}
    for clients in BY_CLIENTS:
        for _ in range(ROUNDS):
            for name, port in ports.items():
                requests = max(1, 16 // clients)
                runs = times[name].setdefault(str(clients), [])
                try:
                    runs.append(over_http(port, clients, requests, stream=True))
                except ClientsError as error:
                    runs.append({"failed": str(error)})
    return {name: {clients: summary(runs) for clients, runs in found.items()} for name, found in times.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [run["failed"] for run in runs if "failed" in run]
    if failed:
        return {"failed": failed}
    tokens = TOKENS * sum(len(run["last"]) for run in runs)
    found: dict[str, Any] = {"tokens_per_s": round(tokens / sum(run["seconds"] for run in runs))}
    for name in ("first", "last"):
        all_ = [seconds for run in runs for seconds in run[name]]
        found[f"{name}_token_ms"] = {f"p{p}": round(1e3 * float(np.percentile(all_, p)), 1) for p in (50, 99)}
    return found


def save_model(directory: str) -> str:
    """With a tokenizer that has a word for every token, so that both sides make text of them."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f" word{i}" for i in range(len(tokenizer), shape_config(MODEL).vocab_size)])
    tokenizer.save_pretrained(directory)
    AutoModelForCausalLM.from_config(shape_config(MODEL), dtype=torch.float32).save_pretrained(directory)
    return directory


def main() -> None:
    with ExitStack() as at_end:
        model = save_model(at_end.enter_context(tempfile.TemporaryDirectory()))
        options = {"device": "cpu", "threads": 1, "max_sequences": max(BY_CLIENTS), "max_context": CONTEXT}
        engine = at_end.enter_context(inflight.launch(model, **options))
        ports = {"inflight": engine.serve(port=0, served_model_name=MODEL).port}
        over_http(ports["inflight"], CLIENTS, 1, stream=True)  # warm up
        result = {
            "benchmark": "serve",
            "model": MODEL,
            "clients": CLIENTS,
            "tokens": TOKENS,
            "prompt_tokens": PROMPT,
            "load_before": os.getloadavg()[0],
            "throughput": measure_throughput(engine, ports["inflight"]),
        }
        if Path(PYTHON).exists():
            names = ("--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--max-num-seqs", "256")
            url = at_end.enter_context(vllm_server(model, *names, threads=1))
            ports["vllm"] = int(url.rpartition(":")[2])
            over_http(ports["vllm"], CLIENTS, 1, stream=True)
            result["vllm"] = vllm_version()
        result["latency"] = measure_latency(ports)
    finish("serve", result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        print(json.dumps(asyncio.run(run_clients(*map(int, sys.argv[2:5]), stream=sys.argv[5] == "1"))))
    else:
        main()
