"""The stream as the trainer sees it: finished groups, and batches of them."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from inflight.core.clock import now_ns
from inflight.core.errors import FrameError, StreamGapError
from inflight.core.rollout import Rollout
from inflight.observability.staleness import StalenessMeter, TokenStaleness
from inflight.stream.assembler import Assembler
from inflight.stream.reader import StreamReader
from inflight.training.advantages import group_advantages
from inflight.training.batch import PackedBatch, pack
from inflight.training.staleness import StalenessFilter

logger = logging.getLogger(__name__)

Score = Callable[[Rollout], float]
_POLL_MS = 100


class RolloutStream:
    """Groups in the order in which they finish.

    `check_engine` raises if the engine is known to be dead; it is called while nothing arrives.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        meter: StalenessMeter,
        check_engine: Callable[[], None],
    ):
        self._reader = StreamReader(endpoint)
        self._assembler = Assembler()
        self._tokenizer = tokenizer
        self._meter = meter
        self._check_engine = check_engine
        self._ready: deque[list[Rollout]] = deque()
        self._awaited: set[int] = set()
        self._damaged = False
        self.num_dropped = 0
        """Groups that `batches` left out because a sample was cancelled or ended with an error."""
        self.last_reward = float("nan")
        """Mean reward of the batch that `batches` yielded last."""

    @property
    def num_tokens(self) -> int:
        """Tokens received so far, of finished and unfinished samples."""
        return self._assembler.num_tokens

    @property
    def outstanding(self) -> list[int]:
        """Ids of the groups that were submitted and not handed out yet."""
        return sorted(self._awaited)

    def expect(self, group_ids: Collection[int]) -> None:
        """These groups were submitted; `groups` ends when all of them were handed out."""
        self._awaited.update(group_ids)

    def groups(self) -> Iterator[list[Rollout]]:
        """Every finished group, its samples in order, until nothing that was submitted is outstanding.

        Raises EngineDiedError, or FrameError or StreamGapError when frames were lost. Then every group that was in
        flight counts as lost: its samples come with finish_reason "error" when `groups` is called again.
        """
        while self._awaited:
            if not self._ready:
                self._receive()
                continue
            group = self._ready.popleft()
            self._awaited.discard(group[0].group_id)
            yield group

    def collect(self, group_ids: Collection[int]) -> list[list[Rollout]]:
        """These groups, in the order of `group_ids`, as soon as all have finished; others wait for `groups`.

        Raises ValueError if a group is not outstanding, and what `groups` raises; then nothing has been taken.
        """
        unknown = set(group_ids) - self._awaited
        if unknown:
            raise ValueError(f"groups {sorted(unknown)} are not outstanding: not submitted here, or handed out already")
        found: dict[int, list[Rollout]] = {}
        kept: deque[list[Rollout]] = deque()
        try:
            while found.keys() != set(group_ids):
                if set(group_ids) - self._awaited:
                    raise StreamGapError(f"groups {sorted(set(group_ids) - self._awaited)} were lost with their frames")
                while not self._ready:
                    self._receive()
                group = self._ready.popleft()
                if group[0].group_id in group_ids:
                    found[group[0].group_id] = group
                else:
                    kept.append(group)
        except BaseException:
            self._ready.extendleft([*found.values(), *reversed(kept)])
            raise
        self._ready.extendleft(reversed(kept))
        self._awaited -= set(group_ids)
        return [found[group_id] for group_id in group_ids]

    def partial(self, group_id: int) -> list[Rollout]:
        """What has arrived so far of the unfinished samples of a group, without text; raises what `groups` raises."""
        while self._receive(0):
            pass
        return self._assembler.partial(group_id)

    def batches(
        self, *, rollouts: int, score: Score, staleness: StalenessFilter | None = None
    ) -> Iterator[PackedBatch]:
        """Batches of at least `rollouts` rollouts in whole groups, scored, with group-relative advantages.

        Ends when nothing that was submitted is outstanding; the last batch may be smaller. How old its tokens were is
        measured when the next batch is asked for, that is, after the optimizer step. `staleness` takes out what is too
        old and counts it; a batch of which nothing is left is not yielded.
        """
        if rollouts < 1:
            raise ValueError(f"rollouts must be at least 1, got {rollouts}")
        pending: list[list[Rollout]] = []
        for group in self.groups():
            if not usable(group):
                self.num_dropped += 1
                continue
            pending.append(group)
            if sum(map(len, pending)) >= rollouts:
                yield from self._measured(pending, score, staleness)
                pending = []
        if pending:
            yield from self._measured(pending, score, staleness)

    def close(self) -> None:
        self._reader.close()

    def _measured(
        self, groups: list[list[Rollout]], score: Score, staleness: StalenessFilter | None
    ) -> Iterator[PackedBatch]:
        score_groups(groups, score)
        self.last_reward = float(np.mean([rollout.reward or 0.0 for group in groups for rollout in group]))
        trainer_version = self._meter.published_version
        batch = pack_groups(groups, trainer_version=trainer_version, staleness=staleness)
        if batch is not None:
            yield batch
            consume(self._meter, batch, trainer_version)

    def _receive(self, timeout_ms: int = _POLL_MS) -> bool:
        """Take in one frame; False if none came."""
        try:
            frame = self._reader.receive(timeout_ms)
        except (FrameError, StreamGapError):
            self._ready.extend(self._assembler.abandon())
            self._damaged = True
            raise
        if frame is None:
            self._check_engine()
            return False
        self._meter.frame(frame)
        for group in self._assembler.add(frame):
            self._add_text(group)
            self._ready.append(group)
        if self._damaged:
            self._forget_what_was_lost(frame.header.next_group_id)
        return True

    def _forget_what_was_lost(self, next_group_id: int) -> None:
        """Groups announced by now, of which nothing is known, went with the lost frames."""
        ready = {group[0].group_id for group in self._ready}
        lost = {g for g in self._awaited if g < next_group_id and g not in ready and not self._assembler.knows(g)}
        self._awaited -= lost
        self._damaged = False
        if lost:
            logger.error("groups %s were lost with their frames", sorted(lost))

    def _add_text(self, group: list[Rollout]) -> None:
        if self._tokenizer is None:
            return
        prompt = str(self._tokenizer.decode(group[0].prompt_token_ids.tolist(), skip_special_tokens=True))
        for rollout in group:
            rollout.prompt = prompt
            rollout.text = str(self._tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True))


