"""The claims of inflight about a GPU, held against the JSON that the parts of `make gpu-check` wrote."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROWTH = {"device_bytes": 64 << 20, "trainer_allocated_bytes": 0, "trainer_mappings": 16}
"""What may grow over the publishes of a run by more than a few."""
A_FEW = 4


@dataclass(frozen=True, slots=True)
class Claim:
    part: str
    text: str
    measured: str
    holds: bool


def files_of(part: str) -> list[str]:
    """Return the files that are read of a part, and are not to be an earlier run's."""
    return [name for of_part, name, _ in CHECKS if of_part == part]


def claims_of(part: str, directory: Path) -> list[Claim]:
    """Return the claims of a part that has run. A file that it did not write makes no claims: the part's own verdict
    tells of that."""
    claims = []
    for of_part, name, check in CHECKS:
        path = directory / name
        if of_part == part and path.is_file():
            text = path.read_text(errors="replace")
            result = json.loads(text) if path.suffix == ".json" else text
            claims += [Claim(part, claim, measured, bool(holds)) for claim, measured, holds in check(result)]
    return claims


Told = Iterator[tuple[str, str, bool]]
"""Each is (claim, what was measured, whether it holds)."""


def tests(log: str) -> Told:
    """Read swaps as the tests print them."""
    for slots, tokens, swaps, attention, graphs in re.findall(
        r"slots=(\d): (\d+) tokens, \d+ swaps, (\d+) in flight, attention (\w+), (\d+) CUDA graphs", log
    ):
        text = f"slots={slots}: 2,000 swaps in flight, every token's version is the one that drew it, graphs on"
        measured = f"{swaps} swaps, {tokens} tokens, {graphs} graphs ({attention})"
        yield text, measured, int(swaps) >= 2000 and int(graphs) > 0


def parity(result: dict[str, Any]) -> Told:
    for way, of in result["ways"].items():
        ours, theirs = of["engine_error"]["mean"], of["transformers_error"]["mean"]
        measured = f"{ours:.4f} to {theirs:.4f}; p99 {of['engine_error']['p99']:.4f}, mean ratio {of['ratio']:.5f}"
        yield f"{way}: mean |Δ log p| at most 1.25 × that of Transformers in bf16", measured, ours <= 1.25 * theirs
    first = next(iter(result["ways"].values()))["engine"]
    yield runs_fast(first)


def runs_fast(described: str) -> tuple[str, str, bool]:
    fast = "attention flashinfer" in described and "CUDA graphs" in described
    return "FlashInfer and CUDA graphs are used", described, fast


def kernels(result: dict[str, Any]) -> Told:
    for kernel in result["kernels"]:
        share = kernel.get("share_of_ceiling")
        if share is not None:
            text = f"{kernel['name']} {kernel['shape']}: at least 0.6 of the measured ceiling"
            yield text, f"{share:.2f}, {kernel['ms']:.3f} ms", share >= 0.6


def gaps_beside_a_trainer(name: str, busy: dict[str, Any] | None) -> Told:
    """The gap between two tokens of a sequence across a swap, less one without a swap, both while the trainer computes.
    Host times would say nothing of a GPU that the engine's pass waits for."""
    if busy:
        across, quiet = busy["gap_ms"]["across_swaps"]["p99"], busy["gap_ms"]["without"]["p50"]
        text = f"{name}: while the trainer computes, a swap makes the gap between two tokens longer by less than a pass"
        yield f"{text} (p99 less p50)", f"{across - quiet:.2f} ms of {quiet:.2f} ms", across - quiet < quiet


def swap(result: dict[str, Any]) -> Told:
    for point in result["points"]:
        name = point["shape"] if isinstance(point["shape"], str) else f"{point['parameters'] / 1e6:,.0f} M"
        yield from gaps_beside_a_trainer(name, point["busy"])
        share = point["copy_gb_s"] / point["memcpy_gb_s"]
        measured = f"{share:.2f}: {point['copy_gb_s']:,.0f} GB/s"
        yield f"{name}: a publish copies at 0.8 × a plain copy or more", measured, share >= 0.8
        paused, ratio = point["paused_stall_ms"]["p50"], point["gap_ratio"]
        measured = f"{paused:.2f} ms to {point['stall_ms']['p50']:.3f} ms; gap ratio {ratio:.2f}"
        yield f"{name}: pausing, loading and resuming stalls longer", measured, paused > point["stall_ms"]["p50"]
        if point["num_swaps"] >= 1000:
            grown = {key: value for key, value in point["grown"].items() if value > GROWTH.get(key, A_FEW)}
            yield f"{name}: 1,000 publishes leave nothing behind", str(grown or point["grown"]), not grown
        how = point["engine"]
        fast = how["attention"] == "flashinfer" and how["num_graphs"] > 0
        yield f"{name}: FlashInfer and CUDA graphs are used", str(how), fast


