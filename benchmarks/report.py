"""Makes the report of this machine: our schedules and vLLM's server side by side, in under 15 minutes on two cores.

    python benchmarks/report.py [DIRECTORY] [--model SHAPE] [--again]

Runs `inflight bench staleness` in flight (two slots, one slot), one step off and synchronous, then
`served_staleness.py` on our servers and, where `make peers` has installed vLLM, on its; then `inflight report` on all.
What was measured goes to DIRECTORY (benchmarks/results/report), and so it is not measured twice; the page goes to
build/report. `make report` runs this.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from vllm_server import PYTHON

os.chdir(Path(__file__).parents[1])  # commands are recorded with short paths
PAGE = Path("build/report/report.html")
LIMIT_S = 1200.0
"""A part that takes longer has failed; all of them take less than that together."""
MODES = {
    "in-flight-two-slots": ("inflight", 2),
    "in-flight-one-slot": ("inflight", 1),
    "one-step-off": ("one_step_off", 2),
    "synchronous": ("sync", 2),
}
LOAD = ("--sequences", "16", "--tokens", "48", "--steps", "15")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("benchmarks/results/report"))
    parser.add_argument("--model", default="small")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    options = parser.parse_args()
    began = time.monotonic()
    files = [options.directory / f"staleness-{name}.json" for name in MODES]
    for file, (mode, slots) in zip(files, MODES.values(), strict=True):
        run = ("-m", "inflight.tools.cli", "bench", "staleness", "--model", options.model, "--mode", mode)
        python(*run, "--slots", str(slots), *LOAD, "--json", str(file), unless=None if options.again else file)
    served = options.directory / "served-staleness.json"
    if not Path(PYTHON).exists():
        print(f"there is no vLLM at {PYTHON}: our servers alone are measured (`make peers` installs it)", flush=True)
    run = ("benchmarks/served_staleness.py", str(served), "--model", options.model, "--steps", "20")
    python(*run, unless=None if options.again else served)
    python("-m", "inflight.tools.cli", "report", *map(str, (*files, served)), "--out", str(PAGE))
    print(f"{PAGE} after {(time.monotonic() - began) / 60:.1f} minutes")


def python(*arguments: str, unless: Path | None = None) -> None:
    """Run this, and show what it prints, unless there is such a file. Ends the program if it fails."""
    if unless is not None and unless.exists():
        print(f"{unless} is there: it is not measured again without --again", flush=True)
        return
    print("$ python", *arguments, flush=True)
    try:
        subprocess.run([sys.executable, *arguments], check=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        sys.exit(f"{arguments[0]} has not ended after {LIMIT_S:.0f} s")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(arguments)} ended with code {error.returncode}")


if __name__ == "__main__":
    main()
