"""Every kernel of the library on a GPU at the shapes of real models: is it right there, and how near is it to the
bandwidth of the same card's own copy?

    python benchmarks/gpu/kernel_bench.py [--device cuda] [--json PATH] [--rehearse]

All of them but the products of `linear_logprobs`, which `inflight bench loss` measures, and attention of prompts are
bound by memory. Bytes are counted by hand, each input read once and each output written once. A time is the median over
calls between two CUDA events, each call behind a read of 1 GiB, so that the cache holds nothing of the inputs and the
call is queued before its turn comes; what a call leaves in the cache to be written later is not in its time, which
flatters small shapes. Where launches take longer than the bytes (a step of decoding, the policy loss) there is a time
but no share. Errors are ‖out − reference‖ / ‖reference‖ against fp64, or fp32 where it says so, on random data at the
same shape.

Attention is that of the engine: with FlashInfer the kernels that `flashinfer_kernels.py` chooses, planned as for a CUDA
graph, and as peers those that it might have chosen.

Peers, in the same run: "eager" is the reference in PyTorch, "compiled" the same through torch.compile, "liger" and
"flashinfer" the kernels of those libraries, where they are there (FlashInfer's only if they need no compiler: compiling
takes minutes). A kernel that fails or is wrong leaves the others alone and makes the exit code 1. `--rehearse` runs
everything in a small size on the CPU by the wall clock; its numbers mean nothing. (A file here named kernels.py would
stand in the way of the package of that name, which Transformers imports.)
"""

import argparse
import math
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_case import FP32, SMALL, Case, Machine, Sizes
from kernel_cases import CASES
from rich.console import Console
from rich.table import Table

from inflight.tools.environment import write_result


def ceilings(machine: Machine) -> dict[str, float]:
    """Measure GB/s of a copy, bytes read and bytes written, and TFLOP/s of a product of bf16, both on random data."""
    sizes = machine.sizes
    source = machine.random(sizes.copy_bytes // 4, dtype=FP32)
    copy_ms = machine.ms(partial(torch.empty_like(source).copy_, source))
    a, b = machine.random(2, sizes.matmul, sizes.matmul).unbind()
    out = torch.empty_like(a)
    matmul_ms = machine.ms(lambda: torch.mm(a, b, out=out))
    return {
        "copy_gb_s": 2 * source.nbytes / copy_ms / 1e6,
        "copy_bytes": source.nbytes,
        "matmul_tflops": 2 * sizes.matmul**3 / matmul_ms / 1e9,
        "matmul_size": sizes.matmul,
    }


def measure(machine: Machine) -> dict[str, Any]:
    """Measure ours first, all of it, then peers, those that must be compiled last."""
    limits = ceilings(machine)
    results: dict[str, dict[str, Any]] = {}
    cases = dict(_ready(machine, results))
    for name, case in cases.items():
        results[name] = {"name": case.name, "shape": case.shape, "dtype": case.dtype}
        try:
            error, ms = case.error(), machine.ms(case.ours)
        except Exception:
            results[name]["failure"] = traceback.format_exc()
            continue
        gb_s = case.num_bytes / ms / 1e6
        results[name] |= {
            "ms": ms,
            "gb_s": gb_s,
            "share_of_ceiling": gb_s / limits["copy_gb_s"] if case.is_long else None,
            "bytes": case.num_bytes,
            "tflops": case.num_flops / ms / 1e9 if case.num_flops else None,
        }
        results[name] |= {"error": error if math.isfinite(error) else None, "tolerance": case.tolerance}
        if not error <= case.tolerance:
            results[name]["failure"] = f"error {error:.2e}, expected at most {case.tolerance:.0e}"
    for is_compiled in (False, True):
        for name, case in cases.items():
            peers, reasons = (results[name].setdefault(key, {}) for key in ("peers", "peer_errors"))
            for peer, ready in case.peers.items():
                if (peer == "compiled") is is_compiled:
                    peers[peer] = None
                    try:
                        peers[peer] = machine.ms(ready())
                    except Exception as reason:  # a peer that is missing or does not take this is no failure of ours
                        reasons[peer] = f"{type(reason).__name__}: {reason}"[:300]
    return {"bench": "kernels", "ceilings": limits, "kernels": [results[name] for name in CASES]}


def _ready(machine: Machine, results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Case]]:
    """Yield the cases whose kernels run at all, compiled side by side."""
    built: dict[str, Case] = {}
    for name, make in CASES.items():
        try:
            built[name] = make(machine)
        except Exception:
            results[name] = {"name": name, "failure": traceback.format_exc()}
    with ThreadPoolExecutor(8 if machine.device.type == "cuda" else 1) as pool:
        running = {name: pool.submit(case.ours) for name, case in built.items()}
    for name, future in running.items():
        try:
            future.result()
        except Exception:
            case = built[name]
            results[name] = {"name": case.name, "shape": case.shape, "dtype": case.dtype}
            results[name]["failure"] = traceback.format_exc()
        else:
            yield name, built[name]


def table_of(result: dict[str, Any]) -> Table:
    limits = result["ceilings"]
    table = Table(
        title=f"kernels; a copy moves {limits['copy_gb_s']:,.0f} GB/s, a product of bf16 has "
        f"{limits['matmul_tflops']:,.0f} TFLOP/s",
        title_justify="left",
    )
    for column in ("kernel", "shape", "dtype"):
        table.add_column(column)
    for column in ("µs", "GB/s", "share", "error", "peers, µs"):
        table.add_column(column, justify="right")
    for row in result["kernels"]:
        peers = ", ".join(f"{name} {1e3 * ms:,.0f}" for name, ms in row.get("peers", {}).items() if ms is not None)
        numbers = ["", "", "", row.get("failure", "").strip().splitlines()[-1] if "failure" in row else ""]
        if "ms" in row:
            share = row["share_of_ceiling"]
            error = "failed" if "failure" in row else f"{row['error']:.1e}"
            numbers = [f"{1e3 * row['ms']:,.1f}", f"{row['gb_s']:,.0f}", "" if share is None else f"{share:.0%}", error]
        table.add_row(row["name"], row.get("shape", ""), row.get("dtype", ""), *numbers, peers)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="everything in a small size, on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.rehearse else options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU here; --rehearse runs a small size on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    machine = Machine(device, SMALL if options.rehearse else Sizes(), time.perf_counter())
    result = measure(machine)
    result["seconds"] = time.perf_counter() - machine.began_s
    if options.json:
        write_result(options.json, result)
    Console(width=None if sys.stdout.isatty() else 200).print(table_of(result))
    failed = [row for row in result["kernels"] if "failure" in row]
    for row in failed:
        print(f"{row['name']} {row.get('shape', '')}: {row['failure']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
