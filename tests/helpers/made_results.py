"""Files as benchmarks write them, with made numbers."""

import gzip
import json
from itertools import product
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "command": "inflight bench …",
    "commit": "0123456789ab",
    "machine": {"cpu": "a processor", "cores": 2, "gpu": None, "system": "Linux"},
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "triton": None},
}
MEDIANS = {"swap_ms": 12.0, "stall_ms": 0.05, "weight_lag_ms": 0.0, "policy_age_ms": 800.0, "token_age_ms": 21_000.0}
PERCENTILES = [1.0, 5, 10, 25, 50, 75, 90, 95, 99]


def quantiles(median: float) -> dict[str, float]:
    return {"p50": median, "p90": 2 * median, "p99": 3 * median, "max": 4 * median}


def staleness(scale: float = 1.0, **more: Any) -> dict[str, Any]:
    """Whose times are `scale` times what they are by default. Its parts vary by 4 %."""
    medians = {
        "swap_ms": 12.0,
        "stall_ms": 0.05,
        "weight_lag_ms": 0.0,
        "policy_age_ms": 800.0,
        "token_age_ms": 21_000.0,
    }
    medians = {name: scale * value for name, value in medians.items()} | {"version_lag": 2.0}
    speed = 3000.0 / scale if scale else 0.0
    varied = (0.98, 0.99, 1.0, 1.01, 1.02)
    parts = {f"{name}.{at}": [value * by for by in varied] for name, value in medians.items() for at in ("p50", "p99")}
    return {
        "bench": "staleness",
        "model": "tiny",
        "device": "auto",
        "dtype": "auto",
        "sequences": 32,
        "tokens": 64,
        "prompt_tokens": 32,
        "steps": 30,
        "mode": "inflight",
        "publish_every": 1,
        "slots": 2,
        "target": None,
        "tokens_per_s": speed,
        "num_swaps": 29,
        "seconds": 20.0,
        **{name: quantiles(value) for name, value in medians.items()},
        "trainer_s": {"trains": 12.0, "waits for rollouts": 6.0, "waits for the copy": 1.0, "other": 1.0},
        "engine_s": {"generating": 15.0, "idle": 5.0},
        "distributions": {"percentiles": PERCENTILES}
        | {name: [value * at / 50 for at in PERCENTILES] for name, value in medians.items()},
        "parts": parts | {"tokens_per_s": [speed * by for by in varied]},
        "environment": ENVIRONMENT,
    } | more


def served(**more: Any) -> dict[str, Any]:
    """What was seen of a server."""
    counts = {"num_updates": 20, "num_requests": 300, "num_tokens": 28_000, "num_aborted_requests": 16}
    counts |= {"num_tokens_thrown_away": 700, "num_requests_across_updates": 120, "num_torn_tokens": 0}
    counts |= {"num_mislabeled_tokens": None, "num_foreign_logprobs": 3}
    times = {name: quantiles(30.0) for name in ("update_ms", "gap_ms", "gap_across_ms")}
    one = staleness(2.0, target="http://127.0.0.1:8000", api="vllm", pause="keep", **counts, **times)
    return {name: value for name, value in one.items() if name not in ("trainer_s", "engine_s")} | more


def servers() -> dict[str, Any]:
    ours = served(api="inflight", pause="", num_aborted_requests=0, num_mislabeled_tokens=0)
    return {
        "bench": "served_staleness",
        "servers": {"inflight, two slots": ours, "vLLM, pause keep": served()},
        "environment": ENVIRONMENT,
    }


def sweep() -> dict[str, Any]:
    def point(model: str, sequences: int, mode: str) -> dict[str, Any]:
        scale = 1 + sequences / 32 * (model == "small") + (mode == "sync")
        return staleness(scale, model=model, sequences=sequences, mode=mode)

    modes = ("inflight", "one_step_off", "sync")
    points = [point(*each) for each in product(("tiny", "small"), (8, 16, 32), modes)]
    reason = "it took longer than 10 s (--limit-s)"
    failed = {"model": "small", "sequences": 64, "mode": "sync", "publish_every": 1, "slots": 2, "reason": reason}
    return {"bench": "sweep", "points": points, "failed": [failed], "environment": ENVIRONMENT}


