"""The requests of an engine: who is unfinished, and what frames have to tell of who came and ended."""

import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from inflight.core.errors import InvalidRequestError
from inflight.core.frames import Finish, GroupStart
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.limits import Limits, check_prompt
from inflight.engine.order import check_order
from inflight.engine.sampler import sample_seed
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Sequence
from inflight.weights.slot_table import SlotTable

MAX_REQUESTS_PER_SUBMIT = 65536
"""One prompt may ask for as many. Accepting them takes about a second, in which there is no forward pass."""


class Requests:
    """Makes a sequence for each sample of a prompt, and hands it to the scheduler until it ends."""

    def __init__(self, scheduler: Scheduler, slot_table: SlotTable, limits: Limits, *, forks_share: bool):
        """forks_share: forks hold the blocks of their parents, and compute their tokens again where they do not."""
        self._scheduler, self._slot_table, self._limits = scheduler, slot_table, limits
        self._forks_share = forks_share
        self.unfinished: dict[int, Sequence] = {}
        """Maps request ids to sequences."""
        self._groups: dict[int, set[int]] = {}
        """Maps group ids to the ids of unfinished requests."""
        self.next_group_id = 0
        self._next_request_id = 0
        self._starts: list[GroupStart] = []
        self._finishes: list[Finish] = []

    @property
    def has_news(self) -> bool:
        """Groups have come, or requests ended, of which no frame has told yet."""
        return bool(self._starts or self._finishes)

    def take_news(self) -> tuple[list[GroupStart], list[Finish]]:
        """The groups that came and the requests that ended since the last call."""
        news, self._starts, self._finishes = (self._starts, self._finishes), [], []
        return news

    def submit(self, prompts: Seq[Prompt]) -> list[int]:
        """Queue prompts and return a group id for each; all are accepted or none. Raises InvalidRequestError."""
        total = sum(prompt.params.n for prompt in prompts)
        if total > MAX_REQUESTS_PER_SUBMIT:
            raise InvalidRequestError(
                f"{total} samples in one call; submit at most {MAX_REQUESTS_PER_SUBMIT} at a time"
            )
        for index, prompt in enumerate(prompts):
            self._check(f"prompt {index}", prompt)
        return [self._accept(prompt) for prompt in prompts]

    def fork(
        self, request_id: int, at: int | None, params: SamplingParams | None, metadata: Mapping[str, Any] | None
    ) -> int:
        """Start a group that goes on from an unfinished request, as `Engine.fork` says."""
        parent = self.unfinished.get(request_id)
        if parent is None:
            raise InvalidRequestError(
                f"request {request_id} is not unfinished; submit its prompt and tokens as a new prompt instead"
            )
        at = len(parent.tokens) if at is None else at
        if not 0 <= at <= len(parent.tokens):
            raise InvalidRequestError(
                f"request {request_id} has drawn {len(parent.tokens)} tokens, cannot fork at {at}"
            )
        params = params or msgspec.structs.replace(parent.params, seed=None)
        prompt = Prompt(parent.prompt + parent.tokens[:at], params, dict(metadata or {}), parent.pin, parent.adapter)
        self._check("the fork", prompt)
        return self._accept(prompt, forked_from=(parent, at))

    def cancel(self, group_ids: Seq[int], request_ids: Seq[int]) -> None:
        """End every unfinished request of these groups, and these requests; what ended already is left alone."""
        wanted = {i for i in request_ids if i in self.unfinished}
        for group_id in group_ids:
            wanted |= self._groups.get(group_id, set())
        for request_id in sorted(wanted, reverse=True):  # a leader after its followers, so that none takes its place
            self.finish(self.unfinished[request_id], "cancelled")

    def finish(self, sequence: Sequence, reason: str) -> None:
        """A request has ended."""
        self._scheduler.remove(sequence)
        if sequence.pin is not None:
            self._slot_table.unpin(sequence.pin)
        del self.unfinished[sequence.request_id]
        members = self._groups[sequence.group_id]
        members.remove(sequence.request_id)
        if not members:
            del self._groups[sequence.group_id]
        self._finishes.append(Finish(sequence.request_id, reason, len(sequence.tokens)))

    def _check(self, name: str, prompt: Prompt) -> None:
        check_prompt(name, prompt, self._limits, self._slot_table)
        check_order(name, self._scheduler.order, self._sequence(prompt, 0, 0))

    def _accept(self, prompt: Prompt, forked_from: tuple[Sequence, int] | None = None) -> int:
        params = prompt.params
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        leader, *followers = (self._sequence(prompt, sample, seed) for sample in range(params.n))
        leader.followers = followers
        group_id, first = leader.group_id, leader.request_id
        self.next_group_id += 1
        self._next_request_id += params.n
        self._groups[group_id] = set(range(first, first + params.n))
        self.unfinished |= {s.request_id: s for s in (leader, *followers)}
        if leader.pin is not None:
            self._slot_table.pin(leader.pin, params.n)
        if forked_from is not None and self._forks_share:
            self._scheduler.fork(forked_from[0], leader)
        else:
            self._scheduler.add(leader)
        origin = (forked_from[0].request_id, forked_from[1]) if forked_from else None
        seeded = msgspec.structs.replace(params, seed=seed)
        self._starts.append(GroupStart(group_id, first, prompt.token_ids, seeded, prompt.metadata, origin))
        return group_id

    def _sequence(self, prompt: Prompt, sample: int, seed: int) -> Sequence:
        """One sample of a prompt that is accepted next."""
        return Sequence(
            request_id=self._next_request_id + sample,
            group_id=self.next_group_id,
            sample=sample,
            seed=sample_seed(seed, sample),
            prompt=prompt.token_ids,
            params=prompt.params,
            max_tokens=min(prompt.params.max_tokens, self._limits.max_context - len(prompt.token_ids)),
            adapter=prompt.adapter,
            pin=self._slot_table.version if prompt.version == LIVE_VERSION else prompt.version,
            metadata=prompt.metadata,
        )
