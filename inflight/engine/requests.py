"""The requests of an engine: what it accepts, who is unfinished, and what frames have to tell of who came and ended."""

import secrets
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgspec

from inflight.core.errors import InvalidRequestError
from inflight.core.frames import Finish, GroupStart
from inflight.core.messages import LIVE_VERSION, Prompt, shorten
from inflight.core.sampling import SamplingParams
from inflight.engine.order import check_order
from inflight.engine.sampler import sample_seed
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Sequence
from inflight.weights.slot_table import SlotTable

MAX_REQUESTS_PER_SUBMIT = 65536
"""One prompt may ask for as many. Accepting them takes about a second, in which there is no forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine takes, for as long as it lives."""

    max_context: int
    vocab_size: int
    can_read_text: bool
    """There is a tokenizer, which stop strings need."""
    adapters: Collection[str]
    columns: Collection[str]
    """Names of the columns of a user's own."""


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
        """Raises InvalidRequestError, which calls the prompt `name`, if the engine cannot draw from it, or has not the
        version that it is pinned to now."""
        ids, params, limits, slot_table = prompt.token_ids, prompt.params, self._limits, self._slot_table
        if not ids:
            raise InvalidRequestError(f"{name} is empty; the engine needs at least one token")
        if len(ids) >= limits.max_context:
            raise InvalidRequestError(
                f"{name} has {len(ids)} tokens and the context holds {limits.max_context}, of which the answer "
                "needs at least one; shorten the prompt or launch with a larger max_context"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= limits.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(f"{name} has token id {bad}; the vocabulary is 0 … {limits.vocab_size - 1}")
        for what, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
            if bad is not None:
                raise InvalidRequestError(
                    f"{name} has token id {bad} in {what}; the vocabulary is 0 … {limits.vocab_size - 1}"
                )
        if params.stop and not limits.can_read_text:
            raise InvalidRequestError(f"{name} has stop strings, but the model has no tokenizer; use stop_token_ids")
        if params.top_logprobs > limits.vocab_size:
            raise InvalidRequestError(f"{name} asks for {params.top_logprobs} of {limits.vocab_size} top_logprobs")
        unknown = next((column for column in params.columns if column not in limits.columns), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"{name} asks for column {shorten(unknown, 200)!r}; the engine was launched with columns "
                f"{', '.join(limits.columns) or 'of no name'} (EngineOptions.columns)"
            )
        if prompt.adapter is not None:
            if prompt.adapter not in limits.adapters:
                raise InvalidRequestError(
                    f"{name} asks for adapter {shorten(prompt.adapter, 200)!r}; the engine has "
                    f"{', '.join(limits.adapters) or 'none'} (launch with lora_rank, and adapters for their names)"
                )
            if prompt.version is not None:
                raise InvalidRequestError(f"{name} is pinned to a version of the weights, which adapters have none of")
        if prompt.version not in (None, LIVE_VERSION) and prompt.version not in slot_table.versions:
            raise InvalidRequestError(
                f"{name} is pinned to version {prompt.version}, which no slot holds; "
                f"held are {', '.join(map(str, slot_table.versions)) or 'none'}"
            )
        if prompt.version == LIVE_VERSION and slot_table.live is None:
            raise InvalidRequestError(f"{name} is pinned to the live version, but the only slot is being written to")
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
