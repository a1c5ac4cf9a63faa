"""Measures the time that a faulty scorer costs: it takes 1 s per sample, raises for 1 % of them and hangs for 1 %.

    python benchmarks/faulty_scorer.py [FILE]

`inflight.grpo` trains a tiny model with this scorer and with one that has no faults, in alternation. A hash of the
sample decides its fault. `time_lost` is the median over pairs of the seconds of the faulty run / the seconds of the
other one − 1, without the first steps. The script ends with an error if a sample is lost or doubled, if a
sample without a score is trained on, or if faults are not counted by name.
"""

import asyncio
import tempfile
from collections import Counter
from itertools import count
from typing import Any

import torch
from harness import finish, median_ratio, small_llama

import inflight
from inflight.training.report import StepReport
from inflight.training.schedules import Example

PAIRS, STEPS, FIRST = 3, 120, 60
"""Pairs of runs, and the optimizer steps of a run. The first steps are not measured."""
GROUPS, SAMPLES, TOKENS, VOCABULARY = 16, 8, 16, 64
SCORE_S, TIMEOUT_S = 1.0, 2.0
SAMPLING = inflight.SamplingParams(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True)


def fault_of(row: int, sample: int) -> str:
    """Return "raises" for 1 % of the samples, "hangs" for 1 %, and "" for the others."""
    return {0: "raises", 1: "hangs"}.get((row * SAMPLES + sample) * 2654435761 % 2**32 % 100, "")


async def score(rollout: inflight.Rollout) -> float:
    await asyncio.sleep(SCORE_S)
    return float((rollout.token_ids % 2 == 0).mean())


async def faulty_score(rollout: inflight.Rollout) -> float:
    fault = fault_of(rollout.metadata["row"], rollout.sample)
    if fault == "hangs":
        await asyncio.Event().wait()
    reward = await score(rollout)
    if fault == "raises":
        raise ValueError("this sample has no score")
    return reward


def train(engine: inflight.Engine, seed: int, *, faulty: bool) -> dict[str, Any]:
    model = small_llama(VOCABULARY, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = inflight.GRPOConfig(steps=STEPS, groups_per_step=GROUPS, sampling=SAMPLING)
    examples = (Example([row % VOCABULARY, 1], metadata={"row": row}) for row in count())
    scorer = inflight.Scorer(faulty_score if faulty else score, timeout_s=TIMEOUT_S, workers=10_000)
    trained: Counter[tuple[int, int]] = Counter()
    reports: list[StepReport] = []
    with engine.publisher(model) as publisher:
        for report in inflight.grpo(engine, publisher, model, optimizer, examples, scorer, config):
            reports.append(report)
            trained.update((rollout.metadata["row"], rollout.sample) for rollout in report.rollouts)
    rows, last = {row for row, _ in trained}, reports[-1]
    left_out = Counter(fault_of(row, sample) for row in rows for sample in range(SAMPLES) if not trained[row, sample])
    return {
        "seed": seed,
        "seconds": round((last.finished_ns - reports[FIRST].finished_ns) / 1e9, 3),
        "reward": round(last.reward, 3),
        "samples": trained.total(),
        "samples_doubled": trained.total() - len(+trained),
        "samples_lost": left_out[""] + (STEPS * GROUPS - len(rows)) * SAMPLES,
        "samples_left_out": {"raises": left_out["raises"], "hangs": left_out["hangs"]},
        "faulty_samples_trained": sum(fault_of(*place) != "" for place in +trained),
        "failures": last.failures,
        "wait_share": round(last.as_dict().get("lead/wait_share", 0.0), 4),
    }


def check(run: dict[str, Any], *, faulty: bool) -> None:
    """Raise AssertionError if a sample was lost or doubled, or was trained on without a score."""
    left_out, failures = run["samples_left_out"], run["failures"]
    assert run["samples_doubled"] == run["samples_lost"] == 0, run
    if faulty:
        assert run["faulty_samples_trained"] == 0 < min(left_out.values()), run
        # Samples of groups that no step has taken were scored, too.
        assert failures["error: ValueError"] >= left_out["raises"], run
        assert failures["error: TimeoutError"] >= left_out["hangs"], run


def main() -> None:
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, Any]]] = {"right": [], "faulty": []}
    with tempfile.TemporaryDirectory() as directory:
        small_llama(VOCABULARY, 0).save_pretrained(directory)
        with inflight.launch(directory, threads=1, max_context=32, max_sequences=256) as engine:
            for pair in range(PAIRS):
                for kind in ("right", "faulty") if pair % 2 == 0 else ("faulty", "right"):
                    runs[kind].append(run := train(engine, pair, faulty=kind == "faulty"))
                    print(kind, run, flush=True)
                    check(run, faulty=kind == "faulty")
    seconds = {kind: [run["seconds"] for run in each] for kind, each in runs.items()}
    lost = median_ratio(seconds["faulty"], seconds["right"]) - 1
    finish(
        "faulty-scorer", {"score_s": SCORE_S, "timeout_s": TIMEOUT_S, "steps": STEPS, "time_lost": lost, "runs": runs}
    )


if __name__ == "__main__":
    main()
