"""The requests of an engine: unfinished requests, and the groups and finishes that frames report."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import msgspec

from inflight.core.errors import InvalidRequestError, QueueFullError
from inflight.core.frames import Finish, GroupStart
from inflight.core.messages import Ids, Prompt, Unfinished
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.prompt_check import PromptCheck
from inflight.engine.loop.sequence import Sequence
from inflight.engine.process.verbs import verb
from inflight.weights.engine.slot_table import SlotTable

MAX_REQUESTS_PER_SUBMIT = 65536
"""Maximum number of samples per call. Accepting them takes about a second without a forward pass."""
_MOST_IDS = 2**62
"""Upper bound of the ids that a caller chooses, so that larger ids always exist."""


class Schedules(Protocol):
    """Receives the sequences of requests."""

    admits: bool
    """Sequences that have not started are allowed to start."""

    @property
    def has_work(self) -> bool:
        """True if some sequence has not ended."""
        ...

    @property
    def held_back(self) -> bool:
        """True if all remaining work is to start prompts, and `admits` forbids that."""
        ...

    def check(self, name: str, sequence: Sequence) -> None:
        """Raise InvalidRequestError if such a sequence cannot be scheduled. name: the prompt's name in the message."""

    def add(self, leader: Sequence) -> None:
        """Queue a sequence and its followers."""

    def fork(self, parent: Sequence, leader: Sequence) -> None:
        """Queue a sequence that starts with its parent's tokens, and let it share their keys and values."""

    def remove(self, sequence: Sequence) -> None:
        """End a running or waiting sequence, and free its resources."""

    def unprotect(self, group_id: int) -> None:
        """Let the state of a group's ended sequences be evicted (`SamplingParams.protect_s`)."""


