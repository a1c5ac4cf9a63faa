"""`make gpu-check`: every GPU claim, checked on this machine in under eight minutes, without installs or a network.

Independent parts, each with a time limit; for each a log, and JSON where it measures. At the end a table of what was
claimed, what was measured and whether it holds, which also lies in summary.json.

    make gpu-check PART=swap,loss    runs some of the parts; `peers`, `vllm` and `mps` are run only when they are named
    OUT=DIRECTORY                    where logs and JSON go (default benchmarks/results/NAME-OF-THE-GPU)
    GPU_PYTHON=…                     the interpreter (default .venv/bin/python if it is there, else python3)
    BUNDLE=DIRECTORY                 what `make gpu-bundle` made (default .gpu-bundle, if it is there)
    INFLIGHT_COMMIT=…                what results name, where the repository is a copy without .git
    PEERS_PATH=DIRECTORY             where vLLM lies unpacked, for the parts `peers` and `vllm`

    python benchmarks/gpu/check.py --rehearse     the same way with tiny models on a CPU, to try the scripts
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from claims import Claim, claims_of, files_of
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from inflight.observability.environment import write_result  # noqa: E402

BENCH = "-m inflight.cli bench"
VLLM_TESTS = "tests/engine/test_backends.py"
TOTAL_S = 475
"""Seconds of all parts together, where none was named. A part has its own limit besides, and is reported as not run
where no time is left for it."""
REHEARSAL_LIMIT_S = 300
BUNDLED_PYTHON = (3, 12)
"""The version of Python that the bundle's packages are for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Commands of Python, one after another, with a time limit for all of them; {out} is where results go."""

    name: str
    limit_s: int
    commands: list[str]
    by_default: bool = True
    vllm: bool = False
    """True if its engines run vLLM, in the interpreter that runs this and finds it in PEERS_PATH."""
    mps: bool = False
    """True if it runs with NVIDIA's Multi-Process Service, so that kernels of two processes run side by side."""


@dataclass(frozen=True, slots=True)
class Outcome:
    part: str
    verdict: str
    seconds: float
    passed: bool


def gpu_parts() -> list[Part]:
    """List the parts, those that matter most first, should the machine be taken away early."""
    throughput = (
        f"{BENCH} throughput --device cuda --dtype bfloat16 --sequences 256 --prompt-tokens 100-1024 --tokens 100-1024 "
        "--pairs 1 --model"
    )
    learning = (
        f"{BENCH} learning --device cuda --dtype bfloat16 --model base --seeds 0 --modes inflight,sync --steps 60 "
        "--demonstrations 2000 --warmup-learning-rate 5e-4 --learning-rate 5e-5 --json"
    )
    swap = (
        f"{BENCH} swap --device cuda --dtype bfloat16 --masters float32 --model qwen3-1.7b --sequences 64 --tokens 512 "
        "--prompt-tokens 16 --publishes 100 --json {out}/mps-swap.json"
    )
    loss = "loss --device cuda --dtype bfloat16 --tokens 8192 --hidden 4096 --vocab 131072 --pairs 3"
    loop = "--device cuda --dtype bfloat16 --model qwen3-0.6b"
    on_vllm = "--device cuda --dtype bfloat16 --model qwen3-1.7b --backend vllm --peer vllm"
    lengths = "--prompt-tokens 100-1024 --tokens 100-1024"
    peers = "--peer transformers --peer vllm" if os.environ.get("PEERS_PATH") else "--peer transformers"
    tests = f"-m pytest -q -m gpu -rP -p no:cacheprovider {spread(min(6, os.cpu_count() or 1))} tests"
    return [
        Part("environment", 20, ["-m inflight.cli doctor"]),
        Part("tests", 130, [tests]),
        Part("parity", 60, ["benchmarks/gpu/parity.py --device cuda --json {out}/parity.json"]),
        Part("kernels", 60, ["benchmarks/gpu/kernels.py --device cuda --json {out}/kernels.json"]),
        Part("swap", 130, ["benchmarks/swap_growth.py cuda {out}"]),
        Part(
            "throughput",
            110,
            [f"{throughput} {model} --json {{out}}/throughput-{model}.json" for model in ("qwen3-1.7b", "qwen3-0.6b")],
        ),
        Part("loss", 60, [f"{BENCH} {loss} --json {{out}}/loss.json"]),
        Part("learning", 60, [f"{learning} {{out}}/learning.json"]),
        Part("staleness", 40, [f"{BENCH} staleness {loop} --sequences 64 --steps 15 --json {{out}}/staleness.json"]),
        Part("trace", 40, [f"{BENCH} trace {loop} --seconds 2 --out {{out}}/trace.json.gz --json {{out}}/trace.json"]),
        Part("peers", 560, [f"{throughput} qwen3-1.7b {peers} --json {{out}}/peers.json"], by_default=False),
        Part(
            "vllm",
            900,
            [
                f"-m pytest -q -m peers -rP -p no:cacheprovider {VLLM_TESTS}",
                f"{BENCH} swap {on_vllm} --sequences 64 --publishes 50 --json {{out}}/vllm-swap.json",
                f"{BENCH} throughput {on_vllm} --sequences 256 {lengths} --json {{out}}/vllm-throughput.json",
                f"{BENCH} staleness {loop} --backend vllm --sequences 64 --steps 15 --json {{out}}/vllm-staleness.json",
            ],
            by_default=False,
            vllm=True,
        ),
        Part("mps", 120, [swap, f"{learning} {{out}}/mps-learning.json"], by_default=False, mps=True),
    ]


