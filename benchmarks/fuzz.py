"""Feeds every decoder input that no honest process sends, and counts what comes of it.

    python benchmarks/fuzz.py [FILE]

1,000,000 inputs, as many to each decoder (a third of that to the assembler, whose inputs are several frames): valid
messages of every type, changed as trees and as bytes. Each is read or refused with an InflightError, within bounds on
time and memory (tests/helpers/fuzzer.py), or listed as a failure. It takes some minutes on one core, and ends with
status 1 if there was one.
"""

import math
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from harness import finish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from fuzz_targets import targets
from fuzzer import BYTES_PER_BYTE, LIMIT_MS, SAMPLE_BYTES, SAMPLE_MS, SLACK_BYTES, fuzz

INPUTS, SEED = 1_000_000, 0
ADDRESS_SPACE = 32 << 30
"""A decoder that asks for more than this gets a MemoryError, which is a failure."""


def main() -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    reports, began = {}, time.perf_counter()
    with targets() as made:
        shares = sum(target.share for target in made)
        for target in made:
            reports[target.name] = report = fuzz(target, math.ceil(INPUTS * target.share / shares), SEED)
            print(f"{target.name}: {dict(report.outcomes)}, {report.num_failures} failures", flush=True)
    num_failures = sum(report.num_failures for report in reports.values())
    result = {
        "inputs": sum(report.num_inputs for report in reports.values()),
        "failures": num_failures,
        "seconds": time.perf_counter() - began,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "slowest_ms": max(report.slowest_ms for report in reports.values()),
        "seed": SEED,
        "bounds": {
            "bytes_per_byte": BYTES_PER_BYTE,
            "slack_bytes": SLACK_BYTES,
            "ms_per_64_kib": LIMIT_MS,
            "bytes_per_sample": SAMPLE_BYTES,
            "ms_per_sample": SAMPLE_MS,
        },
        "decoders": {name: asdict(report) for name, report in reports.items()},
    }
    finish("fuzz", result)
    sys.exit(num_failures > 0)


if __name__ == "__main__":
    main()
