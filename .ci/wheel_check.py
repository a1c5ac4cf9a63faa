"""Installs the wheel of dist/ into an empty environment, without the repository, and runs what a user runs first.

    python .ci/wheel_check.py  # after `make wheel`, or both by `make wheel-check`

Every step has a bound. It takes minutes, most of them to install torch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALL_S, RUN_S = 1200, 300
"""Bounds of an installation, and of everything else."""
KEPT = ("PATH", "HOME", "LANG", "OMP_NUM_THREADS", "TMPDIR", "XDG_CACHE_HOME")
"""What else there is in the environment, as PYTHONPATH, may lead to the repository."""


def main() -> None:
    [wheel] = (ROOT / "dist").glob("*.whl")
    environment = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")}
    with tempfile.TemporaryDirectory(prefix="inflight-wheel-") as directory:
        place = Path(directory)

        def run(what: str, *command: str | Path, timeout_s: float = RUN_S) -> str:
            began = time.monotonic()
            done = subprocess.run(
                command, cwd=place, env=environment, timeout=timeout_s, text=True, capture_output=True, check=False
            )
            print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)
            if done.returncode:
                sys.exit(f"{what} failed with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
            return done.stdout

        run("environment", sys.executable, "-m", "venv", "venv")
        python, inflight = place / "venv" / "bin" / "python", place / "venv" / "bin" / "inflight"
        constraints = ROOT / "constraints" / "cpu.txt"
        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints)
        run("installation", *install, f"{wheel}[demo]", timeout_s=INSTALL_S)
        where = Path(run("import", python, "-c", "import inflight; print(inflight.__file__)").strip())
        if not where.is_relative_to(place / "venv"):
            sys.exit(f"the environment imports inflight from {where}")
        print(run("inflight doctor", inflight, "doctor"))
        demo = ("demo", "--steps", "4", "--device", "cpu", "--json", "demo.json")
        run("inflight demo", inflight, *demo)
        summary = json.loads((place / "demo.json").read_text())
        if not summary["accuracy_before"] > 0.2:
            sys.exit(f"the demo did not start from the checkpoint in the wheel: {summary}")
        if summary["num_swaps"] < 4:
            sys.exit(f"the demo has published {summary['num_swaps']} times, expected 4: {summary}")
        drawn = list(place.glob("runs/*/demo.png"))
        if not drawn:
            sys.exit(f"the demo has drawn no figure: {sorted(place.glob('runs/*/*'))}")
    print(f"{wheel.name} runs by itself")


if __name__ == "__main__":
    main()
