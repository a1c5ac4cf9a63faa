"""`make gpu-check`: every GPU claim, checked on this machine without installs or a network.

Independent parts, each with a time limit; for each a log, and JSON where it measures. At the end it prints a table
of claims, measured values and verdicts, and writes it to summary-PARTS.json. Before them a preflight: where
an engine does not run with FlashInfer and CUDA graphs, nothing else is run.

    make gpu-check PART=swap,loss    runs some of the parts; `peers`, `vllm`, `vllm-swap`, `vllm-speed` and `mps` are
                                     run only when they are named; GROUPS in parts.py end within nine minutes each
    RESULTS=DIRECTORY                where logs and JSON go (default benchmarks/results/NAME-OF-THE-GPU)
    OUT=DIRECTORY                    gets all that in one file as well, gpu-check-PARTS.tar.gz
    INSIST=1                         go on although the preflight says no
    GPU_PYTHON=…                     the interpreter (default .venv/bin/python if it is there, else python3)
    BUNDLE=DIRECTORY                 what `make gpu-bundle` made (default .gpu-bundle)
    INFLIGHT_COMMIT=…                the commit in the results, for a copy of a checkout
    PEERS_PATH=DIRECTORY             where vLLM lies unpacked, for the parts `peers`, `vllm`, `vllm-swap`, `vllm-speed`

    python benchmarks/gpu/check.py --rehearse     the same way with tiny models on a CPU, to try the scripts
"""

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from claims import Claim, claims_of, files_of
from failures import MARK
from parts import Part, gpu_parts, preflight, rehearsal_parts
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from inflight.tools.environment import write_result  # noqa: E402

BUNDLED_PYTHON = (3, 12)
"""The version of Python that the bundle's packages are for."""
DAEMON_TIMEOUT_S = 20
MAX_ARCHIVE_BYTES = 15 << 20
"""What some machines give back of a file."""