class Requests:
    """Makes a sequence for each sample of a prompt, and passes it to the scheduler until it ends."""

    def __init__(
        self,
        scheduler: Schedules,
        slot_table: SlotTable,
        options: EngineOptions,
        *,
        vocab_size: int,
        can_read_text: bool,
        banned: tuple[tuple[int, int], ...] = (),
        media_ids: frozenset[int] = frozenset(),
    ):
        """Uses max_queued, record_routed_experts and the options of `PromptCheck`. banned: ranges of the ids that are
        never drawn. media_ids: as for `PromptCheck`."""
        self._scheduler, self._slot_table, self._options, self._banned = scheduler, slot_table, options, banned
        self._prompt_check = PromptCheck(
            scheduler.check, slot_table, options, vocab_size, can_read_text=can_read_text, media_ids=media_ids
        )
        self.unfinished: dict[int, Sequence] = {}
        """Maps request ids to sequences."""
        self._groups: dict[int, set[int]] = {}
        """Maps group ids to the ids of unfinished requests."""
        self.next_group_id = 0
        self._next_request_id = 0
        self.num_ended = 0
        """Number of requests that have ended."""
        self._starts: list[GroupStart] = []
        self._finishes: list[Finish] = []

    @verb(brings_work=True)
    def submit(self, prompts: Seq[Prompt], ids: Seq[Ids] | None = None) -> list[int]:
        """Queue prompts and return a group id for each. All are accepted or none. Raises InvalidRequestError or
        QueueFullError. ids: one for each prompt, not in use elsewhere; None: the next ones."""
        total = sum(prompt.params.n for prompt in prompts)
        if total > MAX_REQUESTS_PER_SUBMIT:
            raise InvalidRequestError(
                f"{total} samples in one call; submit at most {MAX_REQUESTS_PER_SUBMIT} at a time"
            )
        self._check_room(prompts, ids)
        for index, prompt in enumerate(prompts):
            self._prompt_check.check(f"prompt {index}", prompt)
        return [self._accept(prompt, own) for prompt, own in zip(prompts, ids or [None] * len(prompts), strict=True)]

    @verb(brings_work=True)
    def fork(
        self,
        request_id: int,
        at: int | None = None,
        params: SamplingParams | None = None,
        metadata: Mapping[str, Any] | None = None,
        ids: Ids | None = None,
    ) -> int:
        """Start a group whose prompt is the prompt of an unfinished request and the first `at` tokens that it drew
        (None: all so far). The group shares their keys and values. Return its group id. Raises InvalidRequestError or
        QueueFullError.

        params: None takes the request's parameters, with another seed. ids: as for `submit`.
        """
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
        params = params or msgspec.structs.replace(parent.params, seed=None, prompt_logprobs=None)
        prompt = Prompt(parent.prompt + parent.tokens[:at], params, dict(metadata or {}), parent.pin, parent.adapter)
        self._check_room([prompt], None if ids is None else [ids])
        self._prompt_check.check("the fork", prompt)
        return self._accept(prompt, ids, forked_from=(request_id, at))

    @verb(brings_work=True)
    def adopt(self, groups: Seq[Unfinished], next_group_id: int, next_request_id: int) -> dict[int, str]:
        """Continue groups of another engine under their ids, with their tokens so far. If draws depend on (seed,
        position) alone, the next tokens are the same as there. Later groups and requests get ids from these two on.
        Return the reasons of refused groups, by group id. Raises InvalidRequestError for ids in use."""
        next_group_id = max(next_group_id, self.next_group_id)
        next_request_id = max(next_request_id, self._next_request_id)
        seen_groups, seen_requests = set(self._groups), set(self.unfinished)
        for group in groups:
            begin = group.first_request_id
            ids = range(begin or 0, min((begin or 0) + group.prompt.params.n, next_request_id))
            fits = (
                group.group_id < next_group_id and (begin is None) != bool(group.drawn) and set(group.drawn) <= set(ids)
            )
            if not fits or group.group_id in seen_groups or not seen_requests.isdisjoint(group.drawn):
                raise InvalidRequestError(f"group {group.group_id} cannot go on: its ids are taken, or do not fit")
            seen_groups.add(group.group_id)
            seen_requests.update(group.drawn)
        self.next_group_id, self._next_request_id = next_group_id, next_request_id
        refused: dict[int, str] = {}
        for group in groups:
            try:
                self._prompt_check.check(f"group {group.group_id}", group.prompt, group.drawn.values())
            except InvalidRequestError as error:
                refused[group.group_id] = str(error)
                continue
            first, drawn = group.first_request_id, group.drawn
            if first is None:
                first = self._next_request_id
                drawn = {first + sample: [] for sample in range(group.prompt.params.n)}
            self._begin(group.prompt, Ids(group.group_id, first), drawn, group.forked_from)
        return refused

    @verb()
    def cancel(self, group_ids: Seq[int], request_ids: Seq[int] = ()) -> None:
        """End these requests, and all of these groups. Ended requests of the groups lose their protection."""
        wanted = {i for i in request_ids if i in self.unfinished}
        for group_id in group_ids:
            wanted |= self._groups.get(group_id, set())
        for request_id in sorted(wanted, reverse=True):  # followers before their leader, so that none replaces it
            self.finish(self.unfinished[request_id], "cancelled")
        for group_id in group_ids:
            self._scheduler.unprotect(group_id)

    @property
    def next_ids(self) -> Ids:
        """Ids of the next group, if the caller chooses none."""
        return Ids(self.next_group_id, self._next_request_id)

    @property
    def has_news(self) -> bool:
        """True if groups started or requests ended that no frame has reported yet."""
        return bool(self._starts or self._finishes)

    def take_news(self) -> tuple[list[GroupStart], list[Finish]]:
        """Return the groups that started and the requests that ended since the last call."""
        news, self._starts, self._finishes = (self._starts, self._finishes), [], []
        return news

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a request."""
        self.num_ended += 1
        self._scheduler.remove(sequence)
        if sequence.pin is not None:
            self._slot_table.readable.unpin(sequence.pin)
        del self.unfinished[sequence.request_id]
        members = self._groups[sequence.group_id]
        members.remove(sequence.request_id)
        if not members:
            del self._groups[sequence.group_id]
        self._finishes.append(Finish(sequence.request_id, reason, len(sequence.tokens)))

    def _check_room(self, prompts: Seq[Prompt], ids: Seq[Ids] | None) -> None:
        """Raise QueueFullError if these samples do not fit, and InvalidRequestError for ids in use."""
        most, count = self._options.max_queued, sum(prompt.params.n for prompt in prompts)
        if len(self.unfinished) + count > most:
            raise QueueFullError(
                f"{count} samples do not fit beside the {len(self.unfinished)} that are unfinished, of at most {most}; "
                "submit them when others have ended, or launch with a larger max_queued"
            )
        if ids is not None and len(ids) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts came with {len(ids)} ids")
        groups: set[int] = set()
        requests: set[int] = set()
        for prompt, own in zip(prompts, ids or (), strict=False):
            wanted = range(own.first_request_id, own.first_request_id + prompt.params.n)
            known = own.group_id in self._groups or not self.unfinished.keys().isdisjoint(wanted)
            too_large = max(own.group_id, own.first_request_id) > _MOST_IDS
            if known or own.group_id in groups or not requests.isdisjoint(wanted) or too_large:
                raise InvalidRequestError(f"group {own.group_id} cannot begin: its ids are taken, or too large")
            groups.add(own.group_id)
            requests.update(wanted)

    def _accept(self, prompt: Prompt, ids: Ids | None = None, forked_from: tuple[int, int] | None = None) -> int:
        """Begin a new group and return its id."""
        prompt, ids = prompt.seeded(), ids or self.next_ids
        params = prompt.params
        parent = self.unfinished[forked_from[0]] if forked_from else None
        if params.prompt_logprobs is not None or self._options.record_routed_experts:
            parent = None  # the fork computes all its tokens
        drawn = {ids.first_request_id + sample: [] for sample in range(params.n)}
        self._begin(prompt, ids, drawn, forked_from, parent)
        return ids.group_id

    def _begin(
        self,
        prompt: Prompt,
        ids: Ids,
        drawn: Mapping[int, list[int]],
        forked_from: tuple[int, int] | None,
        parent: Sequence | None = None,
    ) -> None:
        """Queue the samples of a prompt that was checked, and announce the group in the next frame. A sample with
        tokens computes them as after a preemption. drawn: maps request ids to tokens so far. parent: the sequence
        whose state the samples share."""
        group_id, first = ids.group_id, ids.first_request_id
        live = self._slot_table.version
        sequences = [
            Sequence.of(prompt, ids, request_id - first, list(tokens), live, max_context=self._options.max_context)
            for request_id, tokens in sorted(drawn.items())
        ]
        self._groups[group_id] = {s.request_id for s in sequences}
        self.unfinished |= {s.request_id: s for s in sequences}
        if (pin := sequences[0].pin) is not None:
            self._slot_table.readable.pin(pin, len(sequences))
        fresh = [sequence for sequence in sequences if not sequence.tokens]
        if fresh:
            leader, *leader.followers = fresh
            if parent is None:
                self._scheduler.add(leader)
            else:
                self._scheduler.fork(parent, leader)
        for sequence in sequences:
            if sequence.tokens:
                self._scheduler.add(sequence)
        self.next_group_id = max(self.next_group_id, group_id + 1)
        self._next_request_id = max(self._next_request_id, first + prompt.params.n)
        params, metadata = prompt.params, prompt.metadata
        banned, adapter = self._banned, prompt.adapter
        self._starts.append(
            GroupStart(group_id, first, prompt.token_ids, params, metadata, forked_from, banned, adapter, pin)
        )
        for sequence in sequences:
            if len(sequence.tokens) >= sequence.max_tokens:
                self.finish(sequence, "length")