def swap() -> dict[str, Any]:
    names = ("across_swaps", "while_copying", "without")
    return {
        "bench": "swap",
        "model": "small",
        "dtype": "float32",
        "sequences": 32,
        "num_swaps": 200,
        "swap_ms": {"p50": 49.2, "p99": 67.1},
        "stall_ms": {"p50": 0.069, "p99": 0.099},
        "forward_ms": {"p50": 23.9, "p99": 31.3},
        "gap_ms": {name: {"p50": 24.0, "p99": 32.0} for name in names},
        "gap_ratio": 1.03,
        "copy_gb_s": 22.6,
        "paused_stall_ms": {"p50": 12.0, "p99": 14.0},
        "peer": "vllm",
        "peer_stall_ms": {"p50": 104.6, "p99": 129.8},
        "peer_mode": "pause_generation(keep), reload_weights, resume_generation",
        "environment": ENVIRONMENT,
    }


def throughput() -> dict[str, Any]:
    points = [
        {
            "sequences": size,
            "tokens_per_s": 100.0 * size,
            "tokens_per_s_of_runs": [99.0 * size, 100.0 * size, 102.0 * size],
            "peers": {"vllm": {"tokens_per_s": 90.0 * size, "ratio": 1.11, "ratios": [1.1, 1.11, 1.13]}},
        }
        for size in (1, 8, 32)
    ]
    about = {"bench": "throughput", "model": "small", "dtype": "float32", "device": "cpu", "peers": ["vllm"]}
    return about | {"points": points, "environment": ENVIRONMENT}


def learning() -> dict[str, Any]:
    def mode(seconds: float) -> dict[str, Any]:
        seeds = [{"seed": i, "final_reward": 0.7 + i / 50, "seconds_to_target": seconds + i} for i in range(3)]
        means = {"final_reward": 0.72, "seconds_to_target": seconds + 1}
        return means | {"accuracy_before": 0.5, "accuracy_after": 0.8, "seeds": seeds}

    modes = {"inflight": mode(20.0), "sync": mode(40.0)}
    about = {"bench": "learning", "model": "tiny", "modes": list(modes), "ratio": 1.9, "ratios": [1.8, 1.9, 2.0]}
    return about | modes | {"environment": ENVIRONMENT}


def learning_series() -> list[dict[str, Any]]:
    points = [{"step": i, "seconds": i / 2, "reward": 1 - 1 / i} for i in range(1, 60)]
    return [{"mode": mode, "seed": seed, "points": points} for mode in ("inflight", "sync") for seed in range(2)]


def lags() -> dict[str, Any]:
    ablation = [
        {"lag": lag, "correction": name, "seed": seed, "final_reward": 0.6 - lag / 50 * (name == "none")}
        for lag in (0, 1, 16)
        for name in ("none", "tis")
        for seed in range(3)
    ]
    return {"bench": "learning", "model": "tiny", "ablation": ablation, "environment": ENVIRONMENT}


def write_all(directory: Path) -> list[Path]:
    """A file of every kind."""
    made = {
        "staleness": staleness(),
        "one-slot": staleness(1.5, slots=1, commit="other"),
        "served-staleness": servers(),
        "sweep": sweep(),
        "swap": swap(),
        "throughput": throughput(),
        "learning": learning(),
        "learning-lags": lags(),
    }
    paths = [write(directory / f"{name}.json", data) for name, data in made.items()]
    (directory / "learning-series.json.gz").write_bytes(gzip.compress(json.dumps(learning_series()).encode()))
    return paths


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path
