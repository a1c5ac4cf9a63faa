"""Ranks of `grpo` on the CPU: python grpo_ranks.py OUT SIZE...

Starts trainers of this many ranks, one after another, and runs the cases of `rank_cases.py` in each. Every rank writes
its results to OUT/SIZE-RANK.pt.
"""

import multiprocessing
import sys
from datetime import timedelta
from typing import Any

import bigram_run
import rank_cases
import torch
import torch.distributed as dist
from bigram_run import Bigram, FakeEngine, Run
from rank_cases import CASES, WRAPPED, error_of, run_case, spread, wrapped

import inflight.training.objective.loss
import inflight.training.objective.probe
import inflight.training.reference
import inflight.training.step
import inflight.training.teacher
from inflight.core.options import EngineOptions
from inflight.fleet.ranks.attached import AttachedEngine, FollowingPublisher
from inflight.fleet.ranks.sharing import RankSharing
from inflight.fleet.ranks.store import store_of_trainer


def token_logprobs(*call: Any) -> torch.Tensor:
    return bigram_run.score_tokens(*call).logprobs


for module in (inflight.training.reference, inflight.training.step, inflight.training.objective.probe):
    module.token_logprobs = token_logprobs  # pyright: ignore
for scoring in (inflight.training.teacher, inflight.training.objective.loss):
    scoring.score_tokens = bigram_run.score_tokens  # pyright: ignore


class Kept:
    """A logger."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, values: Any) -> None:
        self.steps.append(step)


class Rank:
    """One rank, whose engine all cases share."""

    def __init__(self, rank: int):
        self.rank, store = rank, store_of_trainer(60.0)
        assert store is not None
        options = EngineOptions("tiny", rank_timeout_s=60.0)
        self.shared: Any = AttachedEngine(store, options) if rank else RankSharing(store, options, lambda prompts: [])

    def handles(self, **options: Any) -> dict[str, Any]:
        """The engine and the publisher of a run."""
        if self.rank:
            return {"engine": self.shared, "publisher": FollowingPublisher(10, None)}
        engine: Any = FakeEngine(**options)
        engine.sharing = self.shared
        return {"engine": engine, "publisher": engine}

    def run(self, name: str, wrapper: str) -> dict[str, Any]:
        kept = Kept()
        waits = CASES[name]().get("train_as_they_finish") and self.rank == 0
        handles = self.handles(waits=rank_cases.sometimes()) if waits else self.handles()
        given = {"rank": self.rank, "bad_rank": dist.get_world_size() - 1, "loggers": [kept]}
        return run_case(name, wrapper=wrapper, **handles, **given) | {"logged": kept.steps}

    def errors(self) -> dict[str, str]:
        """Errors that all ranks raise."""
        last = dist.get_world_size() - 1

        def spoil(model: Bigram, count: int) -> Any:
            def on_step(report: Any) -> None:
                if report.step == count and self.rank == last:
                    model.table.data[0, 0] = torch.nan

            return on_step

        model, seed = Bigram(), 5 if self.rank == last else 0
        return {
            "weights": error_of(lambda: Run(**self.handles(), model=model, on_step=spoil(model, 1), steps=5)),
            "other weights": error_of(lambda: Run(**self.handles(), model=Bigram(seed))),
            "other options": error_of(lambda: Run(**self.handles(), micro_batch_tokens=30 + seed)),
            "ranked tokens": error_of(lambda: Run(**self.handles(), objective="m2po")),
            "sharded probe": error_of(lambda: Run(**self.handles(), model=wrapped(Bigram(), "fsdp2"), probe_every=1)),
            "spread": error_of(lambda: Run(**self.handles(), model=spread(Bigram()))),
            "score": error_of(lambda: Run(**self.handles(), score=_fail)),
            "demonstrations": error_of(lambda: Run(**self.handles(), demonstrations=self.demonstrations())),
        }

    def demonstrations(self) -> list[Any]:
        """Demonstrations, of which rank 0 has none for the second step."""
        return rank_cases.demonstrations()[: 1 if self.rank == 0 else None]


def _fail(rollout: Any) -> float:
    raise inflight.core.errors.ScoreError("the judge is ill")


def main(rank: int, size: int, ports: Any, out: str) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        for _ in range(size - 1):
            ports.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ports.get(), size, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    this = Rank(rank)
    cases = [(name, "plain") for name in CASES]
    cases += [(name, wrapper) for wrapper in ("ddp", "fsdp2") for name in WRAPPED]
    results: dict[Any, Any] = {case: this.run(*case) for case in cases}
    results["errors"] = this.errors()
    torch.save(results, f"{out}/{size}-{rank}.pt")
    dist.barrier()
    this.shared.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    for size in map(int, sys.argv[2:]):
        ports = context.SimpleQueue()
        ranks = [context.Process(target=main, args=(rank, size, ports, sys.argv[1])) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"of {size} ranks, these ended: {[process.exitcode for process in ranks]}")
