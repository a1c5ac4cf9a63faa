"""A trainer that is killed while episodes are in progress, and a check of its results.

    python tests/helpers/killed_trainer.py MODEL DIRECTORY ATTEMPT [finish]

It plays episodes of three turns of two policies with a tool and an environment, publishes after every step, and saves
after every second step. It continues the newest save in the directory. With `finish` it submits no further rows. It
notes all events in a journal, which survives it.
"""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from policies import NAMES, Policies

import inflight
from inflight.run import _read

PARAMS = inflight.SamplingParams(n=2, max_tokens=7, ignore_eos=True)
TURNS = (*NAMES, NAMES[0])
GROUPS_IN_FLIGHT, GROUPS_PER_STEP, STEPS_PER_SAVE = 6, 2, 2
RANDOM_TOKENS = 2


class Journal:
    """Lines of JSON. Each line is written at once."""

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *event: Any) -> None:
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def events(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.path.read_bytes().split(b"\n")[:-1]]


def ask(group_id: int, sample: int, turn: int) -> list[int]:
    """A tool whose result differs from call to call."""
    JOURNAL.note("called", group_id, sample, turn)
    return [byte % 100 for byte in os.urandom(RANDOM_TOKENS)]


class Count:
    """An environment whose state is a number."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> int:
        self.number += 1
        return self.number

    def save(self) -> int:
        return self.number

    def load(self, state: int) -> None:
        self.number = state


async def play(session: Any, row: list[int]) -> float:
    tokens, env = list(row), Count()
    for turn, policy in enumerate(TURNS):
        place = session.group_id, session.sample, turn
        reply = await session.complete(tokens, adapter=policy)
        JOURNAL.note("drawn", *place, reply.token_ids)
        answer = await session.call(ask, *place)
        JOURNAL.note("returned", *place, answer)
        tokens += [*reply.token_ids, *answer, await session.call(env.count)]
    return 1.0


def set_weights(policies: Policies, attempt: int, version: int) -> None:
    """Give the policies the weights of a version, which differ from attempt to attempt."""
    policies.random.manual_seed(1000 * version + attempt)
    policies.change(*NAMES)


def published_at(version: int) -> tuple[str, ...]:
    """Names of the policies that a version publishes."""
    return NAMES if version == 1 else (NAMES[version % 2],)


def newest_save(directory: Path) -> int:
    return max((int(path.parent.name) for path in directory.glob("saves/*/run.inflight")), default=0)


def main(model: str, directory: Path, attempt: int, finishes: bool) -> None:
    torch.set_num_threads(1)
    policies, state = Policies(), {"trained": [], "submitted": 0, "step": 0}
    options = {"lora_rank": 4, "adapters": NAMES, "kv_on_swap": "recompute", "max_sequences": 8, "max_context": 128}
    with (
        inflight.launch(model, device="cpu", threads=1, **options) as engine,
        engine.publisher(policies.model) as publisher,
        inflight.Episodes(engine, play, prefix_across_versions=0) as episodes,
    ):
        run = inflight.Run(engine, publisher)
        newest = {name: {} for name in NAMES}
        if number := newest_save(directory):
            saved = directory / "saves" / str(number)
            newest = torch.load(saved / "policies.pt")
            for name, weights in newest.items():
                for key, value in weights.items():
                    policies.own[name][key].data.copy_(value)
            run.load(saved)
            state = run.progress
            JOURNAL.note("loaded", number)
            episodes.continue_saved()
        run.progress = state
        while True:
            version = publisher.version + 1
            publisher.wait_copied()
            set_weights(policies, attempt, version)
            names = published_at(version)
            publisher.publish(adapter=None if version == 1 else names[-1])
            JOURNAL.note("published", version, attempt)
            for name in names:
                newest[name] = {key: value.detach().clone() for key, value in policies.own[name].items()}
            if version == 1:
                engine.wait_for_version(1)  # The check needs the weights of every token.
            while not finishes and state["submitted"] - len(state["trained"]) < GROUPS_IN_FLIGHT:
                row = state["submitted"]
                episodes.submit([[1, 2, row % 50]], PARAMS, metadata=[{"row": row}])
                state["submitted"] += 1
            left = min(GROUPS_PER_STEP, state["submitted"] - len(state["trained"]))
            groups = [next(engine.stream.groups()) for _ in range(left)]
            state["step"] += 1
            (directory / f"step-{state['step']}.pickle").write_bytes(pickle.dumps(groups))
            state["trained"] += [group[0].metadata["row"] for group in groups]
            ends = finishes and len(state["trained"]) == state["submitted"]
            if state["step"] % STEPS_PER_SAVE == 0 or ends:
                number += 1
                saved = directory / "saves" / str(number)
                saved.mkdir(parents=True, exist_ok=True)
                torch.save(newest, saved / "policies.pt")
                JOURNAL.note("saving", number)
                run.save(saved)
                JOURNAL.note("saved", number, {name: episodes.counts[f"{name} before"] for name in COUNTED})
            if ends:
                return


COUNTED = ("turns drawn", "calls made")


def check(directory: Path) -> None:
    """Assert that the surviving steps contain every row once, with the tokens that were drawn before the saves, and
    that no tool was called again whose result was saved."""
    kept: list[list[Any]] = []
    saving_at: dict[int, int] = {}
    before = dict.fromkeys(COUNTED, 0)
    for event in Journal(directory / "journal").events():
        if event[0] == "saving":
            saving_at[event[1]] = len(kept)
        elif event[0] == "saved":
            before = {name: max(before[name], event[2][name]) for name in COUNTED}
        elif event[0] == "loaded":
            del kept[saving_at[event[1]] :]  # Later events are lost with the killed process.
        kept.append(event)
    assert min(before.values()) > 0, "no episode has continued"

    drawn: dict[tuple[int, ...], list[int]] = {}
    returned: dict[tuple[int, ...], list[int]] = {}
    policies = Policies()
    for kind, *event in kept:
        place = tuple(event[:3])
        if kind == "drawn":
            assert drawn.setdefault(place, event[3]) == event[3], "drawn again"
        elif kind == "returned":
            assert returned.setdefault(place, event[3]) == event[3], "another result"
        elif kind == "called":
            assert place not in returned, "called again"
        elif kind == "published":
            version, attempt = event
            set_weights(policies, attempt, version)
            policies.note(version, *published_at(version))

    run = _read(directory / "saves" / str(newest_save(directory)) / "run.inflight")[0].progress
    assert sorted(run["trained"]) == list(range(run["submitted"])), "a row was not trained exactly once"
    steps = [pickle.loads((directory / f"step-{step}.pickle").read_bytes()) for step in range(1, run["step"] + 1)]
    groups = [group for step in steps for group in step]
    assert [group[0].metadata["row"] for group in groups] == run["trained"]
    rollouts = [rollout for group in groups for rollout in group]
    assert len({(rollout.group_id, rollout.sample, rollout.adapter) for rollout in rollouts}) == len(rollouts)
    assert len(rollouts) == len(groups) * PARAMS.n * len(NAMES)
    of_place = {(rollout.group_id, rollout.sample, rollout.adapter): rollout for rollout in rollouts}
    for group in groups:
        for sample in range(PARAMS.n):
            first, second = (of_place[group[0].group_id, sample, name] for name in NAMES)
            tokens = first.prompt_token_ids.tolist()
            for turn in range(len(TURNS)):
                place = group[0].group_id, sample, turn
                tokens += drawn[place]
                if turn < len(TURNS) - 1:
                    tokens += [*returned[place], turn + 1]
                if turn == 1:
                    assert [*second.prompt_token_ids, *second.token_ids] == tokens[: -RANDOM_TOKENS - 1]
            assert [*first.prompt_token_ids, *first.token_ids] == tokens
    policies.check(rollouts)


if __name__ == "__main__":
    JOURNAL = Journal(Path(sys.argv[2]) / "journal")
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), "finish" in sys.argv)
