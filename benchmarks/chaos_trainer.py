"""The trainer of chaos.py: it keeps a load running, judges what comes out and obeys what it reads.

    python benchmarks/chaos_trainer.py MODEL SEED RESTARTS [MISTAKE]

It reads lines: `idle SECONDS` (consume nothing), `drop` (break the connection of the stream) and `stop` (finish what is
in flight and end). It writes a line of JSON every half second with what was found so far, and one whenever a process
draws its first token. A MISTAKE is one that it makes on purpose, which the judge has to find.
"""

import itertools
import json
import logging
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import zmq
from truth_load import Load

import inflight
from inflight.core.clock import now_ns
from inflight.core.frames import TokenFrame
from inflight.stream.assignments import Assignments
from inflight.stream.group_table import State
from inflight.stream.token_store import TokenStore
from inflight.stream.unfinished import UnfinishedGroup

GROUPS = 24
PUBLISH_EVERY_S = 0.05
ANSWER_TIMEOUT_S = 3.0
_REPORT_S, _POLL_S = 0.5, 0.005


class Commands(threading.Thread):
    """Obeys the commands, until `stop` or the end of what writes them."""

    def __init__(self, engine: inflight.Engine, load: Load):
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self._load, self._fleet = load, engine._fleet
        self._drop = False
        ledger = engine.stream.ledger
        self._on_frame, ledger.frames.on_frame = ledger.frames.on_frame, self._drop_connection

    def run(self) -> None:
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "stop":
                break
            if command == "idle":
                self._load.idle_s = float(rest[0])
            else:
                self._drop = True
        self.stopping.set()

    def _drop_connection(self, frame: TokenFrame) -> None:
        """Called by the thread that reads the stream, which alone may touch its socket."""
        if self._drop:
            self._drop = False
            frames = self._fleet.members[0].frames
            assert frames is not None
            reader = frames.reader
            assert reader is not None
            endpoint = reader.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            reader.socket.disconnect(endpoint)
            reader.socket.connect(endpoint)
        self._on_frame(frame)


def report(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def tell_successors(engine: inflight.Engine) -> None:
    """Say when each process of the engine draws its first token."""
    pid = 0
    while True:
        if engine.pid != pid:
            pid, num_tokens = engine.pid, engine.stream.num_tokens
            while engine.stream.num_tokens == num_tokens and engine.pid == pid:
                time.sleep(_POLL_S)
            if engine.pid == pid:
                report(pid=pid, draws_at_ns=now_ns())
        time.sleep(_POLL_S)


def forget_a_token() -> None:
    """A successor goes on without the last token of a request."""
    drawn = UnfinishedGroup.drawn

    def forgetful(group: UnfinishedGroup) -> dict[int, list[int]]:
        known = drawn(group)
        if tokens := next((tokens for tokens in known.values() if tokens), None):
            tokens.pop()
        return known

    patch.object(UnfinishedGroup, "drawn", forgetful).start()


def forget_a_group() -> None:
    """A successor is not given a group."""
    unassign = Assignments.unassign

    def forgetful(engines: Assignments, *arguments: Any) -> int:
        with engines._table.lock:
            num_left = unassign(engines, *arguments)
            if engines.unassigned:
                engines.unassigned[-1].state = State.DRAWING
            return num_left

    patch.object(Assignments, "unassign", forgetful).start()


def state_another_version() -> None:
    """Every hundredth frame states the version before its own."""
    append, count = TokenStore.append, itertools.count(1)

    def mistaken(store: TokenStore, rows: Any, version: int, *rest: Any) -> None:
        append(store, rows, version - (next(count) % 100 == 0), *rest)

    patch.object(TokenStore, "append", mistaken).start()


MISTAKES = {function.__name__: function for function in (forget_a_token, forget_a_group, state_another_version)}


def main(model: str, seed: str, restarts: str, *mistakes: str) -> None:
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    for mistake in mistakes:
        MISTAKES[mistake]()
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_sequences": 12}
    options |= {"max_context": 256, "restarts": int(restarts), "answer_timeout_s": ANSWER_TIMEOUT_S}
    column = f"{Path(__file__).with_name('small_stream.py')}:nothing"
    with inflight.launch(model, **options, columns=(column,)) as engine:
        load = Load(engine, seed=int(seed), groups=GROUPS, publish_every_s=PUBLISH_EVERY_S)
        commands = Commands(engine, load)
        commands.start()
        threading.Thread(target=tell_successors, args=(engine,), daemon=True).start()
        while not commands.stopping.wait(_REPORT_S):
            load.check()
            report(verdict=asdict(load.judge.verdict))
        load.finish()
    report(verdict=asdict(load.judge.verdict), ended=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