def rehearsal_parts() -> list[Part]:
    """List the same commands as the GPU's, with models and numbers that a CPU gets through."""
    throughput = "throughput --device cpu --dtype bfloat16 --sequences 4 --prompt-tokens 4-8 --tokens 4-8 --pairs 1"
    learning = "learning --device cpu --dtype bfloat16 --seeds 0 --modes inflight,sync --steps 3 --sequences 16"
    test = "tests/engine/test_swaps.py::test_truth_teller_over_every_transport[slots-cpu]"
    commands = {
        "environment": "-m inflight.cli doctor",
        "tests": f"-m pytest -q -rP -p no:cacheprovider {spread(2)} {test}",
        "parity": "benchmarks/gpu/parity.py --device cpu --model tiny --json {out}/parity.json",
        "kernels": "benchmarks/gpu/kernels.py --rehearse --json {out}/kernels.json",
        "swap": "benchmarks/swap_growth.py rehearsal {out}",
        "throughput": f"{BENCH} {throughput} --json {{out}}/throughput-qwen3-1.7b.json",
        "loss": f"{BENCH} loss --device cpu --tokens 64 --hidden 32 --vocab 512 --pairs 1 --json {{out}}/loss.json",
        "learning": f"{BENCH} {learning} --warmup-steps 5 --json {{out}}/learning.json",
        "staleness": f"{BENCH} staleness --device cpu --sequences 4 --tokens 8 --steps 2 --json {{out}}/staleness.json",
        "trace": f"{BENCH} trace --device cpu --seconds 0.5 --out {{out}}/trace.json.gz --json {{out}}/trace.json",
    }
    tiny = "--device cpu --backend vllm"
    on_vllm = [
        f"-m pytest -q -m peers -n 0 -p no:cacheprovider {VLLM_TESTS} -k seed_decides",
        f"{BENCH} swap {tiny} --peer vllm --sequences 4 --publishes 4 --tokens 256 --json {{out}}/vllm-swap.json",
        f"{BENCH} throughput {tiny} --peer vllm --sequences 4 --tokens 8 --json {{out}}/vllm-throughput.json",
        f"{BENCH} staleness {tiny} --sequences 4 --tokens 8 --steps 2 --json {{out}}/vllm-staleness.json",
    ]
    parts = [Part(name, REHEARSAL_LIMIT_S, [command]) for name, command in commands.items()]
    return [*parts, Part("vllm", REHEARSAL_LIMIT_S, on_vllm, by_default=False, vllm=True)]


def spread(workers: int) -> str:
    """Spread tests over processes, where pytest-xdist is there."""
    found = subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True).returncode == 0
    return f"-n {workers} --dist worksteal" if found else ""


def main(parts: list[Part], out: Path, *, rehearsal: bool, total_s: float = float("inf")) -> int:
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    outcomes: list[Outcome] = []
    claims: list[Claim] = []
    site = Path(os.environ.get("BUNDLE") or ROOT / ".gpu-bundle") / "site"
    usable = site.is_dir() and sys.version_info[:2] == BUNDLED_PYTHON
    paths = [site if usable else None, ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
    }
    began = time.monotonic()
    for part in parts:
        console.print(f"{part.name} …", end=" ", highlight=False)
        for name in files_of(part.name):
            (out / name).unlink(missing_ok=True)
        left_s = total_s - (time.monotonic() - began)
        outcomes.append(run_part(part, out, env, min(part.limit_s, left_s)))
        console.print(outcomes[-1].verdict, highlight=False)
        claims += claims_of(part.name, out)
        summary = {
            "parts": [asdict(outcome) for outcome in outcomes],
            "claims": [asdict(claim) for claim in claims],
        }
        write_result(out / "summary.json", summary)  # after each part, as the machine may be taken away
    console.print(outcome_table(outcomes))
    console.print(claim_table(claims))
    holds = all(outcome.passed for outcome in outcomes) and (rehearsal or all(claim.holds for claim in claims))
    return 0 if holds else 1


