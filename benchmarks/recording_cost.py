"""What it costs to record a run: one run of GRPO, of which some steps are recorded and others are not.

    python benchmarks/recording_cost.py [FILE.json]

A recorder is open all the time and is told of two steps, then not of the next two, …; in the second half of a pair in
the other order, so that other work on the machine falls on both. `share` is the time that recording adds, as a share of
the time without it (median over pairs), and `interval` holds it with 95 % confidence (from ranks). `of_nothing` is the
same where the recorder is told of no step at all: how far from 0 the method strays by itself, which is far on a machine
with other work. `cpu_share` is what can be counted: the CPU time that is spent in the recorder, as a share of the time
of the recorded steps, and that of its two threads, which do not stop between them, as a share of all.
"""

import time
from collections.abc import Iterator, Mapping
from itertools import count, cycle
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import finish

import inflight
from inflight.bench.options import StalenessOptions
from inflight.bench.staleness import engine_and_trainer
from inflight.core import spans
from inflight.training.config import GRPOConfig
from inflight.training.grpo import Example, grpo

PAIRS, BLOCK, GROUPS, SAMPLES, TOKENS = 50, 2, 16, 4, 32
ORDER = (False, True, True, False, True, False, False, True)
"""Which blocks of a pair are recorded."""
WARMUP = 8


class Switched:
    """A logger that is a recorder in some blocks of steps, and notes how long the steps of a block take."""

    def __init__(self, recorder: "Recorder", *, records: bool):
        self._recorder, self._records = recorder, records
        self._blocks: Iterator[bool] = cycle(ORDER)
        self._recorded = False
        self._began_s = time.perf_counter()
        self.seconds: list[tuple[bool, float]] = []
        """Of each block: whether it was a recorded one, and its time."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A step ends."""
        if self._records and self._recorded:
            self._recorder.log(step, values)
        if (step - WARMUP) % BLOCK == 0 and step >= WARMUP:
            now_s = time.perf_counter()
            if step > WARMUP:
                self.seconds.append((self._recorded, now_s - self._began_s))
            self._recorded = next(self._blocks)
            self._recorder.listen(self._records and self._recorded)
            self._began_s = now_s

    def shares(self) -> list[float]:
        """What the recorded blocks took longer, as a share of the others, pair by pair, in rising order."""
        size, found = len(ORDER), []
        for begin in range(0, len(self.seconds), size):
            pair = self.seconds[begin : begin + size]
            with_it, without = (sum(time for recorded, time in pair if recorded is which) for which in (True, False))
            found.append(with_it / without - 1)
        return sorted(found)


class Recorder(inflight.RunRecorder):
    """A recorder that can be told nothing, and adds up the CPU time of who tells it something and of its threads."""

    told_s = threads_s = 0.0

    def listen(self, listens: bool) -> None:
        self._stop_listening()
        spans.stop_adding_up()
        if listens:
            spans.start_adding_up()
            self._meter.listener = self
            self._stream.observers.append(self._observe)

    def _run(self) -> None:
        super()._run()
        self.threads_s += time.thread_time()

    def _ask(self) -> None:
        super()._ask()
        self.threads_s += time.thread_time()


def counted(name: str) -> Any:
    method = getattr(inflight.RunRecorder, name)

    def call(self: Recorder, *arguments: Any) -> None:
        began = time.thread_time()
        try:
            method(self, *arguments)
        finally:
            self.told_s += time.thread_time() - began

    return call


for name in ("log", "published", "drawn", "swapped", "taken", "consumed", "_observe"):
    setattr(Recorder, name, counted(name))


def summary(shares: list[float]) -> dict[str, Any]:
    rank = len(shares) // 2 - round(1.96 * len(shares) ** 0.5 / 2)
    return {"share": median(shares), "interval": [shares[rank - 1], shares[-rank]]}


def main() -> None:
    steps = WARMUP + PAIRS * BLOCK * len(ORDER)
    sampling = inflight.SamplingParams(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True)
    config = GRPOConfig(steps=steps, groups_per_step=GROUPS, sampling=sampling)
    options = StalenessOptions(model="tiny", sequences=GROUPS * SAMPLES, tokens=TOKENS)
    with engine_and_trainer(options, slots=2, backend="inflight") as (engine, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        vocabulary = engine.info.vocab_size

        def run(*, records: bool) -> dict[str, Any]:
            """What recording adds to the steps of one run."""
            examples = (Example([index % vocabulary, 3], {}) for index in count())
            score = lambda rollout: float(rollout.token_ids.sum() % 3)  # noqa: E731
            began = time.perf_counter()
            with TemporaryDirectory() as directory, Recorder(engine, directory) as recorder:
                switched = Switched(recorder, records=records)
                for _ in grpo(engine, publisher, model, optimizer, examples, score, config, loggers=[switched]):
                    pass
            assert len(switched.seconds) == PAIRS * len(ORDER)
            recorded_s = sum(seconds for recorded, seconds in switched.seconds if recorded)
            cpu_share = recorder.told_s / recorded_s + recorder.threads_s / (time.perf_counter() - began)
            return summary(switched.shares()) | {"cpu_share": cpu_share}

        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
            of_nothing, found = run(records=False), run(records=True)
    result = {
        "bench": "recording_cost",
        "pairs": PAIRS,
        "steps": steps,
        "tokens_per_step": GROUPS * SAMPLES * TOKENS,
        **found,
        "of_nothing": of_nothing,
    }
    finish("recording-cost", result)


if __name__ == "__main__":
    main()
