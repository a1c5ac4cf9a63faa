"""A trainer that takes rollouts ten times slower than they are drawn: does memory stay below the bounds, and is every
token there afterwards?

    python benchmarks/slow_consumer.py [FILE] [--minutes M] [--only spill|admission]

The engine first draws as fast as it can while everything is taken; then, for M minutes, a tenth of that is. "spill":
generation goes on, and frames beyond `stream_memory_bytes` go to files. "admission": `max_unacknowledged_bytes` keeps
prompts from beginning. After that all that waits is taken. Every token tells the version that drew it, and carries 64
likely tokens beside it, so that what waits is large. The run fails if a process grew by more than `bound_mb` over what
it had before, if nothing was bounded, or if a token is lost, doubled or wrong.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from soak import sample
from truth_load import Load, save_model

import inflight
from inflight.observability.environment import write_result

STREAM_MEMORY_BYTES, UNACKNOWLEDGED_BYTES, WINDOW_BYTES = 8 << 20, 4 << 20, 16 << 20
"""The last one is what may be on its way (stream/writer.py)."""
BOUND_MB = (STREAM_MEMORY_BYTES + 2 * WINDOW_BYTES) / 1e6
"""What waits in memory, what is on its way, and as much again for what is unfinished and what allocators keep."""
VARIANTS: dict[str, dict[str, Any]] = {"spill": {}, "admission": {"max_unacknowledged_bytes": UNACKNOWLEDGED_BYTES}}
SLOWER, TOP = 10, 64
PUBLISH_EVERY_S = 0.5
_UNFINISHED = 64
"""Samples that the engine has at least, so that it never waits for prompts."""
_SEQUENCES = 16
_WARM_TOKENS, _WARM_S = 40_000, 120.0
"""The engine draws so many first, for at most so long: it takes its caches then."""
_FULL_S, _SAMPLE_S, _POLL_S = 10.0, 0.5, 0.02


class SlowLoad(Load):
    """Keeps the engine busy whatever is taken, and takes only so many tokens per second."""

    tokens_per_s: float | None = None
    """None: all that comes."""
    num_taken = 0

    def _prompt(self) -> tuple[list[int], inflight.SamplingParams]:
        prompt, params = super()._prompt()
        return prompt, msgspec.structs.replace(params, top_logprobs=TOP)

    def _submit(self) -> None:
        while not self._stopping.is_set():
            status = self._engine.status()
            if status.num_running + status.num_waiting >= _UNFINISHED:
                time.sleep(_POLL_S)
                continue
            wanted = [self._prompt() for _ in range(16)]
            for prompt, params in wanted:
                number = self.judge.note(prompt, params)
                [group_id] = self._engine.submit([prompt], params, metadata=[{"number": number}])
                self.judge.accepted(number, group_id)

    def _generate(self) -> None:
        """Nothing beside."""

    def _consume(self) -> None:
        while True:
            for group in self._engine.stream.groups():
                self.judge.take(group)
                num_tokens = sum(len(rollout.token_ids) for rollout in group)
                self.num_taken += num_tokens
                until = time.monotonic() + num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0
                while self.tokens_per_s and time.monotonic() < until:
                    time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))
            time.sleep(_POLL_S)


class Samples:
    """What both processes hold, and what waits, until it is told to stop."""

    def __init__(self, engine: inflight.Engine):
        self._engine, self._over = engine, threading.Event()
        self.rows: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Raises what kept it from sampling."""
        self._over.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def most(self, name: str, first: int = 0) -> float:
        """The largest value, from the row `first` on."""
        return max(row[name] for row in self.rows[first:])

    def _run(self) -> None:
        try:
            while not self._over.wait(_SAMPLE_S):
                self.rows.append(self._take())
        except Exception as error:
            self.error = error

    def _take(self) -> dict[str, Any]:
        status, stream = self._engine.status(), self._engine.stream
        return {
            "seconds": time.monotonic() - self._began,
            "trainer_mb": sample("self")["resident_mb"],
            "engine_mb": sample(self._engine.pid)["resident_mb"],
            "num_tokens": status.num_tokens,
            "unacknowledged_mb": status.num_unacknowledged_bytes / 1e6,
            "spilled_mb": status.num_spilled_bytes / 1e6,
            "held_mb": stream.nbytes / 1e6,
            "begins_nothing": status.num_waiting > 0 and not status.num_running,
        }


