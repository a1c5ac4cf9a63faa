"""Runs every CPU benchmark and writes its JSON under benchmarks/results/cpu: `make bench`, about 80 minutes on 2 cores.

    python benchmarks/run.py [throughput|swap|kernels|scaling|staleness|loss|learning|handle|demo …]

Each file names its command, commit, machine and versions. `demo.json` is the mean over the seeds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from inflight.observability.environment import write_json

os.chdir(Path(__file__).parents[1])  # commands are recorded with short paths
RESULTS = Path("benchmarks/results/cpu")
DOCS = Path("docs")
SEEDS = (0, 1, 2)
THROUGHPUTS = (("tiny", "float32", 128, 256), ("small", "float32", 32, 128), ("small", "bfloat16", 64, 256))


def inflight(*arguments: str) -> None:
    """Run a command of inflight and show what it prints."""
    print("$ inflight", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "inflight.cli", *arguments], check=True)


def demo() -> None:
    for mode in ("inflight", "sync"):
        for seed in SEEDS:
            out = RESULTS / f"demo-{mode}-seed{seed}"
            inflight("demo", "--seed", str(seed), "--out", str(out), *(["--sync"] if mode == "sync" else []))
    write_json(RESULTS / "demo.json", {mode: summarise_demo(mode) for mode in ("inflight", "sync")})


def summarise_demo(mode: str) -> dict:
    runs = [json.loads((RESULTS / f"demo-{mode}-seed{seed}" / "summary.json").read_text()) for seed in SEEDS]
    keys = (
        "accuracy_before",
        "accuracy_after",
        "num_swaps",
        "num_swaps_in_flight",
        "seconds",
        "seconds_rl",
        "num_tokens",
    )
    means = {key: float(np.mean([run[key] for run in runs])) for key in keys}
    gains = [run["accuracy_after"] - run["accuracy_before"] for run in runs]
    medians = {
        name: float(np.median([run[name]["p50"] for run in runs]))
        for name in ("swap_ms", "stall_ms", "weight_lag_ms", "token_age_ms")
    }
    return {
        "seeds": list(SEEDS),
        **means,
        "gain": float(np.mean(gains)),
        "gains": gains,
        "p50_median_of_seeds": medians,
        "environment": runs[0]["environment"],
    }


def staleness() -> None:
    for model in ("tiny", "small"):
        for slots in ("2", "1"):
            path = RESULTS / f"staleness-{model}-slots{slots}.json"
            inflight("bench", "staleness", "--model", model, "--slots", slots, "--steps", "30", "--json", str(path))


def throughput() -> None:
    """Measure against vLLM at three sizes, and against vLLM and Transformers over numbers of sequences."""
    common = ("bench", "throughput", "--device", "cpu", "--prompt-tokens", "32", "--peer", "vllm")
    for model, dtype, sequences, tokens in THROUGHPUTS:
        path = RESULTS / f"throughput-{model}-{dtype}-{sequences}x{tokens}.json"
        shape = ("--model", model, "--dtype", dtype, "--sequences", str(sequences), "--tokens", str(tokens))
        inflight(*common, *shape, "--pairs", "5", "--json", str(path))
    for model, dtype in (("small", "bfloat16"), ("tiny", "float32")):
        path, plot = RESULTS / f"throughput-{model}-{dtype}-sweep.json", DOCS / f"throughput-{model}.png"
        shape = ("--model", model, "--dtype", dtype, "--sequences", "1,8,32,128,256", "--tokens", "128")
        inflight(*common, *shape, "--peer", "transformers", "--json", str(path), "--plot", str(plot))


def scaling() -> None:
    path, plot = RESULTS / "scaling-small-float32.json", DOCS / "scaling.png"
    inflight("bench", "scaling", "--model", "small", "--device", "cpu", "--json", str(path), "--plot", str(plot))


def swap() -> None:
    for dtype in ("float32", "bfloat16"):
        path = RESULTS / f"swap-small-{dtype}.json"
        common = ("--model", "small", "--dtype", dtype, "--device", "cpu", "--publishes", "200", "--peer", "vllm")
        inflight("bench", "swap", *common, "--json", str(path))
    script("swap_growth.py")
    script("kv_policy.py")
    script("lora.py")


def loss() -> None:
    inflight("bench", "loss", "--device", "cpu", "--json", str(RESULTS / "loss.json"))
    kept = ("--tokens", "1024", "--kept", "64")
    inflight("bench", "loss", "--device", "cpu", *kept, "--json", str(RESULTS / "loss-kept.json"))
    script("correction_bias.py")
    script("packing.py")


def learning() -> None:
    common = ("bench", "learning", "--device", "cpu")
    inflight(*common, "--json", str(RESULTS / "learning.json"), "--plot", str(DOCS / "learning.png"))
    lags = ("--steps", "80", "--lags", "1,4,16", "--corrections", "none,tis,icepop,ppo_clip,gspo,second_moment")
    path, plot = RESULTS / "learning-lags.json", DOCS / "learning-lags.png"
    inflight(*common, *lags, "--json", str(path), "--plot", str(plot))


def kernels() -> None:
    script("cpu_kernels.py")


def handle() -> None:
    script("handle.py")


def script(name: str) -> None:
    """Run a benchmark that is a script of its own."""
    print("$ python", f"benchmarks/{name}", flush=True)
    subprocess.run([sys.executable, f"benchmarks/{name}"], check=True)


if __name__ == "__main__":
    runs = (throughput, swap, kernels, scaling, staleness, loss, learning, handle, demo)
    benchmarks = {run.__name__: run for run in runs}
    for name in sys.argv[1:] or benchmarks:
        if name not in benchmarks:
            sys.exit(f"unknown benchmark {name!r}; choose from {', '.join(benchmarks)}")
        benchmarks[name]()
