"""What it costs to record a run: a GRPO loop with a recorder and without one, in alternation, in one process.

    python benchmarks/recording_cost.py [FILE.json]

"ratio" is the median over pairs of neighbours of the time without a recorder over that with one: 1 costs nothing, 0.99
one percent. What moves it on a machine like this is mostly other work, so "recording_share" says besides what of the
time of the recorded loops was spent in the recorder, its thread included, by the clocks of these threads' own CPU time.
"""

import time
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import finish, median_ratio

import inflight
from inflight.bench.options import StalenessOptions
from inflight.bench.staleness import engine_and_trainer
from inflight.training.config import GRPOConfig
from inflight.training.grpo import Example, grpo

PAIRS, STEPS, GROUPS, SAMPLES, TOKENS = 24, 30, 16, 4, 32


class Timed(inflight.RunRecorder):
    """A recorder that adds up the CPU time of whoever is in it."""

    spent_s = 0.0


def timed(name: str) -> Any:
    method = getattr(inflight.RunRecorder, name)

    def call(self: Timed, *arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return method(self, *arguments)
        finally:
            self.spent_s += time.thread_time() - began

    return call


for name in ("log", "published", "drawn", "swapped", "taken", "consumed", "_observe", "_run", "_ask"):
    setattr(Timed, name, timed(name))


def main() -> None:
    options = StalenessOptions(model="tiny", sequences=GROUPS * SAMPLES, tokens=TOKENS)
    sampling = inflight.SamplingParams(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True)
    config = GRPOConfig(steps=STEPS, groups_per_step=GROUPS, sampling=sampling)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    spent_s = 0.0
    with engine_and_trainer(options, slots=2, backend="inflight") as (engine, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        vocabulary = engine.info.vocab_size

        def run(*loggers: inflight.RunRecorder) -> float:
            examples = (Example([index % vocabulary, 3], {}) for index in count())
            began = time.perf_counter()
            score = lambda rollout: float(rollout.token_ids.sum() % 3)  # noqa: E731
            for _ in grpo(engine, publisher, model, optimizer, examples, score, config, loggers=loggers):
                pass
            return time.perf_counter() - began

        with engine.publisher(model) as publisher, TemporaryDirectory() as directory:
            engine.wait_for_version(publisher.publish())
            run()  # kernels are compiled
            for pair in range(PAIRS):
                for recording in (False, True) if pair % 2 else (True, False):
                    if not recording:
                        seconds[False].append(run())
                        continue
                    with Timed(engine, directory) as recorder:
                        seconds[True].append(run(recorder))
                    spent_s += recorder.spent_s
    finish(
        "recording-cost",
        {
            "bench": "recording_cost",
            "pairs": PAIRS,
            "steps": STEPS,
            "tokens_per_step": GROUPS * SAMPLES * TOKENS,
            "seconds_without": seconds[False],
            "seconds_with": seconds[True],
            "ratio": median_ratio(seconds[False], seconds[True]),
            "recording_share": spent_s / sum(seconds[True]),
            "recording_ms_per_step": 1000 * spent_s / (PAIRS * STEPS),
        },
    )


if __name__ == "__main__":
    main()
