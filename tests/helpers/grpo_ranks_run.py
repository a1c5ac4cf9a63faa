"""A rank of `grpo` with an engine: python grpo_ranks_run.py RANK SIZE STORE DIRECTORY VERB

learn STEPS: prints the rewards of a tiny model that learns to answer with digits. episodes STEPS: the same, in the
second of two turns.
begin: saves a checkpoint after step 2; rank 1 kills itself after step 3. collective: it kills itself in a forward pass
of step 4. batches: rank 1 asks for batches, and kills itself. resume: continues until step 6. They print the reports
and the error that ended the run.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.errors import RankLostError
from inflight.engine.model.shapes import shape_config
from inflight.training.grpo import Example

SAMPLING = inflight.SamplingParams(n=8, max_tokens=12)


def digits(rollout: inflight.Rollout) -> float:
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


def make_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)


def launch(**options: Any) -> inflight.Engine:
    return inflight.launch("tiny", device="cpu", dtype="float32", threads=1, max_sequences=32, **options)


async def two_turns(session: inflight.Session, row: str) -> float:
    first = await session.complete(list(row.encode()), max_tokens=2)
    second = await session.complete([*row.encode(), *first.token_ids, ord("=")])
    return sum(chr(token).isdigit() for token in second.token_ids) / len(second.token_ids)


def learn(steps: int, *, in_episodes: bool) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = inflight.GRPOConfig(steps=steps, groups_per_step=4, sampling=SAMPLING, schedule="sync")
    prompts = (f"Number {index}: " for index in count())
    with launch() as engine, engine.publisher(model) as publisher, inflight.Episodes(engine, two_turns) as episodes:
        drawing, score = (episodes, None) if in_episodes else (engine, digits)
        reports = inflight.grpo(drawing, publisher, model, optimizer, prompts, score, config)
        print(json.dumps([report.reward for report in reports]), flush=True)


def train(rank: int, directory: Path, verb: str) -> None:
    model, resumes = make_model(), verb == "resume"
    if resumes:
        model.load_state_dict(torch.load(directory / "model.pt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = inflight.GRPOConfig(steps=6, groups_per_step=3, sampling=SAMPLING, probe_every=2)
    examples = (Example(f"Number {index}: ", {"index": index}) for index in count())
    reports, error = [], ""
    with launch(slots=3) as engine, engine.publisher(model) as publisher:
        evaluation = inflight.Evaluation(engine, ["Held out: "], digits, every=2)
        loggers = [inflight.JsonLines(directory / "steps.jsonl")] if rank == 0 else []
        run = inflight.Run(engine, publisher)
        if resumes:
            run.load(directory)
        if rank == 1 and verb == "batches":
            with suppress(inflight.InflightError):
                next(engine.stream.batches(rollouts=8, score=digits))
            os.kill(os.getpid(), signal.SIGKILL)
        given = {"run": run, "evaluation": evaluation, "loggers": loggers}
        try:
            for report in inflight.grpo(engine, publisher, model, optimizer, examples, digits, config, **given):
                taken = sorted({rollout.metadata["index"] for rollout in report.rollouts})
                numbers = {name: round(number, 9) for name, number in report.as_dict().items()}
                reports.append([report.step, taken, numbers, run.progress["grpo"]])
                if not resumes and report.step == 2:
                    if rank == 0:
                        torch.save(model.state_dict(), directory / "model.pt")
                    run.save(directory)
                if report.step == 3 and rank == 1 and verb == "begin":
                    os.kill(os.getpid(), signal.SIGKILL)
                if report.step == 3 and rank == 1 and verb == "collective":
                    model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        except RankLostError as lost:
            error = str(lost)
        results = [[result.step, result.version, result.reward] for result in evaluation.results]
        print(json.dumps([reports, error, results]), flush=True)
        if error:
            os._exit(0)


def main(rank: int, size: int, store: str, directory: str, verb: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if verb.startswith(("learn", "episodes")):
        learn(int(verb.split()[1]), in_episodes=verb.startswith("episodes"))
    else:
        train(rank, Path(directory), verb)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
