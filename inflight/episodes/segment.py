"""A token sequence of an episode that grows turn by turn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import fsum
from typing import Any

import msgspec
import numpy as np

from inflight.chat.rendering import with_arguments
from inflight.core.rollout import Rollout, SamplingMask, Turn
from inflight.core.sampling import SamplingParams

Message = Mapping[str, Any]


def comparable(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return copies of messages without empty fields: clients leave them out or add them. Tool calls have their
    arguments as values, since clients write JSON in different ways, and no fields that clients add."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(list(messages))
    for message in plain:
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_comparable_call(call) for call in calls]
    return tuple({key: value for key, value in message.items() if value not in (None, "", [], {})} for message in plain)


def _comparable_call(call: Any) -> Any:
    call = with_arguments(call)
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    return {"id": call.get("id"), "function": {key: function.get(key) for key in ("name", "arguments")}}


def digests_of(messages: Sequence[Message], setup: Any) -> list[bytes]:
    """Return a digest of each beginning of a conversation. messages: as `comparable` returns them. setup: everything
    else that its first prompt depends on, or the digest of the messages before these."""
    key = setup if isinstance(setup, bytes) else _encoded(setup)
    digests = []
    for message in messages:
        key = blake2b(key + _encoded(message), digest_size=16).digest()
        digests.append(key)
    return digests


def _encoded(value: Any) -> bytes:
    value = msgspec.to_builtins(value, str_keys=True, enc_hook=repr)
    try:
        return msgspec.json.encode(value, order="deterministic")
    except UnicodeEncodeError:  # Arguments of drawn calls can have halves of surrogate pairs, as escapes.
        return json.dumps(value, sort_keys=True).encode()


def num_common(ours: list[int], theirs: list[int]) -> int:
    """Return the number of leading tokens that two lists have in common."""
    least = min(len(ours), len(theirs))
    if ours[:least] == theirs[:least]:
        return least
    return next(index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)


@dataclass(slots=True, eq=False)
class DrawnTurn:
    """A turn of a segment that an engine drew. Its prompt can be empty."""

    turn: Rollout
    began_ns: int
    """Time of its request."""
    ended_ns: int
    part_rewards: Sequence[tuple[int, float]] = ()
    """Rewards of parts of it, in order, each with the number of tokens up to the end of the part."""
    reward: float | None = None
    """Its reward without the rewards of its parts."""


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens of one growing sequence: a first prompt, then drawn and given turns in alternation.

    Drawn tokens never change. The tokens that a segment shares with its parent belong to its prompt, so that each drawn
    token is in one segment only.
    """

    prompt: list[int]
    adapter: str | None = None
    """The adapter that draws its turns."""
    forked_from: tuple["Segment", int] | None = None
    """The parent, and the number of its tokens after its prompt that the prompt of this segment repeats."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens, the prompt included."""
    is_busy: bool = False
    """True while a turn of it is drawn."""
    _parts: list[DrawnTurn | int] = field(default_factory=list)
    """Drawn turns, and lengths of given ones."""
    num_routed: int = 0
    """Number of leading tokens whose experts are in the drawn turns."""

    _hash: blake2b = field(init=False)

    def __post_init__(self) -> None:
        self._begin(self.prompt)

    def _begin(self, token_ids: Sequence[int]) -> None:
        """Set the first tokens."""
        # Policies with equal tokens draw different turns.
        self._hash = blake2b(b"" if self.adapter is None else self.adapter.encode(), digest_size=16)
        self.token_ids = []
        self._append(token_ids)

    @property
    def digest(self) -> str:
        """Digest of all tokens."""
        return self._hash.hexdigest()

    def _append(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self._hash.update(np.array(token_ids, np.int32).tobytes())

    @property
    def drawn(self) -> list[DrawnTurn]:
        """Drawn turns."""
        return [part for part in self._parts if isinstance(part, DrawnTurn)]

    @property
    def ends_with_reply(self) -> bool:
        """True if its last tokens are a drawn turn."""
        return bool(self._parts) and isinstance(self._parts[-1], DrawnTurn)

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not draw."""
        if token_ids:
            self._append(token_ids)
            self._parts.append(len(token_ids))

    def take_back(self) -> None:
        """Remove the tokens that were given after the last drawn turn, if there is one."""
        if self.drawn and isinstance(given := self._parts[-1], int):
            self._parts.pop()
            self._begin(self.token_ids[:-given])

    def origin(self, length: int) -> "tuple[Segment, int]":
        """Return the segment that contains the end of the first `length` tokens, and the number of its tokens after its
        prompt up to there: this segment, or one that it was forked from."""
        segment = self
        while length < len(segment.prompt) and segment.forked_from is not None:
            segment = segment.forked_from[0]
        return segment, length - len(segment.prompt)

    def draw(self, drawn: DrawnTurn) -> None:
        """Append a turn that an engine drew after all tokens so far."""
        self._append(drawn.turn.token_ids.tolist())
        self.num_routed += 0 if drawn.turn.routed_experts is None else len(drawn.turn.routed_experts)
        self._parts.append(drawn)

    @property
    def total_reward(self) -> float | None:
        """Sum of all rewards; None if there are none."""
        given = [each.reward for each in self.drawn if each.reward is not None]
        given += [reward for each in self.drawn for _, reward in each.part_rewards]
        return fsum(given) if given else None

    def rollout(
        self, *, group_id: int, sample: int, params: SamplingParams, metadata: dict[str, Any], finish_reason: str
    ) -> Rollout:
        """Return the segment up to its last drawn token as a rollout without a reward. It needs a drawn turn."""
        last = max(index for index, part in enumerate(self._parts) if isinstance(part, DrawnTurn))
        parts: list[Rollout | int] = []
        turns, begin = [], 0
        for part in self._parts[: last + 1]:
            if isinstance(part, int):
                parts.append(part)
                turns.append(Turn(begin, begin + part, False))
            else:
                turn, end = part.turn, begin + len(part.turn.token_ids)
                parts.append(turn)
                times, prefix = (part.began_ns, part.ended_ns), (turn.prefix_tokens, turn.prefix_version)
                whole = Turn(begin, end, True, part.reward, turn.finish_reason, *times, *prefix)
                turns += _split(whole, part.part_rewards, turn.sampled_at_ns)
            begin = turns[-1].end
        drawn = [part for part in parts if isinstance(part, Rollout)]
        first, num_prompt = drawn[0], len(self.prompt)
        return Rollout(
            request_id=first.request_id,
            group_id=group_id,
            sample=sample,
            params=params,
            metadata=metadata,
            prompt_token_ids=np.array(self.prompt, np.int32),
            token_ids=np.array(self.token_ids[num_prompt : num_prompt + begin], np.int32),
            logprobs=_joined(parts, [part.logprobs for part in drawn]),
            weight_versions=_joined(parts, [part.weight_versions for part in drawn]),
            sampled_at_ns=_joined(parts, [part.sampled_at_ns for part in drawn]),
            finish_reason=finish_reason,
            columns={name: _joined(parts, [part.columns[name] for part in drawn]) for name in first.columns},
            sampling_mask=_joined_masks(parts),
            routed_experts=_joined_experts(drawn),
            turns=tuple(turns),
            forked_from=self._origin(),
            prefix_tokens=first.prefix_tokens,
            prefix_version=first.prefix_version,
            banned=first.banned,
            adapter=self.adapter,
        )

    def _origin(self) -> tuple[int, int] | None:
        if self.forked_from is None:
            return None
        parent, length = self.forked_from
        # A turn that was cut off by a limit is not in its segment.
        is_there = len(parent.prompt) + length <= len(parent.token_ids)
        return (parent.drawn[0].turn.request_id, length) if parent.drawn and is_there else None


def _split(turn: Turn, part_rewards: Sequence[tuple[int, float]], sampled_at_ns: np.ndarray) -> list[Turn]:
    """Split a drawn turn after each part with a reward. sampled_at_ns: i64[T], times of its tokens."""
    turns, rest = [], turn
    for count, reward in part_rewards:
        end = turn.begin + count
        if end > rest.begin and end < turn.end:
            # After a restart of the trainer the turn began now, and its tokens are older.
            ended_ns = max(int(sampled_at_ns[count - 1]), rest.began_ns)
            turns.append(msgspec.structs.replace(rest, end=end, reward=reward, finish_reason="", ended_ns=ended_ns))
            rest = msgspec.structs.replace(rest, begin=end, began_ns=ended_ns, prefix_tokens=0, prefix_version=None)
        elif end == turn.end:
            rest = msgspec.structs.replace(rest, reward=(rest.reward or 0.0) + reward)
        else:  # another reward at the end of the part before
            turns[-1] = msgspec.structs.replace(turns[-1], reward=(turns[-1].reward or 0.0) + reward)
    return [*turns, rest]


def _joined(parts: Sequence[Rollout | int], drawn: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the columns [T, …] of drawn turns, with zeros for given tokens."""
    columns = iter(drawn)
    like = drawn[0]
    return np.concatenate(
        [np.zeros((part, *like.shape[1:]), like.dtype) if isinstance(part, int) else next(columns) for part in parts]
    )


def _joined_masks(parts: Sequence[Rollout | int]) -> SamplingMask | None:
    """Join the sampling masks of drawn turns. Given tokens, and turns without a mask, have the whole vocabulary."""
    masks = [None if isinstance(part, int) else part.sampling_mask for part in parts]
    if not any(mask is not None for mask in masks):
        return None
    token_ids, cut_from = [], []
    for part, mask in zip(parts, masks, strict=True):
        length = part if isinstance(part, int) else len(part.token_ids)
        token_ids += [np.empty(0, np.int32)] * length if mask is None else mask.split()
        sizes = None if mask is None else mask.cut_from
        cut_from.append(np.zeros(length, np.int32) if sizes is None else sizes)
    return SamplingMask.join(token_ids, np.concatenate(cut_from))


def _joined_experts(drawn: Sequence[Rollout]) -> np.ndarray | None:
    """Join the experts of turns, each with the experts of its new tokens; None if a turn has none."""
    experts = [turn.routed_experts for turn in drawn if turn.routed_experts is not None]
    return np.concatenate(experts) if len(experts) == len(drawn) else None
