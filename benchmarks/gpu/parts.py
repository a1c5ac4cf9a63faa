"""The parts of `make gpu-check`, and the groups of them that are run together."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH = "-m inflight.tools.cli bench"
VLLM_TESTS, ADAPTER_TESTS = "tests/engine/test_backends.py", "tests/engine/test_backend_adapters.py"
SWAP_TESTS = "tests/engine/test_swaps.py"
PYTEST = "-m pytest -q -rP -p no:cacheprovider -p benchmarks.gpu.failures"
MPS_SHARES = (50, 75, 100)
"""Percentages of the GPU's threads that a trainer may have in the search for values that are not finite."""
REHEARSAL_LIMIT_S = 300
GROUPS = (
    "environment,parity,kernels,decode",
    "tests,throughput",
    "swap,staleness",
    "loss,learning",
)
"""What one call runs where a machine is lent for minutes; the one that matters most first."""
GROUP_LIMIT_S = 540
"""Seconds that the limits of a group and of its preflight come to at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """Commands of Python, one after another, with a time limit for all of them; {out} is where results go. A command
    may begin with variables of its own, as NAME=VALUE."""

    name: str
    limit_s: int
    commands: list[str]
    by_default: bool = True
    vllm: bool = False
    """True if its engines run vLLM, in the interpreter that runs this and finds it in PEERS_PATH."""
    mps: bool = False
    """True if it runs with NVIDIA's Multi-Process Service, so that kernels of two processes run side by side."""


def preflight(device: str) -> Part:
    """Whether an engine here runs as it should: about 20 seconds, and more where a slow disk is read the first time."""
    return Part("preflight", 90, [f"benchmarks/gpu/preflight.py --device {device}"])


def gpu_parts() -> list[Part]:
    """List the parts, those that matter most first, should the machine be taken away early."""
    throughput = (
        f"{BENCH} throughput --device cuda --dtype bfloat16 --sequences 256 --prompt-tokens 100-1024 --tokens 100-1024 "
        "--pairs 1 --model"
    )
    beside_vllm = "--prompt-tokens 100-512 --tokens 100-512 --pairs 2"  # caches of 1,024 tokens, for two engines
    learning = (
        f"{BENCH} learning --device cuda --dtype bfloat16 --model base --seeds 0 --modes inflight,sync --steps 60 "
        "--demonstrations 2000 --warmup-steps 60 --warmup-learning-rate 5e-4 --learning-rate 5e-5 --json"
    )
    loss = "loss --device cuda --dtype bfloat16 --tokens 8192 --hidden 4096 --vocab 131072 --pairs 3"
    loop = "--device cuda --dtype bfloat16 --model qwen3-0.6b"
    steps = f"{BENCH} staleness {loop} --sequences 64 --tokens 256 --steps 15"
    on_vllm = "--device cuda --dtype bfloat16 --model qwen3-1.7b --backend vllm --peer vllm"
    return [
        Part("environment", 60, ["-m inflight.tools.cli doctor"]),
        Part("parity", 120, ["benchmarks/gpu/parity.py --device cuda --json {out}/parity.json"]),
        Part("kernels", 100, ["benchmarks/gpu/kernel_bench.py --device cuda --json {out}/kernels.json"]),
        Part("decode", 90, ["benchmarks/gpu/decode.py --device cuda --json {out}/decode.json"]),
        Part("tests", 225, tests(["-m gpu", *files_with_gpu_tests()], min(6, os.cpu_count() or 1))),
        Part(
            "throughput",
            225,
            [f"{throughput} {model} --json {{out}}/throughput-{model}.json" for model in ("qwen3-1.7b", "qwen3-0.6b")],
        ),
        Part("swap", 290, ["benchmarks/swap_growth.py cuda {out}"]),
        Part(
            "staleness",
            160,
            [
                f"{steps} --mode {mode} --json {{out}}/{name}.json"
                for mode, name in (("inflight", "staleness"), ("sync", "staleness-sync"))
            ],
        ),
        Part("loss", 110, [f"{BENCH} {loss} --json {{out}}/loss.json"]),
        Part("learning", 230, [f"{learning} {{out}}/learning.json"]),
        # vLLM needs 90 s to start on an H200 (torch.compile, CUDA graphs), and two of these parts start it twice.
        Part(
            "peers",
            300,
            [
                f"{BENCH} throughput --device cuda --dtype bfloat16 --model qwen3-1.7b --peer vllm --sequences 256 "
                f"{beside_vllm} --json {{out}}/peers.json"
            ],
            by_default=False,
        ),
        Part("vllm", 450, vllm_tests(), by_default=False, vllm=True),
        Part(
            "vllm-swap",
            450,
            [
                f"{BENCH} swap {on_vllm} --sequences 64 --publishes 50 --busy-publishes 50 "
                "--json {out}/vllm-swap.json",
            ],
            by_default=False,
            vllm=True,
        ),
        Part(
            "vllm-speed",
            450,
            [
                f"{BENCH} throughput {on_vllm} --sequences 256 {beside_vllm} --json {{out}}/vllm-throughput.json",
                f"{BENCH} staleness {loop} --backend vllm --sequences 64 --steps 15 --json {{out}}/vllm-staleness.json",
            ],
            by_default=False,
            vllm=True,
        ),
        Part(
            "mps",
            450,
            [
                mps_swap(50),
                f"{mps_shares(100)} {steps} --json {{out}}/mps-staleness-100.json",
                *(
                    f"{mps_shares(share)} benchmarks/gpu/not_finite.py --json {{out}}/mps-finite-{share}.json"
                    for share in MPS_SHARES
                ),
                f"{mps_shares(100)} {learning} {{out}}/mps-learning.json",
            ],
            by_default=False,
            mps=True,
        ),
    ]


