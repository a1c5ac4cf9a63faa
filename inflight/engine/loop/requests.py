"""The requests of an engine: validation, unfinished requests, and the groups and finishes that frames report."""

import secrets
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import msgspec

from inflight.core.columns import own_column_name
from inflight.core.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from inflight.core.frames import Finish, GroupStart
from inflight.core.messages import LIVE_VERSION, Ids, Prompt, Unfinished, shorten
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.sampler import sample_seed
from inflight.engine.loop.sequence import Sequence
from inflight.weights.engine.slot_table import SlotTable

MAX_REQUESTS_PER_SUBMIT = 65536
"""Maximum number of samples per call, also for one prompt. Accepting them takes about a second without a forward
pass."""
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
    ):
        """Uses max_context (a number of tokens, not 0), max_queued, lora_rank, adapters, columns and
        record_routed_experts. can_read_text: the model has a tokenizer, as stop strings require. banned: ranges of the
        ids that are never drawn."""
        self._scheduler, self._slot_table, self._options = scheduler, slot_table, options
        self._vocab_size, self._can_read_text, self._banned = vocab_size, can_read_text, banned
        self._adapters = options.adapters if options.lora_rank else ()
        self._columns = [own_column_name(path) for path in options.columns]
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

    def submit(self, prompts: Seq[Prompt], ids: Seq[Ids] | None = None) -> list[int]:
        """Queue prompts and return a group id for each. All are accepted or none. Raises InvalidRequestError or
        QueueFullError. ids: one for each prompt; None: the next ones."""
        total = sum(prompt.params.n for prompt in prompts)
        if total > MAX_REQUESTS_PER_SUBMIT:
            raise InvalidRequestError(
                f"{total} samples in one call; submit at most {MAX_REQUESTS_PER_SUBMIT} at a time"
            )
        self._check_room(total)
        for index, prompt in enumerate(prompts):
            self._check(f"prompt {index}", prompt)
        if ids is not None:
            self._check_ids(prompts, ids)
        return [self._accept(prompt, own) for prompt, own in zip(prompts, ids or [None] * len(prompts), strict=True)]

    def fork(
        self,
        request_id: int,
        at: int | None,
        params: SamplingParams | None,
        metadata: Mapping[str, Any] | None,
        ids: Ids | None = None,
    ) -> int:
        """Start a group that continues an unfinished request, as in `Engine.fork`."""
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
        self._check_room(params.n)
        self._check("the fork", prompt)
        if ids is not None:
            self._check_ids([prompt], [ids])
        return self._accept(prompt, ids, forked_from=(parent, at))

    def adopt(self, groups: Seq[Unfinished], next_group_id: int, next_request_id: int) -> dict[int, str]:
        """Continue groups of another engine, as in `Engine.adopt`."""
        next_group_id = max(next_group_id, self.next_group_id)
        next_request_id = max(next_request_id, self._next_request_id)
        for group in groups:
            begin = group.first_request_id
            ids = range(begin or 0, min((begin or 0) + group.prompt.params.n, next_request_id))
            fits = (
                group.group_id < next_group_id and (begin is None) != bool(group.drawn) and set(group.drawn) <= set(ids)
            )
            if not fits or group.group_id in self._groups or not self.unfinished.keys().isdisjoint(group.drawn):
                raise InvalidRequestError(f"group {group.group_id} cannot go on: its ids are taken, or do not fit")
        self.next_group_id, self._next_request_id = next_group_id, next_request_id
        refused: dict[int, str] = {}
        for group in groups:
            try:
                self._check(f"group {group.group_id}", group.prompt, group.drawn.values())
                self._go_on(group)
            except InvalidRequestError as error:
                refused[group.group_id] = str(error)
        return refused

    def cancel(self, group_ids: Seq[int], request_ids: Seq[int]) -> None:
        wanted = {i for i in request_ids if i in self.unfinished}
        for group_id in group_ids:
            wanted |= self._groups.get(group_id, set())
        for request_id in sorted(wanted, reverse=True):  # followers before their leader, so that none replaces it
            self.finish(self.unfinished[request_id], "cancelled")

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

    def _check_room(self, count: int) -> None:
        most = self._options.max_queued
        if len(self.unfinished) + count > most:
            raise QueueFullError(
                f"{count} samples do not fit beside the {len(self.unfinished)} that are unfinished, of at most {most}; "
                "submit them when others have ended, or launch with a larger max_queued"
            )

    def _check(self, name: str, prompt: Prompt, drawn: Collection[list[int]] = ()) -> None:
        """Raise InvalidRequestError if the engine cannot draw from a prompt and from these tokens after it, or does not
        hold the version that the prompt is pinned to. name: the prompt's name in the message."""
        ids, params, slot_table = prompt.token_ids, prompt.params, self._slot_table
        max_context, vocab_size = self._options.max_context, self._vocab_size
        if not ids:
            raise InvalidRequestError(f"{name} is empty; the engine needs at least one token")
        if len(ids) >= max_context:
            # Clients of vLLM recognize this error by its first words.
            raise PromptTooLongError(
                f"This model's maximum context length is {max_context} tokens. However, {name} contains {len(ids)} "
                "input tokens, and its answer needs at least one more. Please reduce the length of the prompt, or "
                "launch with a larger max_context."
            )
        most = min(params.max_tokens, max_context - len(ids))
        if any(len(tokens) > most for tokens in drawn):
            raise InvalidRequestError(f"{name} has drawn more than the {most} tokens that it may have")
        low, high = min(map(min, filter(None, (ids, *drawn)))), max(map(max, filter(None, (ids, *drawn))))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(f"{name} has token id {bad}; the vocabulary is 0 … {vocab_size - 1}")
        for what, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if bad is not None:
                raise InvalidRequestError(
                    f"{name} has token id {bad} in {what}; the vocabulary is 0 … {vocab_size - 1}"
                )
        if params.stop and not self._can_read_text:
            raise InvalidRequestError(f"{name} has stop strings, but the model has no tokenizer; use stop_token_ids")
        for what, count in (("top_logprobs", params.top_logprobs), ("prompt_logprobs", params.prompt_logprobs or 0)):
            if count > vocab_size:
                raise InvalidRequestError(f"{name} asks for {count} of {vocab_size} tokens as {what}")
        unknown = next((column for column in params.columns if column not in self._columns), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"{name} asks for column {shorten(unknown, 200)!r}; the engine was launched with columns "
                f"{', '.join(self._columns) or 'of no name'} (EngineOptions.columns)"
            )
        if prompt.adapter is not None:
            if prompt.adapter not in self._adapters:
                raise InvalidRequestError(
                    f"{name} asks for adapter {shorten(prompt.adapter, 200)!r}; the engine has "
                    f"{', '.join(self._adapters) or 'none'} (launch with lora_rank, and adapters for their names)"
                )
            if prompt.version is not None:
                raise InvalidRequestError(f"{name} is pinned to a version of the weights, which adapters have none of")
        self._scheduler.check(name, self._sequence(prompt, 0, 0, 0))
        if prompt.version not in (None, LIVE_VERSION) and prompt.version not in slot_table.versions:
            raise InvalidRequestError(
                f"{name} is pinned to version {prompt.version}, which no slot holds; "
                f"held are {', '.join(map(str, slot_table.versions)) or 'none'}"
            )
        if prompt.version == LIVE_VERSION and slot_table.live is None:
            raise InvalidRequestError(f"{name} is pinned to the live version, but the only slot is being written to")

    def _check_ids(self, prompts: Seq[Prompt], ids: Seq[Ids]) -> None:
        """Raise InvalidRequestError unless there are unused ids for all prompts."""
        if len(ids) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts came with {len(ids)} ids")
        groups: set[int] = set()
        requests: set[int] = set()
        for prompt, own in zip(prompts, ids, strict=True):
            wanted = range(own.first_request_id, own.first_request_id + prompt.params.n)
            known = own.group_id in self._groups or not self.unfinished.keys().isdisjoint(wanted)
            too_large = max(own.group_id, own.first_request_id) > _MOST_IDS
            if known or own.group_id in groups or not requests.isdisjoint(wanted) or too_large:
                raise InvalidRequestError(f"group {own.group_id} cannot begin: its ids are taken, or too large")
            groups.add(own.group_id)
            requests.update(wanted)

    def _accept(self, prompt: Prompt, ids: Ids | None = None, forked_from: tuple[Sequence, int] | None = None) -> int:
        params = prompt.params
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        prompt = msgspec.structs.replace(prompt, params=msgspec.structs.replace(params, seed=seed))
        ids = ids or self.next_ids
        group_id, first = ids.group_id, ids.first_request_id
        leader, *followers = (self._sequence(prompt, group_id, first, sample) for sample in range(params.n))
        leader.followers = followers
        self._register(leader, *followers)
        if forked_from is None or leader.scores_prompt or self._options.record_routed_experts:
            self._scheduler.add(leader)  # it computes all its tokens
        else:
            self._scheduler.fork(forked_from[0], leader)
        origin = (forked_from[0].request_id, forked_from[1]) if forked_from else None
        self._announce(prompt, group_id, first, origin)
        return group_id

    def _go_on(self, group: Unfinished) -> None:
        """Continue a group that was checked. A sample with tokens computes them as after a preemption."""
        prompt, group_id = group.prompt, group.group_id
        first = self._next_request_id if group.first_request_id is None else group.first_request_id
        drawn = group.drawn if group.first_request_id is not None else {first + i: [] for i in range(prompt.params.n)}
        sequences = [self._sequence(prompt, group_id, first, request_id - first) for request_id in sorted(drawn)]
        for sequence in sequences:
            sequence.tokens = list(drawn[sequence.request_id])
        self._register(*sequences)
        fresh = [sequence for sequence in sequences if not sequence.tokens]
        if fresh:
            fresh[0].followers = fresh[1:]
        for leader in [*fresh[:1], *(sequence for sequence in sequences if sequence.tokens)]:
            self._scheduler.add(leader)
        self._announce(prompt, group_id, first, group.forked_from)
        for sequence in sequences:
            if len(sequence.tokens) >= sequence.max_tokens:
                self.finish(sequence, "length")

    def _register(self, *sequences: Sequence) -> None:
        """Record these samples of a group as unfinished."""
        group_id, pin = sequences[0].group_id, sequences[0].pin
        self._groups[group_id] = {s.request_id for s in sequences}
        self.unfinished |= {s.request_id: s for s in sequences}
        if pin is not None:
            self._slot_table.readable.pin(pin, len(sequences))

    def _announce(self, prompt: Prompt, group_id: int, first: int, origin: tuple[int, int] | None) -> None:
        """Announce the group in the next frame, and reserve its ids."""
        self.next_group_id = max(self.next_group_id, group_id + 1)
        self._next_request_id = max(self._next_request_id, first + prompt.params.n)
        params, metadata = prompt.params, prompt.metadata
        self._starts.append(GroupStart(group_id, first, prompt.token_ids, params, metadata, origin, self._banned))

    def _sequence(self, prompt: Prompt, group_id: int, first: int, sample: int) -> Sequence:
        """Return one sample of a prompt whose params have a seed."""
        return Sequence(
            request_id=first + sample,
            group_id=group_id,
            sample=sample,
            seed=sample_seed(prompt.params.seed or 0, sample),
            prompt=prompt.token_ids,
            params=prompt.params,
            max_tokens=min(prompt.params.max_tokens, self._options.max_context - len(prompt.token_ids)),
            adapter=prompt.adapter,
            pin=self._slot_table.version if prompt.version == LIVE_VERSION else prompt.version,
            metadata=prompt.metadata,
        )