def throughput(result: dict[str, Any]) -> Told:
    mbu = result["mbu"]
    measured = "not measured" if mbu is None else f"{mbu:.2f}, {result['tokens_per_s']:,.0f} tokens/s"
    yield f"{result['model']}, {result['sequences'][-1]} sequences: MBU at least 0.6", measured, (mbu or 0) >= 0.6
    yield runs_fast(result["sides"]["inflight"]["mode"])


def decode(result: dict[str, Any]) -> Told:
    plain, top_p = result["pass_ms"]["plain"]["p50"], result["pass_ms"]["top_p 0.95"]["p50"]
    yield "a pass with top-p takes at most 1.5 × a plain one", f"{top_p:.2f} ms to {plain:.2f} ms", top_p <= 1.5 * plain


def peers(result: dict[str, Any]) -> Told:
    for name, peer in result["points"][-1]["peers"].items():
        measured = f"{peer['ratio']:.2f}: {result['tokens_per_s']:,.0f} to {peer['tokens_per_s']:,.0f} tokens/s"
        yield f"{result['model']}: as fast as {name} or faster", measured, peer["ratio"] >= 1


def vllm_swap(result: dict[str, Any]) -> Told:
    yield from gaps_beside_a_trainer("vLLM", result["busy"])
    paused, ours = result["peer_stall_ms"]["p50"], result["stall_ms"]["p50"]
    yield "vLLM's own pause, load and resume stalls longer", f"{paused:.2f} ms to {ours:.3f} ms", paused > ours
    grown = {key: value for key, value in result["grown"].items() if value > GROWTH.get(key, A_FEW)}
    yield "publishes leave nothing behind", str(grown or result["grown"]), not grown


def vllm_throughput(result: dict[str, Any]) -> Told:
    measured = f"{result['ratio']:.3f}: {result['tokens_per_s']:,.0f} to {result['peer_tokens_per_s']:,.0f} tokens/s"
    yield "submit() to the stream at 0.97 × LLM.generate or more", measured, result["ratio"] >= 0.97


def loss(result: dict[str, Any]) -> Told:
    share = result["matmul_share"]
    measured = "not measured" if share is None else f"{share:.2f}, {result['tflops']:,.0f} TFLOP/s"
    yield "log-probabilities and gradients at 0.6 × the rate of a plain product or more", measured, (share or 0) >= 0.6
    yield "memory at most a quarter of the naive way's", f"{result['memory_ratio']:.3f}", result["memory_ratio"] <= 0.25


def mps_swap(result: dict[str, Any]) -> Told:
    share = result["environment"]["machine"]["mps_share"]
    yield from gaps_beside_a_trainer(f"{result['model']}, a trainer with {share} % of the GPU", result["busy"])


def finite(result: dict[str, Any]) -> Told:
    text = f"a trainer with {result['share']} % of the GPU computes finite log-probabilities"
    yield text, str(result["runs"]), not any(run["logprobs"] for run in result["runs"])


def learning(result: dict[str, Any]) -> Told:
    ratio = result["ratio"]
    measured = "target not reached" if ratio is None else f"{ratio:.2f} times as soon"
    yield "in flight reaches the target sooner than in turn", measured, (ratio or 0) > 1


def staleness(result: dict[str, Any]) -> Told:
    lag = result["weight_lag_ms"]
    yield "weights lag by milliseconds", f"p50 {lag['p50']:.1f} ms, p99 {lag['p99']:.1f} ms", lag["p50"] < 1000


CHECKS: list[tuple[str, str, Callable[[Any], Told]]] = [
    ("tests", "tests.log", tests),
    ("parity", "parity.json", parity),
    ("kernels", "kernels.json", kernels),
    ("decode", "decode.json", decode),
    ("swap", "swap-growth.json", swap),
    ("mps", "mps-swap-50.json", mps_swap),
    ("mps", "mps-staleness-100.json", staleness),
    *(("mps", f"mps-finite-{share}.json", finite) for share in (50, 75, 100)),
    ("mps", "mps-learning.json", learning),
    ("throughput", "throughput-qwen3-1.7b.json", throughput),
    ("throughput", "throughput-qwen3-0.6b.json", throughput),
    ("peers", "peers.json", peers),
    ("vllm-swap", "vllm-swap.json", vllm_swap),
    ("vllm-speed", "vllm-throughput.json", vllm_throughput),
    ("vllm-speed", "vllm-staleness.json", staleness),
    ("loss", "loss.json", loss),
    ("learning", "learning.json", learning),
    ("staleness", "staleness.json", staleness),
]
