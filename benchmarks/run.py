"""Runs the CPU benchmarks that BENCHES lists, or the named ones, and writes their JSON under benchmarks/results/cpu.

    python benchmarks/run.py [NAME …]

`make bench` runs it, in about 80 minutes on 2 cores. Without names it leaves out demo_real, whose model `make bench`
does not install. Each file names its command, commit, machine and versions. `demo.json` is the mean over the seeds.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import run_demo

from inflight.tools.environment import write_json

os.chdir(Path(__file__).parents[1])  # commands are recorded with short paths
RESULTS, DOCS = Path("benchmarks/results/cpu"), Path("docs")
SEEDS = (0, 1, 2)
PEER = "throughput --device cpu --prompt-tokens 32 --peer vllm"
VLLM = "--model small --device cpu --backend vllm"
BENCHES: dict[str, dict[str, str]] = {
    "throughput": {
        **{
            f"throughput-{model}-{dtype}-{n}x{tokens}": f"{PEER} --model {model} --dtype {dtype} --sequences {n} "
            f"--tokens {tokens} --pairs 5"
            for model, dtype, n, tokens in (
                ("tiny", "float32", 128, 256), ("small", "float32", 32, 128), ("small", "bfloat16", 64, 256),
            )
        },
        **{
            f"throughput-{model}-{dtype}-sweep": f"{PEER} --model {model} --dtype {dtype} "
            "--sequences 1,8,32,128,256 --tokens 128"
            for model, dtype in (("small", "bfloat16"), ("tiny", "float32"))
        },
    },
    "swap": {
        f"swap-small-{dtype}": f"swap --model small --dtype {dtype} --device cpu --publishes 200 --peer vllm"
        for dtype in ("float32", "bfloat16")
    },
    "vllm": {
        **{
            f"swap-vllm-small-{dtype}": f"swap {VLLM} --peer vllm --dtype {dtype} --publishes 200"
            for dtype in ("float32", "bfloat16")
        },
        "throughput-vllm-small-float32-32x128": f"throughput {VLLM} --peer vllm --dtype float32 --sequences 32 "
        "--tokens 128 --pairs 9",
        "staleness-vllm-small-slots2": f"staleness {VLLM} --steps 30",
    },
    "host": {"host": "host"},
    "staleness": {
        f"staleness-{model}-slots{slots}": f"staleness --model {model} --slots {slots} --steps 30"
        for model in ("tiny", "small")
        for slots in (2, 1)
    },
    "episodes": {f"episodes-{model}": f"episodes --model {model} --device cpu" for model in ("tiny", "small")},
    "loss": {"loss": "loss --device cpu", "loss-masked": "loss --device cpu --tokens 1024 --sampling-mask 64"},
    "learning": {
        "learning": "learning --device cpu --objective tis",
    },
}  # fmt: skip
"""Maps each NAME to the arguments of `inflight bench` for each result."""
SCRIPTS = {
    "swap": ["swap_growth"],
    "episodes": ["waiting_sessions"],
    "loss": ["correction_bias", "objective_lags"],
    "learning": ["curriculum", "demo_ranks"],
    "serve": ["serve", "served_stalls"],
    "fuzz": ["fuzz"],
    "coverage": ["coverage_of_models"],
    "kinds": ["model_kinds"],
    "contention": ["contention"],
    "demo_real": ["demo_real"],
}
DEMOS = {"demo": ("inflight", "sync"), "demo_vllm": ("vllm",)}
DEMO_OPTIONS = {"inflight": [], "sync": ["--sync"], "vllm": ["--backend", "vllm"]}


def main() -> None:
    known = list(dict.fromkeys([*BENCHES, *SCRIPTS, *DEMOS]))
    for name in sys.argv[1:] or [name for name in known if name != "demo_real"]:
        if name not in known:
            sys.exit(f"unknown benchmark {name!r}; choose from {', '.join(known)}")
        for result, arguments in BENCHES.get(name, {}).items():
            python("-m", "inflight.tools.cli", "bench", *arguments.split(), "--json", str(RESULTS / f"{result}.json"))
        for script in SCRIPTS.get(name, []):
            python(f"benchmarks/{script}.py")
        if name in DEMOS:
            summaries = {mode: demos(mode) for mode in DEMOS[name]}
            write_json(RESULTS / f"{name.replace('_', '-')}.json", summaries)


def python(*arguments: str) -> None:
    print("$ python", *arguments, flush=True)
    subprocess.run([sys.executable, *arguments], check=True)


def demos(mode: str) -> dict:
    """Run the demo with every seed, and return means. The first picture of "inflight" is the picture of the docs."""
    runs = []
    for seed in SEEDS:
        picture = DOCS / "demo.png" if (mode, seed) == ("inflight", SEEDS[0]) else None
        runs.append(run_demo(seed, *DEMO_OPTIONS[mode], picture=picture))
        kept = RESULTS / f"demo-{mode}-seed{seed}"
        kept.mkdir(parents=True, exist_ok=True)
        write_json(kept / "summary.json", runs[-1])
    keys = ("accuracy_before", "accuracy_after", "num_swaps", "num_swaps_in_flight", "seconds", "seconds_rl")
    gains = [run["accuracy_after"] - run["accuracy_before"] for run in runs]
    return {
        "seeds": list(SEEDS),
        **{key: float(np.mean([run[key] for run in runs])) for key in (*keys, "num_tokens")},
        "gain": float(np.mean(gains)),
        "gains": gains,
        "p50_median_of_seeds": {
            name: float(np.median([run[name]["p50"] for run in runs]))
            for name in ("swap_ms", "stall_ms", "weight_lag_ms", "token_age_ms")
        },
        "environment": runs[0]["environment"],
    }


if __name__ == "__main__":
    main()
