"""Queue of a vLLM engine: waiting sequences, sequences that run in vLLM, and requests that vLLM must abort."""

from collections.abc import Iterator

from inflight.core.errors import InvalidRequestError
from inflight.engine.loop.backlog import Backlog
from inflight.engine.loop.order import by_priority
from inflight.engine.loop.sequence import UNPINNED, Sequence
from inflight.integrations.vllm_backend.columns import UNRECORDED, asked
from inflight.integrations.vllm_backend.sampling import refuse


class VllmScheduler:
    """Schedules sequences in order of priority, equal ones in order of arrival. vLLM gets only as many as it can run
    together, so that the others start under new weights when these go live."""

    def __init__(self, max_sequences: int, *, records_columns: bool):
        self._max_sequences, self._records_columns = max_sequences, records_columns
        self._backlog = Backlog(by_priority)
        """The waiting sequences in order. Finished sequences in it are skipped."""
        self.num_waiting = 0
        self.running: dict[str, Sequence] = {}
        """Maps vLLM's names of requests to their sequences."""
        self._names: dict[int, str] = {}
        """Maps request ids to those names."""
        self.salts: dict[int, int] = {}
        """Maps ids of unfinished requests to the version that is part of their key in the prefix cache."""
        self._given_up: list[str] = []
        """vLLM's names of requests to abort."""
        self.admits = True
        """True if new sequences can start."""

    def check(self, name: str, sequence: Sequence) -> None:
        refuse(name, sequence)
        if not self._records_columns and (columns := asked(sequence.params)):
            raise InvalidRequestError(f"{name} asks for {', '.join(columns)}: {UNRECORDED}")

    def add(self, leader: Sequence) -> None:
        for sequence in (leader, *leader.followers):
            self._backlog.wait(sequence)
        self.num_waiting += 1 + len(leader.followers)
        self._backlog.unfinished[leader.pin] += 1 + len(leader.followers)
        leader.followers = []

    def fork(self, parent: Sequence, leader: Sequence) -> None:
        """Add a fork. It finds its parent's blocks in the prefix cache, by the version at the parent's start."""
        salt = self.salts.get(parent.request_id)
        if salt is not None:
            self.salts |= {s.request_id: salt for s in (leader, *leader.followers)}
        self.add(leader)

    def remove(self, sequence: Sequence) -> None:
        self._backlog.end(sequence)
        self.salts.pop(sequence.request_id, None)
        name = self._names.pop(sequence.request_id, None)
        if name is None:
            self.num_waiting -= 1
        elif self.running.pop(name, None) is not None:
            self._given_up.append(name)

    def unprotect(self, group_id: int) -> None:
        """Do nothing: vLLM decides which blocks to evict."""

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    @property
    def held_back(self) -> bool:
        """Return True if only new prompts are left, and `admits` forbids them."""
        return not self.running and self.num_waiting > 0 and self._startable() is None

    def advance(self, weights: int, adapters: int) -> Iterator[tuple[str, Sequence, int]]:
        """Yield sequences for vLLM to start now: the name of each, and the version whose blocks it can reuse. The
        weights are live since version `weights`, and with the adapters since version `adapters`."""
        while len(self.running) < self._max_sequences and (sequence := self._startable()) is not None:
            self._backlog.pop(sequence)
            self.num_waiting -= 1
            live = weights if sequence.adapter is None else adapters
            salt = self.salts.setdefault(sequence.request_id, live)
            name = f"{sequence.request_id}-{salt}-{len(sequence.tokens)}"
            self._names[sequence.request_id] = name
            self.running[name] = sequence
            yield name, sequence, salt

    def send_back(self, names: list[str]) -> None:
        """Return sequences that vLLM has not started, or whose results it drops, to the head of the queue. They start
        again under the weights that are live then."""
        for name in reversed(names):
            sequence = self.running.pop(name)
            del self._names[sequence.request_id], self.salts[sequence.request_id]
            self._backlog.wait(sequence, in_front=True)
            self.num_waiting += 1
            self._given_up.append(name)

    def take_given_up(self) -> list[str]:
        """Return vLLM's names of requests to abort, once."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _startable(self) -> Sequence | None:
        """Return the first waiting sequence, or None if there is none or it is not allowed to start."""
        return self._backlog.first((UNPINNED,), only_started=not self.admits)