class CannotRunError(Exception):
    """A part cannot be run here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    part: str
    verdict: str
    seconds: float
    passed: bool
    failed_tests: tuple[str, ...] = ()
    """Names of failed tests and their reasons."""


def main(
    parts: list[Part],
    results: Path,
    *,
    rehearsal: bool,
    first: Part | None = None,
    out: Path | None = None,
    label: str = "all",
    insist: bool = False,
) -> int:
    """Run the parts, the preflight `first` before them, and return the exit code. out: where one archive of what they
    wrote goes too; label: what summary and archive are called after."""
    results.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    outcomes: list[Outcome] = []
    claims: list[Claim] = []
    env, began = environment(), time.time() - 1  # file systems have coarse clocks
    for part in [first, *parts] if first is not None else parts:
        console.print(f"{part.name} …", end=" ", highlight=False)
        for name in files_of(part.name):
            (results / name).unlink(missing_ok=True)
        outcomes.append(run_part(part, results, env))
        console.print(outcomes[-1].verdict, highlight=False)
        for failed in outcomes[-1].failed_tests:
            console.print(f"  {failed}", highlight=False, markup=False)
        claims += claims_of(part.name, results)
        summary = {
            "parts": [asdict(outcome) for outcome in outcomes],
            "claims": [asdict(claim) for claim in claims],
        }
        write_result(results / f"summary-{label}.json", summary)  # after each part, as the machine may be taken away
        if out is not None:
            pack(results, out / f"gpu-check-{label}.tar.gz", since=began)
        if part is first and not outcomes[-1].passed and not insist:
            console.print("Nothing else was run: it would measure something else. INSIST=1 goes on all the same.")
            return 1
    console.print(outcome_table(outcomes))
    console.print(claim_table(claims))
    holds = all(outcome.passed for outcome in outcomes) and (rehearsal or all(claim.holds for claim in claims))
    return 0 if holds else 1


def environment() -> dict[str, str]:
    """The variables of all parts, which find the bundle, if its packages are for this Python, and this checkout. vLLM
    draws with PyTorch, because FlashInfer would compile a sampler, whose sources the bundle lacks."""
    site = bundle() / "site"
    usable = site.is_dir() and sys.version_info[:2] == BUNDLED_PYTHON
    paths = [site if usable else None, ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
    }


def bundle() -> Path:
    return Path(os.environ.get("BUNDLE") or ROOT / ".gpu-bundle")


def what_is_missing() -> str | None:
    """Why FlashInfer will not be found, or None."""
    site, running = bundle() / "site", sys.version_info[:2]
    if importlib.util.find_spec("flashinfer") is not None or (site.is_dir() and running == BUNDLED_PYTHON):
        return None
    if site.is_dir():
        wanted, got = (".".join(map(str, version)) for version in (BUNDLED_PYTHON, running))
        return (
            f"the packages in {site} are for Python {wanted}, and this is {got}; GPU_PYTHON names another interpreter"
        )
    return f"FlashInfer is not installed and there is no bundle in {bundle()}; `make gpu-bundle` makes it (docs/gpu.md)"


def pack(results: Path, archive: Path, *, since: float) -> None:
    """Put what was written since then into one archive, but for the largest files if it became too large, and tell of
    them."""
    files = sorted(
        (path for path in results.iterdir() if path.stat().st_mtime >= since), key=lambda p: p.stat().st_size
    )
    archive.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(files):
                tar.add(path, f"{results.name}/{path.name}")
        if archive.stat().st_size <= MAX_ARCHIVE_BYTES or not files:
            return
        print(f"{files.pop().name} is left out of {archive}, which would be larger than 15 MiB")


def run_part(part: Part, results: Path, env: dict[str, str]) -> Outcome:
    began = time.monotonic()
    failures: list[str] = []
    env = with_vllm(env) if part.vllm else env
    try:
        with open(results / f"{part.name}.log", "wb") as log, mps(env) if part.mps else nullcontext(env) as env_of_part:
            for command in part.commands:
                left = part.limit_s - (time.monotonic() - began)
                variables, arguments = read_command(command, results)
                code = run(arguments, log, env_of_part | variables, left) if left > 0 else None
                if code is None:
                    failures.append(f"over its limit of {part.limit_s:.0f} s")
                    break
                if code:
                    failures.append(f"code {code}")
    except CannotRunError as error:
        return Outcome(part.name, f"FAILED, {error}", 0.0, False)
    seconds = time.monotonic() - began
    if not failures:
        return Outcome(part.name, f"passed in {seconds:.0f} s", seconds, True)
    lines = text_of(results / f"{part.name}.log")
    last = next((line for line in reversed(lines) if line.strip()), "")
    verdict = f"FAILED, {', '.join(failures)}; its log ends: {last.strip()[:300]}"
    failed_tests = tuple(line.removeprefix(MARK) for line in lines if line.startswith(MARK))
    return Outcome(part.name, verdict, seconds, False, failed_tests)


def read_command(command: str, results: Path) -> tuple[dict[str, str], list[str]]:
    """The variables that a command begins with, and its arguments."""
    words = [word.format(out=results) for word in shlex.split(command)]
    variables: dict[str, str] = {}
    while words and re.match(r"[A-Z0-9_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words


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
        raise CannotRunError("nvidia-cuda-mps-control, which is part of NVIDIA's driver, is not on the PATH")
    with tempfile.TemporaryDirectory(prefix="inflight-mps-") as directory:
        served = env | {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        quiet: dict[str, Any] = {"env": served, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:  # pipes would stay open as long as the daemon
            subprocess.run([daemon, "-d"], check=True, timeout=DAEMON_TIMEOUT_S, **quiet)
        except subprocess.SubprocessError as error:
            raise CannotRunError(f"the Multi-Process Service did not start: {error}") from error
        try:
            yield served
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([daemon], input=b"quit\n", timeout=DAEMON_TIMEOUT_S, **quiet)


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
    directory = Path(os.environ.get("RESULTS") or ROOT / "benchmarks" / "results" / place).resolve()
    named = chosen(rehearsal_parts() if rehearse else gpu_parts(), os.environ.get("PART", ""))
    insists = os.environ.get("INSIST", "") not in ("", "0")
    of_ours = not all(part.vllm for part in named)
    if of_ours and not rehearse and not insists and (missing := what_is_missing()):
        sys.exit(f"{missing}. INSIST=1 goes on without it.")
    sys.exit(
        main(
            named,
            directory,
            rehearsal=rehearse,
            first=preflight("cpu" if rehearse else "cuda") if of_ours else None,
            out=Path(os.environ["OUT"]).resolve() if os.environ.get("OUT") else None,
            label="-".join(part.name for part in named) if os.environ.get("PART") else "all",
            insist=insists,
        )
    )