def usable(group: list[Rollout]) -> bool:
    """Whether every sample of the group ended by itself."""
    return all(rollout.finish_reason in ("stop", "length") for rollout in group)


def score_groups(groups: list[list[Rollout]], score: Score) -> None:
    """Write down the reward of every rollout."""
    for group in groups:
        for rollout in group:
            rollout.reward = float(score(rollout))


def pack_groups(
    groups: list[list[Rollout]], *, trainer_version: int, staleness: StalenessFilter | None = None
) -> PackedBatch | None:
    """Pack scored groups with advantages relative to their groups, for a trainer whose weights are `trainer_version`.

    None if `staleness` leaves no rollout.
    """
    advantages = group_advantages([[r.reward for r in group if r.reward is not None] for group in groups])
    rollouts = [rollout for group in groups for rollout in group]
    if staleness is None:
        return pack(rollouts, advantages, trainer_version=trainer_version)
    stay, included = staleness.apply(rollouts, trainer_version=trainer_version, now_ns=now_ns())
    if not stay:
        return None
    return pack(
        [rollouts[i] for i in stay], [advantages[i] for i in stay], included=included, trainer_version=trainer_version
    )


def consume(
    meter: StalenessMeter, batch: PackedBatch, trainer_version: int, consumed_ns: int | None = None
) -> TokenStaleness:
    """Tell the meter that an optimizer step has consumed the batch, which was trained on at `trainer_version`."""
    drawn = batch.loss_mask
    return meter.consume(
        batch.weight_versions[drawn].cpu().numpy(),
        batch.sampled_at_ns[drawn].cpu().numpy(),
        consumed_ns=consumed_ns or now_ns(),
        trainer_version=trainer_version,
    )