def warm_up(engine: inflight.Engine) -> None:
    """Draw with every number of sequences, for each of which products keep something."""
    params = [inflight.SamplingParams(max_tokens=10 * i, ignore_eos=True) for i in range(1, _SEQUENCES + 1)]
    engine.stream.collect([engine.submit([[1]], each, train=False)[0] for each in params])


def measure(variant: str, minutes: float, directory: str) -> dict[str, Any]:
    save_model(directory)
    with inflight.launch(
        directory, device="cpu", threads=1, max_sequences=_SEQUENCES, max_context=256,
        stream_memory_bytes=STREAM_MEMORY_BYTES, spill_directory=directory, **VARIANTS[variant],
    ) as engine:  # fmt: skip
        warm_up(engine)
        load, samples = SlowLoad(engine, seed=0, groups=0, publish_every_s=PUBLISH_EVERY_S), Samples(engine)
        began = time.monotonic()
        while engine.status().num_tokens < _WARM_TOKENS and time.monotonic() < began + _WARM_S:
            rest(load, _SAMPLE_S)
        full = rate(engine, load, _FULL_S)
        first, taken = len(samples.rows), load.num_taken
        load.tokens_per_s = full / SLOWER
        slow = rate(engine, load, minutes * 60)
        taken, slow_ends = load.num_taken - taken, len(samples.rows)
        load.tokens_per_s = None
        load.finish()
        samples.stop()
        verdict = load.judge.verdict
    before, slow_rows = samples.rows[first - 1], samples.rows[first:slow_ends]
    grew = {who: samples.most(f"{who}_mb", first) - before[f"{who}_mb"] for who in ("trainer", "engine")}
    waited = sum(row["begins_nothing"] for row in slow_rows) / len(slow_rows)
    bounded = waited > 0 if variant == "admission" else samples.most("spilled_mb") > 0
    return {
        "tokens_per_s": {"all taken": full, "a tenth taken": slow, "taken": taken / (minutes * 60)},
        "bound_mb": BOUND_MB,
        "grew_mb": grew,
        "most_mb": {name: samples.most(f"{name}_mb") for name in ("unacknowledged", "spilled", "held")},
        "share_of_time_without_a_beginning": waited,
        "bounded": bounded,
        "below_bound": all(mb < BOUND_MB for mb in grew.values()),
        "totals": asdict(verdict),
        "wrong": sum(verdict.faults.values()),
        "rows": samples.rows,
    }


def rest(load: Load, seconds: float) -> None:
    """Raises what made a thread of the load end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        load.check()
        time.sleep(_POLL_S)


def rate(engine: inflight.Engine, load: Load, seconds: float) -> float:
    """Tokens per second that the engine draws for so long."""
    began, before = time.monotonic(), engine.status().num_tokens
    rest(load, seconds)
    return (engine.status().num_tokens - before) / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("benchmarks/results/cpu/slow-consumer.json"))
    parser.add_argument("--minutes", type=float, default=5.0, help="how long each variant consumes slowly")
    parser.add_argument("--only", choices=VARIANTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for variant in [options.only] if options.only else VARIANTS:
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
            results[variant] = measure(variant, options.minutes, directory)
        shown = {name: value for name, value in results[variant].items() if name != "rows"}
        print(json.dumps({variant: shown}), flush=True)
    write_result(options.file, {"minutes": options.minutes, "variants": results})
    return any(r["wrong"] or not r["bounded"] or not r["below_bound"] for r in results.values())


if __name__ == "__main__":
    sys.exit(main())
