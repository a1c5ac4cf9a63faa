"""Splits a batch over the ranks of a data-parallel trainer: whole groups, similar numbers of tokens, a share for every
rank.

Trainers of several ranks average gradients over them. The totals of a share are the totals of the whole batch divided
by the number of ranks. Thus the average of the ranks' losses is the loss of the batch, and its gradient the batch's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import msgspec
import numpy as np
import torch

from inflight.core.errors import ProtocolError
from inflight.core.rollout import Rollout
from inflight.stream.rollout_codec import RolloutHeader, arrays_of, decode, encode, header_of, make_rollout
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped


class ShareInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Totals and metadata of a share, without its rollouts."""

    num_tokens: float
    """Drawn tokens of the whole batch per rank, as in `StepTotals`; so are the next two."""
    num_sequences: float
    num_groups: float
    group_tokens: list[int]
    """Drawn tokens of each group of this share, in order of appearance. Tokens of rollouts that were left out of the
    batch are included."""
    trainer_version: int | None
    is_filler: bool = False
    """True if no group was left for this rank: its rollouts are another rank's, and have no part in the loss."""
    last_reward: float = float("nan")
    """Mean reward of the whole batch."""
    dropped: dict[str, int] = {}
    """Counts of the stream's omissions so far: the fields of `Dropped`."""


class _ShareHeader(msgspec.Struct, frozen=True):
    info: ShareInfo
    rollouts: list[RolloutHeader]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a batch that one rank trains on."""

    info: ShareInfo
    rollouts: list[Rollout]
    advantages: list[np.ndarray]
    """f32[T] of each rollout."""
    drawn: list[np.ndarray]
    """bool[T] of each rollout, true for tokens that the policy drew."""
    included: list[np.ndarray] | None
    """bool[T] of each rollout, true for tokens that take part in the loss; None: all drawn tokens."""

    def batch(self) -> PackedBatch:
        """Pack the share. A filler has a sequence without a part in the loss, and no rollouts."""
        info = self.info
        packed = pack(
            self.rollouts,
            self.advantages,
            drawn=self.drawn,
            included=self.included,
            trainer_version=info.trainer_version,
        )
        packed.totals = replace(
            packed.totals,
            num_tokens=info.num_tokens,
            num_sequences=info.num_sequences,
            num_groups=info.num_groups,
            group_tokens=torch.tensor(info.group_tokens),
        )
        if info.is_filler:
            packed.rollouts = ()
        return packed


def split(batch: PackedBatch, num_ranks: int, *, last_reward: float = float("nan"), dropped: Dropped) -> list[Share]:
    """Split a batch of `RolloutStream.batches` into a share for each rank.

    The group with the most tokens is placed first, each with the rank that has the fewest tokens (longest processing
    time first, Graham 1969). Ranks thus differ at most by the number of tokens of the largest group. Tokens of prompts
    and answers are counted. With fewer groups than ranks, a rank without one gets the shortest sequence as a filler
    without a part in the loss: ranks that have collectives in their steps all take every step.
    """
    lengths = batch.cu_seqlens.diff().tolist()
    groups: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.groups.tolist()):
        groups.setdefault(group, []).append(sequence)
    sizes = {group: sum(lengths[s] for s in sequences) for group, sequences in groups.items()}
    chosen: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for group in sorted(groups, key=lambda group: -sizes[group]):
        rank = loads.index(min(loads))
        chosen[rank] += groups[group]
        loads[rank] += sizes[group]
    totals = batch.totals
    info = ShareInfo(
        num_tokens=totals.num_tokens / num_ranks,
        num_sequences=totals.num_sequences / num_ranks,
        num_groups=(totals.num_groups or len(totals.group_tokens)) / num_ranks,
        group_tokens=[],
        trainer_version=batch.trainer_version,
        last_reward=last_reward,
        dropped=asdict(dropped),
    )
    shortest = lengths.index(min(lengths))
    return [
        _take(batch, sorted(sequences), info)
        if sequences
        else _take(batch, [shortest], msgspec.structs.replace(info, is_filler=True))
        for sequences in chosen
    ]


def _take(batch: PackedBatch, sequences: Sequence[int], info: ShareInfo) -> Share:
    starts = batch.cu_seqlens.tolist()
    rollouts = [batch.rollouts[sequence] for sequence in sequences]
    groups = dict.fromkeys(batch.groups[list(sequences)].tolist())
    info = msgspec.structs.replace(info, group_tokens=[int(batch.totals.group_tokens[group]) for group in groups])
    answers = [
        slice(starts[s] + len(rollout.prompt_token_ids), starts[s + 1])
        for s, rollout in zip(sequences, rollouts, strict=True)
    ]
    included = [np.zeros(len(r.token_ids), bool) for r in rollouts] if info.is_filler else None
    if batch.included is not None and not info.is_filler:
        included = [batch.included[answer].numpy() for answer in answers]
    return Share(
        info=info,
        rollouts=rollouts,
        advantages=[batch.advantages[answer].numpy() for answer in answers],
        drawn=[batch.loss_mask[answer].numpy() for answer in answers],
        included=included,
    )


def encode_share(share: Share) -> bytes:
    """Encode a share as one message. Raises InvalidRequestError for metadata that a message cannot hold."""
    arrays = [arrays_of(rollout) for rollout in share.rollouts]
    for index, of_one in enumerate(arrays):
        of_one |= {"advantages": share.advantages[index], "drawn": share.drawn[index]}
        if share.included is not None:
            of_one["included"] = share.included[index]
    return encode(_ShareHeader(share.info, [header_of(rollout) for rollout in share.rollouts]), arrays)


def decode_share(data: bytes) -> Share:
    """Decode a message of `encode_share`. Raises ProtocolError for any other data."""
    header, arrays = decode(data, _ShareHeader, lambda header: len(header.rollouts))
    try:
        return Share(
            info=header.info,
            rollouts=[make_rollout(plain, of_one) for plain, of_one in zip(header.rollouts, arrays, strict=True)],
            advantages=[of_one["advantages"] for of_one in arrays],
            drawn=[of_one["drawn"] for of_one in arrays],
            included=[a["included"] for a in arrays] if any("included" in a for a in arrays) else None,
        )
    except KeyError as error:
        raise ProtocolError(f"a share of a batch lacks {error}") from error
