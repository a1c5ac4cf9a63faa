"""`inflight bench throughput`: tokens per second, compared with another engine on the same weights.

Each engine has one process (`peers.py`) for the whole run. The processes draw alternately, one at a time: ours, peer,
ours, peer, … A ratio is the median over such pairs.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from inflight.engine.cache.transformers_states import TRANSFORMERS_STATES
from inflight.engine.model.checkpoints import auto_class
from inflight.engine.model.loading import load_config
from inflight.tools.bench.options import ThroughputOptions
from inflight.tools.bench.peer_worker import Hello, Job, Run, Setup
from inflight.tools.bench.peers import OURS, OURS_ON_VLLM, Worker, interpreter, make_setup
from inflight.tools.memory_budget import cached_dims
from inflight.tools.progress import Progress, parts_of, untold

SETTLE_S = 0.5
"""Pause between two runs. Threads of the previous process fall asleep in this time."""
WARM_UP_TOKENS = 64
"""Maximum number of tokens per sequence in the first run of each engine on a GPU. On a CPU the first run is like the
others."""

GROUP = 8
"""Sequences with one prompt in a backlog."""


def measure(settings: ThroughputOptions, progress: Progress = untold) -> dict[str, Any]:
    """Measure tokens per second of our engine and of a peer, for each number of sequences.

    Every sequence has its own random prompt and draws at temperature 1, with log-probabilities recorded. Lengths are
    uniform between the two numbers of `prompt_tokens` and of `tokens`. A run is timed from submitting the prompts to
    the last token. The first run of each engine at each number of sequences is a warm-up (on a GPU of at most
    WARM_UP_TOKENS per sequence). Without a peer our engine runs `pairs` times. With `backlog` the engines draw
    `sequences` at a time, and further sequences wait. Raises ValueError for a backlog with several numbers of
    sequences.
    """
    if settings.backlog and len(set(settings.sequences)) > 1:
        raise ValueError(f"--backlog takes one number of --sequences, got {','.join(map(str, settings.sequences))}")
    if settings.peer:
        interpreter(settings.peer)
    sizes = sorted(set(settings.sequences))
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        progress("saving the model")
        lengths = settings.prompt_tokens[1] + settings.tokens[1]
        setup = make_setup(settings, sizes[-1], lengths, threads=0, directory=directory)
        setup = replace(setup, shared_prompts=settings.backlog > 0)
        workers: dict[str, Worker] = {}
        for name in filter(None, (OURS, settings.peer)):
            progress(f"{name} is loading the model")
            side = OURS_ON_VLLM if name == OURS and settings.backend == "vllm" else name
            workers[name] = stack.enter_context(Worker(side, setup, directory))
            workers[name].wait_until_ready()
        seeds = count(settings.seed * 1_000_000, 1_000)
        parts = zip(sizes, parts_of(progress, len(sizes)), strict=True)
        points = [_measure_point(settings, size, workers, setup.device, seeds, part) for size, part in parts]
    hellos = {name: worker.wait_until_ready() for name, worker in workers.items()}
    for point in points:
        point["mbu"] = _mbu(point, load_config(settings.model), setup, hellos[OURS])
    last, peer = points[-1], settings.peer
    return {
        "device": setup.device,
        "dtype": setup.dtype,
        "sequences": sizes,
        "tokens_per_s": last["tokens_per_s"],
        "peer_tokens_per_s": last["peers"][peer]["tokens_per_s"] if peer else None,
        "ratio": last["peers"][peer]["ratio"] if peer else None,
        "mbu": last["mbu"],
        "peer_mode": hellos[peer].mode if peer else None,
        "copy_gb_s": hellos[OURS].copy_gb_s,
        "points": points,
        "sides": {
            name: {"mode": hello.mode, "threads": hello.threads, "versions": hello.versions}
            for name, hello in hellos.items()
        },
    }


def _measure_point(
    settings: ThroughputOptions,
    sequences: int,
    workers: dict[str, Worker],
    device: str,
    seeds: "count[int]",
    progress: Progress,
) -> dict[str, Any]:
    ours: list[Run] = []

    def run(name: str, seed: int, most_tokens: int | None = None) -> Run:
        time.sleep(SETTLE_S)
        least, most = (min(length, most_tokens or length) for length in settings.tokens)
        job = Job(
            sequences=sequences * (settings.backlog or 1),
            tokens=(least, most),
            prompt_tokens=settings.prompt_tokens,
            seed=seed,
            group=GROUP if settings.backlog else 1,
        )
        return workers[name].run(job)

    for name in workers:
        progress(f"{sequences} sequences: {name} warms up")
        run(name, next(seeds), WARM_UP_TOKENS if device == "cuda" else None)
    peer, theirs = settings.peer, list[Run]()
    for pair in range(settings.pairs):
        progress(f"{sequences} sequences: {peer or OURS}, {pair + 1} of {settings.pairs}", pair / settings.pairs)
        seed = next(seeds)
        ours.append(run(OURS, seed))
        theirs += [run(peer, seed)] if peer else []
    peers: dict[str, dict[str, Any]] = {}
    if peer:
        ratios = [_speed(a) / _speed(b) for a, b in zip(ours, theirs, strict=True)]
        peers[peer] = {**_summary(theirs), "ratio": median(ratios), "ratios": ratios}

    def detail(name: str) -> float | None:
        values = [run.detail[name] for run in ours if name in run.detail]
        return median(values) if values else None

    return {
        "sequences": sequences,
        **_summary(ours),
        "decode_step_s": detail("decode_step_s"),
        "context_tokens": detail("context_tokens"),
        "peers": peers,
    }


def _speed(run: Run) -> float:
    return run.tokens / run.seconds


def _summary(runs: list[Run]) -> dict[str, Any]:
    return {
        "tokens_per_s": median(map(_speed, runs)),
        "tokens_per_s_of_runs": [_speed(run) for run in runs],
        "logprob_mean": sum(run.logprob_mean for run in runs) / len(runs),
    }


def _weight_bytes_per_step(model: Any) -> int:
    """Return the bytes of all weights. An input embedding that is not also the output embedding is left out, because a
    step reads few of its rows."""
    embedding, head, num_weights = model.get_input_embeddings(), model.get_output_embeddings(), model.num_parameters()
    if head is not None and head.weight is not embedding.weight:
        num_weights -= embedding.weight.numel()
    return num_weights * model.dtype.itemsize


def _mbu(point: dict[str, Any], config: PretrainedConfig, setup: Setup, hello: Hello) -> float | None:
    """Return the model bandwidth utilization of steady decoding: bytes that a step must read per second / bandwidth of
    a copy.

    The bytes of a copy are read bytes and written bytes. None on a CPU, and for models with varying reads per step:
    mixtures of experts, sliding windows, and layers with a state or of different sizes.
    """
    if not hello.copy_gb_s or not point["decode_step_s"]:
        return None
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=getattr(torch, setup.dtype))
    varies = any(hasattr(module, "experts") or TRANSFORMERS_STATES.detect(module) for module in model.modules())
    if varies or len(set(cached_dims(model))) != 1 or getattr(config.get_text_config(), "sliding_window", None):
        return None
    kv_bytes = point["context_tokens"] * setup.kv_bytes_per_token
    return (_weight_bytes_per_step(model) + kv_bytes) / point["decode_step_s"] / (hello.copy_gb_s * 1e9)
