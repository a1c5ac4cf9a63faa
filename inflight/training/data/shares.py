"""Splits a batch over the ranks of a data-parallel trainer, which averages gradients over ranks.

The totals of a share are the totals of the whole batch divided by the number of ranks. Thus the average of the ranks'
losses is the loss of the batch, and its gradient the batch's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec
import torch

from inflight.core.errors import ProtocolError
from inflight.core.rollout import Rollout
from inflight.stream.rollout_codec import Arrays, RolloutHeader, arrays_of, decode, encode, header_of, make_rollout
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped
from inflight.training.objective.aggregation import StepTotals


class ShareInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Totals and metadata of a share, without its rollouts."""

    num_tokens: float
    """Drawn tokens of the whole batch per rank, as in `StepTotals`; so are the next two."""
    num_sequences: float
    num_groups: float
    group_tokens: list[int]
    """Drawn tokens of each group of this share, in order of appearance, with rollouts left out of the batch."""
    trainer_version: int | None
    sample_tokens: list[int] | None = None
    """As in `PackedBatch`."""
    taken_ns: int = 0
    """As in `PackedBatch`."""
    is_filler: bool = False
    """True if no group was left for this rank: its rollouts are another rank's, and have no part in the loss."""
    of_step: float = 1.0
    """Expected share of the optimizer step that has arrived with this batch; 1 if it is all of the step."""
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
    columns: list[Arrays]
    """For each rollout "advantages" f32[T]; "drawn" bool[T], true for tokens that the policy drew; "included" bool[T],
    true for tokens in the loss, unless all drawn tokens are; and "foreign_versions" i64[T] if the batch has them."""

    def batch(self) -> PackedBatch:
        """Pack the share. A filler has a sequence without a part in the loss, and no rollouts."""
        info = self.info
        columns = {name: [of_one[name] for of_one in self.columns] for name in self.columns[0]}
        packed = pack(self.rollouts, columns.pop("advantages"), **columns, trainer_version=info.trainer_version)
        groups = torch.tensor(info.group_tokens)
        packed.totals = StepTotals(info.num_tokens, info.num_sequences, groups, info.num_groups)
        packed.sample_tokens = None if info.sample_tokens is None else torch.tensor(info.sample_tokens)
        packed.taken_ns = info.taken_ns
        if info.is_filler:
            packed.rollouts = ()
        return packed


def split(
    batch: PackedBatch, num_ranks: int, *, last_reward: float = float("nan"), dropped: Dropped, of_step: float = 1.0
) -> list[Share]:
    """Split a batch of `RolloutStream.batches` into a share for each rank.

    The group with the most tokens is placed first, each with the rank that has the fewest tokens (longest processing
    time first, Graham 1969). Ranks thus differ at most by the tokens of the largest group. A rank without a group gets
    the shortest sequence as a filler without a part in the loss: collectives of a step need all ranks.
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
        taken_ns=batch.taken_ns,
        of_step=of_step,
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
    info = msgspec.structs.replace(
        info,
        group_tokens=[int(batch.totals.group_tokens[group]) for group in groups],
        sample_tokens=None if batch.sample_tokens is None else batch.sample_tokens[list(sequences)].tolist(),
    )
    answers = [
        slice(starts[s] + len(rollout.prompt_token_ids), starts[s + 1])
        for s, rollout in zip(sequences, rollouts, strict=True)
    ]
    columns = {"advantages": batch.advantages, "drawn": batch.loss_mask}
    if info.is_filler:
        columns["included"] = torch.zeros_like(batch.loss_mask)
    elif batch.included is not None:
        columns["included"] = batch.included
    if batch.foreign_versions is not None:
        columns["foreign_versions"] = batch.foreign_versions
    of_rollouts = [{name: column[answer].numpy() for name, column in columns.items()} for answer in answers]
    return Share(info, rollouts, of_rollouts)


def encode_share(share: Share) -> bytes:
    """Encode a share as one message. Raises InvalidRequestError for metadata that a message cannot hold."""
    arrays = [arrays_of(rollout) | columns for rollout, columns in zip(share.rollouts, share.columns, strict=True)]
    return encode(_ShareHeader(share.info, [header_of(rollout) for rollout in share.rollouts]), arrays)


def decode_share(data: bytes) -> Share:
    """Decode a message of `encode_share`. Raises ProtocolError for any other data."""
    header, arrays = decode(data, _ShareHeader, lambda header: len(header.rollouts))
    names = ["advantages", "drawn"]
    names += [name for name in ("included", "foreign_versions") if any(name in of_one for of_one in arrays)]
    try:
        rollouts = [make_rollout(plain, of_one) for plain, of_one in zip(header.rollouts, arrays, strict=True)]
        return Share(header.info, rollouts, [{name: of_one[name] for name in names} for of_one in arrays])
    except KeyError as error:
        raise ProtocolError(f"a share of a batch lacks {error}") from error
