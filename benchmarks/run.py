"""Runs every CPU benchmark and writes its JSON under benchmarks/results/cpu: `make bench`, about 80 minutes on 2 cores.

    python benchmarks/run.py [NAME …]

NAME is throughput, swap, vllm, kernels, scaling, host, staleness, loss, learning, handle, ray, serve, fuzz, demo or
demo_real.

Each file names its command, commit, machine and versions. `demo.json` is the mean over the seeds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from inflight.tools.environment import write_json

os.chdir(Path(__file__).parents[1])  # commands are recorded with short paths
RESULTS = Path("benchmarks/results/cpu")
DOCS = Path("docs")
SEEDS = (0, 1, 2)
THROUGHPUTS = (("tiny", "float32", 128, 256), ("small", "float32", 32, 128), ("small", "bfloat16", 64, 256))


def inflight(*arguments: str) -> None:
    """Run a command of inflight and show what it prints."""
    print("$ inflight", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "inflight.tools.cli", *arguments], check=True)


def demo() -> None:
    for mode in ("inflight", "sync"):
        for seed in SEEDS:
            run_demo(mode, seed, *(["--sync"] if mode == "sync" else []))
    write_json(RESULTS / "demo.json", {mode: summarise_demo(mode) for mode in ("inflight", "sync")})


def demo_vllm() -> None:
    """Run the same demo with vLLM as the backend."""
    for seed in SEEDS:
        run_demo("vllm", seed, "--backend", "vllm")
    write_json(RESULTS / "demo-vllm.json", {"vllm": summarise_demo("vllm")})


def run_demo(mode: str, seed: int, *options: str) -> None:
    """Keep the summary; of the first seed in flight, keep the picture for the docs, too."""
    with tempfile.TemporaryDirectory() as out:
        inflight("demo", "--seed", str(seed), "--out", out, *options)
        kept = RESULTS / f"demo-{mode}-seed{seed}"
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(out) / "summary.json", kept)
        if (mode, seed) == ("inflight", SEEDS[0]):
            shutil.copy(Path(out) / "demo.png", DOCS)


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


def demo_real() -> None:
    script("demo_real.py")


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


def host() -> None:
    """Measure passes in which nothing joins or leaves, and all passes of a backlog."""
    inflight("bench", "host", "--json", str(RESULTS / "host.json"))
    inflight("bench", "host", "--backlog", "128", "--json", str(RESULTS / "host-backlog.json"))


def swap() -> None:
    for dtype in ("float32", "bfloat16"):
        path = RESULTS / f"swap-small-{dtype}.json"
        common = ("--model", "small", "--dtype", dtype, "--device", "cpu", "--publishes", "200", "--peer", "vllm")
        inflight("bench", "swap", *common, "--json", str(path))
    script("swap_growth.py")
    script("kv_policy.py")
    script("lora.py")


def vllm() -> None:
    """Measure vLLM as our backend against vLLM as it is."""
    common = ("--model", "small", "--device", "cpu", "--backend", "vllm", "--peer", "vllm")
    for dtype in ("float32", "bfloat16"):
        path = RESULTS / f"swap-vllm-small-{dtype}.json"
        inflight("bench", "swap", *common, "--dtype", dtype, "--publishes", "200", "--json", str(path))
    throughput_vllm()
    shape = ("--model", "small", "--device", "cpu", "--backend", "vllm", "--steps", "30")
    inflight("bench", "staleness", *shape, "--json", str(RESULTS / "staleness-vllm-small-slots2.json"))


def throughput_vllm() -> None:
    """Measure from `submit()` to our stream against `LLM.generate`."""
    path = RESULTS / "throughput-vllm-small-float32-32x128.json"
    common = ("--model", "small", "--device", "cpu", "--backend", "vllm", "--peer", "vllm")
    shape = ("--dtype", "float32", "--sequences", "32", "--tokens", "128", "--pairs", "9")
    inflight("bench", "throughput", *common, *shape, "--json", str(path))


def loss() -> None:
    inflight("bench", "loss", "--device", "cpu", "--json", str(RESULTS / "loss.json"))
    masked = ("--tokens", "1024", "--sampling-mask", "64")
    inflight("bench", "loss", "--device", "cpu", *masked, "--json", str(RESULTS / "loss-masked.json"))
    script("correction_bias.py")
    script("packing.py")


def learning() -> None:
    common = ("bench", "learning", "--device", "cpu")
    inflight(*common, "--json", str(RESULTS / "learning.json"), "--plot", str(DOCS / "learning.png"))
    lags = ("--steps", "80", "--lags", "1,4,16", "--corrections", "none,tis,icepop,ppo_clip,gspo,second_moment")
    path, plot = RESULTS / "learning-lags.json", DOCS / "learning-lags.png"
    inflight(*common, *lags, "--json", str(path), "--plot", str(plot))
    (RESULTS / "objectives_default.json").unlink(missing_ok=True)  # else its runs are not repeated
    script("objective_table.py")


def kernels() -> None:
    script("cpu_kernels.py")


def ray() -> None:
    script("ray_pool.py")


def handle() -> None:
    script("handle.py")


def serve() -> None:
    script("serve.py")


def fuzz() -> None:
    script("fuzz.py")


def script(name: str) -> None:
    """Run a benchmark that is a script of its own."""
    print("$ python", f"benchmarks/{name}", flush=True)
    subprocess.run([sys.executable, f"benchmarks/{name}"], check=True)


if __name__ == "__main__":
    runs = (
        throughput,
        swap,
        vllm,
        kernels,
        scaling,
        host,
        staleness,
        loss,
        learning,
        handle,
        ray,
        serve,
        fuzz,
        demo,
        demo_vllm,
    )
    benchmarks = {run.__name__: run for run in (*runs, throughput_vllm, demo_real)}
    for name in sys.argv[1:] or [run.__name__ for run in runs]:
        if name not in benchmarks:
            sys.exit(f"unknown benchmark {name!r}; choose from {', '.join(benchmarks)}")
        benchmarks[name]()