def mps_shares(trainer: int) -> str:
    """The variables with which a trainer has this percentage of the GPU's threads and a priority below the engine's,
    which may have all of them."""
    shares, priorities = {"": trainer, "INFLIGHT_ENGINE_": 100}, {"": 1, "INFLIGHT_ENGINE_": 0}  # 0 is normal
    return " ".join(
        f"{who}{name}={of[who]}"
        for name, of in (("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", shares), ("CUDA_MPS_CLIENT_PRIORITY", priorities))
        for who in of
    )


def mps_swap(trainer_share: int) -> str:
    """The command that measures swaps beside a trainer with this share of the GPU."""
    return (
        f"{mps_shares(trainer_share)} {BENCH} swap --device cuda --dtype bfloat16 --masters float32 --model qwen3-1.7b "
        "--sequences 64 --tokens 512 --prompt-tokens 16 --publishes 20 --busy-publishes 60 "
        f"--json {{out}}/mps-swap-{trainer_share}.json"
    )


def files_with_gpu_tests() -> list[str]:
    """List the files with tests marked `gpu`, except the tests of swaps. Other files import packages that a GPU host
    does not need."""
    marked = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text())
    return [name for path in marked if (name := path.relative_to(ROOT).as_posix()) != SWAP_TESTS]


def tests(selection: list[str], workers: int) -> list[str]:
    """Return commands for these tests: the tests of swaps on few workers, because they publish thousands of times and
    processes take turns at a GPU; the others side by side. Without pytest-xdist all run one after another."""
    options, *where = selection
    has_xdist = subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True).returncode == 0
    pytest = f"{PYTEST} {options}"
    few, spread = ("-n 3", f"-n {workers} --dist worksteal") if has_xdist else ("", "")
    return [f"{pytest} {few} {SWAP_TESTS}", f"{pytest} {spread} {' '.join(where)}"]


def vllm_tests() -> list[str]:
    """Return commands for the tests of the vLLM backend. All run in bf16 with vLLM's second model runner. Tests that
    share an engine also run in fp32 with its first one. Adapters run in bf16, because vLLM's kernels need 16 bits."""
    tests, bf16 = f"{PYTEST} -m peers", "INFLIGHT_TEST_DTYPE=bfloat16"
    return [
        f"{bf16} VLLM_USE_V2_MODEL_RUNNER=1 {tests} {VLLM_TESTS}",
        f"{bf16} {tests} {ADAPTER_TESTS}",
        f"{tests} {VLLM_TESTS} -k 'not every_token and not experts and not keeps_vllm'",
    ]


def rehearsal_parts() -> list[Part]:
    """List the same commands as the GPU's, with models and numbers that a CPU gets through."""
    throughput = "throughput --device cpu --dtype bfloat16 --sequences 4 --prompt-tokens 4-8 --tokens 4-8 --pairs 1"
    learning = "learning --device cpu --dtype bfloat16 --seeds 0 --modes inflight,sync --steps 3 --sequences 16"
    loss = f"{BENCH} loss --device cpu --tokens 64 --hidden 32 --vocab 512 --pairs 1 --json {{out}}/loss.json"
    staleness = f"{BENCH} staleness --device cpu --sequences 4 --tokens 8 --steps 2 --json {{out}}/staleness.json"
    few_tests = "-k 'truth_teller_over_every_transport and slots-cpu or page_lists'", "tests/engine/test_flashinfer.py"
    commands = {
        "environment": ["-m inflight.tools.cli doctor"],
        "parity": ["benchmarks/gpu/parity.py --device cpu --model tiny --json {out}/parity.json"],
        "kernels": ["benchmarks/gpu/kernel_bench.py --rehearse --json {out}/kernels.json"],
        "decode": ["benchmarks/gpu/decode.py --device cpu --model tiny --json {out}/decode.json"],
        "tests": tests(list(few_tests), 2),
        "throughput": [f"{BENCH} {throughput} --json {{out}}/throughput-qwen3-1.7b.json"],
        "swap": ["benchmarks/swap_growth.py rehearsal {out}"],
        "staleness": [staleness],
        "loss": [loss],
        "learning": [f"{BENCH} {learning} --warmup-steps 5 --json {{out}}/learning.json"],
    }
    parts = [Part(name, REHEARSAL_LIMIT_S, of_part) for name, of_part in commands.items()]
    tiny = "--device cpu --backend vllm"
    vllm = Part(
        "vllm",
        REHEARSAL_LIMIT_S,
        [f"{PYTEST} -m peers -n 0 {VLLM_TESTS} {ADAPTER_TESTS} -k seed_decides"],
        by_default=False,
        vllm=True,
    )
    swap = (
        f"{BENCH} swap {tiny} --peer vllm --sequences 4 --publishes 4 --busy-publishes 4 --tokens 256 "
        "--json {out}/vllm-swap.json"
    )
    speed = [
        f"{BENCH} throughput {tiny} --peer vllm --sequences 4 --tokens 8 --json {{out}}/vllm-throughput.json",
        f"{BENCH} staleness {tiny} --sequences 4 --tokens 8 --steps 2 --json {{out}}/vllm-staleness.json",
    ]
    return [
        *parts, vllm, replace(vllm, name="vllm-swap", commands=[swap]), replace(vllm, name="vllm-speed", commands=speed)
    ]  # fmt: skip