def run_part(part: Part, out: Path, env: dict[str, str], limit_s: float) -> Outcome:
    if limit_s <= 0:
        return Outcome(part.name, f"NOT RUN, no time was left for it: PART={part.name} runs it alone", 0.0, False)
    began = time.monotonic()
    failures: list[str] = []
    env = with_vllm(env) if part.vllm else env
    with open(out / f"{part.name}.log", "wb") as log, mps(env) if part.mps else nullcontext(env) as env_of_part:
        for command in part.commands:
            left = limit_s - (time.monotonic() - began)
            arguments = [argument.format(out=out) for argument in shlex.split(command)]
            code = run(arguments, log, env_of_part, left) if left > 0 else None
            if code is None:
                failures.append(f"over its limit of {limit_s:.0f} s")
                break
            if code:
                failures.append(f"code {code}")
    seconds = time.monotonic() - began
    if not failures:
        return Outcome(part.name, f"passed in {seconds:.0f} s", seconds, True)
    last = next((line for line in reversed(text_of(out / f"{part.name}.log")) if line.strip()), "")
    return Outcome(part.name, f"FAILED, {', '.join(failures)}; its log ends: {last.strip()[:200]}", seconds, False)


def run(arguments: list[str], log, env: dict[str, str], limit_s: float) -> int | None:
    """Return the exit code, or None if it was ended at its limit, with all processes that it has started."""
    log.write(f"$ python {shlex.join(arguments)}\n".encode())
    log.flush()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # engines notice that they are alone
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None


def with_vllm(env: dict[str, str]) -> dict[str, str]:
    """Where PEERS_PATH says so, vLLM is found behind what the host has, and run by this interpreter."""
    path = env.get("PEERS_PATH")
    if not path:
        return env
    return env | {"PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], path]), "INFLIGHT_VLLM_PYTHON": sys.executable}


@contextmanager
def mps(env: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run a Multi-Process Service of our own, which changes no setting of the GPU."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    if daemon is None:
        sys.exit("nvidia-cuda-mps-control, which is part of NVIDIA's driver, is not on the PATH")
    with tempfile.TemporaryDirectory(prefix="inflight-mps-") as directory:
        served = env | {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        subprocess.run([daemon, "-d"], env=served, check=True)
        try:
            yield served
        finally:
            subprocess.run([daemon], input=b"quit\n", env=served, check=False)


def name_of_gpu() -> str:
    """Return the name of the GPU as a folder has it, such as h200."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; to try the scripts on a CPU: python benchmarks/gpu/check.py --rehearse")
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def text_of(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def outcome_table(outcomes: list[Outcome]) -> Table:
    table = Table(title="parts", title_justify="left")
    table.add_column("part")
    table.add_column("verdict", overflow="fold")
    for outcome in outcomes:
        table.add_row(outcome.part, outcome.verdict)
    table.caption = f"{sum(outcome.seconds for outcome in outcomes):.0f} s in all"
    return table


def claim_table(claims: list[Claim]) -> Table:
    table = Table(title="claims", title_justify="left")
    for name in ("part", "claim", "measured", "holds"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        table.add_row(claim.part, claim.text, claim.measured, "yes" if claim.holds else "NO")
    return table


def chosen(parts: list[Part], names: str) -> list[Part]:
    if not names:
        return [part for part in parts if part.by_default]
    known = {part.name: part for part in parts}
    asked = [name.strip() for name in names.split(",")]
    if unknown := [name for name in asked if name not in known]:
        sys.exit(f"unknown part {unknown[0]!r}; choose from {', '.join(known)}")
    return [known[name] for name in asked]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    rehearse = parser.parse_args().rehearse
    place = "rehearsal" if rehearse else name_of_gpu()
    directory = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / place).resolve()
    all_parts = rehearsal_parts() if rehearse else gpu_parts()
    named = os.environ.get("PART", "")
    total = float("inf") if named or rehearse else TOTAL_S
    sys.exit(main(chosen(all_parts, named), directory, rehearsal=rehearse, total_s=total))
