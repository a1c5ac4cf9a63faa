"""The stream as the trainer sees it: finished groups, scored while others are drawn, and batches of them."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout
from inflight.observability.staleness_meter import StalenessMeter, TokenStaleness
from inflight.stream.inbox import SILENCE_S, Group, Inbox
from inflight.training.data.advantages import Advantages, group_advantages
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scoring import Reward, Score, Scorer
from inflight.training.data.staleness_filter import StalenessFilter

logger = logging.getLogger(__name__)


class RolloutStream:
    """Groups in the order in which they finish, or in which they are scored. Safe to use from several threads at once.

    A thread receives them all the time, also while the trainer computes. `check_engine` raises if the engine is known
    to be dead, `ask_engine` if it does not answer; they are called while nothing arrives. tokenizer_lock: held while
    the tokenizer is used, which is not safe to use from several threads.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        meter: StalenessMeter,
        check_engine: Callable[[], None],
        ask_engine: Callable[[float], None] = lambda silent_s: None,
        silence_s: float = SILENCE_S,
        tokenizer_lock: AbstractContextManager[Any] | None = None,
    ):
        self._tokenizer, self._tokenizer_lock = tokenizer, tokenizer_lock or threading.Lock()
        self._meter = meter
        self._scorer: Scorer | None = None
        """Who scores groups as they finish: the one that was asked for last."""
        self._own_scorer: Scorer | None = None
        self._scoring: dict[int, tuple[Group, Scorer]] = {}
        """By group: who scores it at the moment."""
        self._scored_by: dict[int, Scorer] = {}
        """By group: whose rewards it has."""
        self._failed: dict[int, tuple[BaseException, Scorer]] = {}
        """By group: what a score function raised."""
        self._lock = threading.Lock()
        self._inbox = Inbox(
            endpoint,
            on_frame=meter.frame,
            on_group=self._score_if_wanted,
            check_engine=check_engine,
            ask_engine=ask_engine,
            silence_s=silence_s,
        )
        self.num_dropped = 0
        """Groups that `batches` left out because a sample was cancelled or ended with an error, or no sample has a
        reward."""
        self.num_unscored = 0
        """Rollouts that were left out because they have no reward: it was None or not finite, or took too long."""
        self.last_reward = float("nan")
        """Mean reward of the batch that `batches` yielded last."""

    @property
    def num_tokens(self) -> int:
        """Tokens received so far, of finished and unfinished samples."""
        return self._inbox.num_tokens

    @property
    def outstanding(self) -> list[int]:
        """Ids of the groups that were submitted and not handed out yet."""
        return self._inbox.outstanding

    def expect(self, group_ids: Collection[int], *, reserved: bool = False) -> None:
        """These groups were submitted. Those that are reserved go only to `collect` or `groups` with their ids."""
        self._inbox.expect(group_ids, reserved=reserved)

    def drop(self, group_ids: Collection[int]) -> None:
        """Nobody wants these groups any more; what arrives of them is thrown away."""
        self._inbox.drop(group_ids)

    def groups(
        self, group_ids: Collection[int] | None = None, *, score: "Score | Scorer | None" = None
    ) -> Iterator[Group]:
        """Every finished group, its samples in order, until nothing that was submitted is outstanding.

        group_ids: only these, each as soon as it has finished. None: all that were submitted for training
        (`engine.submit(…)` without `train=False`), and that nobody has named.
        score: the rewards of samples that ended by themselves are there (None for a sample that has none): the function
        is called beside this thread as soon as a group has finished, and groups come in the order in which they are
        scored. What it raises is raised here; then the group is scored again when it is asked for again.
        Raises EngineDiedError, EngineHungError, or FrameError or StreamGapError when frames were lost. Then every group
        that was in flight counts as lost: its samples come with finish_reason "error" when `groups` is called again.
        """
        if group_ids is not None:
            wanted = self._claim(group_ids)
            while wanted:
                answer = self._inbox.take_any(wanted)
                if isinstance(answer, Future):
                    self._wait(answer)
                else:
                    wanted.discard(answer[0].group_id)
                    yield self._with_text(answer)
            return
        scorer = self._score_with(score)
        while (group := self._next(scorer)) is not None:
            self._hand_out([group])
            yield group

    async def agroups(self, group_ids: Collection[int] | None = None) -> AsyncIterator[Group]:
        """As `groups`, for asyncio: `async for group in engine.stream.agroups(ids)`. Without rewards."""
        wanted = None if group_ids is None else self._claim(group_ids)
        while wanted is None or wanted:
            answer = self._inbox.next() if wanted is None else self._inbox.take_any(wanted)
            if answer is None:
                return
            if isinstance(answer, Future):
                await asyncio.wrap_future(answer)
                continue
            if wanted is None:
                self._hand_out([answer])
            else:
                wanted.discard(answer[0].group_id)
            yield self._with_text(answer)

    def collect(self, group_ids: Collection[int], *, timeout_s: float | None = None) -> list[Group]:
        """These groups, in the order of `group_ids`, as soon as all have finished; others wait for `groups`.

        timeout_s: None waits as long as the engine lives and answers. Raises TimeoutError, ValueError if a group is not
        outstanding, and what `groups` raises; then nothing has been taken.
        """
        deadline_ns = None if timeout_s is None else now_ns() + int(timeout_s * 1e9)
        while isinstance(found := self._inbox.take(group_ids), Future):
            self._wait(found, deadline_ns, f"groups {_named(group_ids)} did not finish within {timeout_s} s")
        return [self._with_text(found[group_id]) for group_id in group_ids]

    async def acollect(self, group_ids: Collection[int]) -> list[Group]:
        """As `collect`, for asyncio."""
        while isinstance(found := self._inbox.take(group_ids), Future):
            await asyncio.wrap_future(found)
        return [self._with_text(found[group_id]) for group_id in group_ids]

    def partial(self, group_id: int) -> Group:
        """What has arrived so far of the unfinished samples of a group, without text; raises what `groups` raises."""
        return self._inbox.partial(group_id)

    def batches(
        self, *, rollouts: int, score: Score | Scorer, staleness: StalenessFilter | None = None
    ) -> Iterator[PackedBatch]:
        """Batches of at least `rollouts` rollouts in whole groups, scored, with group-relative advantages.

        They are made of what was submitted for training, and of nothing that was submitted with `train=False`, drawn by
        `generate`, or drawn greedily (`collect` has those). score: a function of a rollout, plain or `async`, or a
        `Scorer`, which has a time limit; it is called beside training and generation. A rollout without a reward is
        left out and counted.
        Ends when nothing that was submitted is outstanding; the last batch may be smaller. How old its tokens were is
        measured when the next batch is asked for, that is, after the optimizer step. `staleness` takes out what is too
        old and counts it; a batch of which nothing is left is not yielded.
        Raises what `score` and `groups` raise; no rollout is lost by that, or by Ctrl-C: those that were not in a batch
        yet come when `batches` is called again.
        """
        if rollouts < 1:
            raise ValueError(f"rollouts must be at least 1, got {rollouts}")
        scorer = self._score_with(score)
        more = True
        while more:
            taken: list[Group] = []
            groups: list[Group] = []
            try:
                while sum(map(len, groups)) < rollouts and (more := (group := self._next(scorer)) is not None):
                    if group[0].params.greedy:  # it has no importance ratio, and was meant for something else
                        self._inbox.reserve([group[0].group_id])
                        continue
                    taken.append(group)
                    groups += [rewarded] if (rewarded := with_rewards(group)) else []
                trainer_version = self._meter.published_version
                batch = pack_groups(groups, trainer_version=trainer_version, staleness=staleness) if groups else None
            except BaseException:
                self._inbox.put_back([group[0].group_id for group in taken])
                raise
            self._hand_out(taken)
            self.num_dropped += len(taken) - len(groups)
            self.num_unscored += sum(num_unscored(group) for group in taken)
            if groups:
                self.last_reward = float(np.mean([rollout.reward or 0.0 for group in groups for rollout in group]))
            if batch is not None:
                yield batch
                consume(self._meter, batch, trainer_version)

    def close(self) -> None:
        """Read no more, and let the threads go."""
        self._inbox.close()
        with self._lock:
            scorer, self._own_scorer = self._own_scorer, None
        if scorer is not None:
            scorer.close()

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _claim(self, group_ids: Collection[int]) -> set[int]:
        self._inbox.reserve(group_ids)
        return set(group_ids)

    def _next(self, scorer: Scorer | None) -> Group | None:
        """The next group for training, with the rewards of this scorer if there is one. It stays outstanding until it
        is handed out."""
        while True:
            answer = self._inbox.next()
            if answer is None:
                return None
            if isinstance(answer, Future):
                self._wait(answer)
                continue
            group_id = answer[0].group_id
            with self._lock:
                error, of = self._failed.pop(group_id, (None, None))
                scored = scorer is None or self._scored_by.get(group_id) is scorer or not _is_scored(answer)
            if error is not None and of is scorer:
                self._inbox.put_back([group_id])
                raise error
            if scored or scorer is None:
                return self._with_text(answer)
            self._inbox.hold(group_id)
            self._start_scoring(answer, scorer)

    def _hand_out(self, groups: list[Group]) -> None:
        group_ids = [group[0].group_id for group in groups]
        self._inbox.remove(group_ids)
        with self._lock:
            for group_id in group_ids:
                self._scored_by.pop(group_id, None)

    def _wait(self, future: "Future[None]", deadline_ns: int | None = None, what: str = "") -> None:
        """Raises what the future was given. Generation may take as long as it takes; whether the engine is there is
        asked by the inbox."""
        left_s = None if deadline_ns is None else max(0.0, (deadline_ns - now_ns()) / 1e9)
        if not wait([future], timeout=left_s).done:
            raise TimeoutError(what)
        future.result()

    # ---- scores -------------------------------------------------------------------------------------------------

    def _score_with(self, score: "Score | Scorer | None") -> Scorer | None:
        """From now on groups are scored with this as they finish; None changes nothing. Returns the scorer."""
        if score is None:
            return None
        with self._lock:
            if isinstance(score, Scorer):
                self._scorer = score
            elif self._own_scorer is not None and self._own_scorer.calls(score):
                self._scorer = self._own_scorer
            else:
                if self._own_scorer is not None:
                    self._own_scorer.close()
                self._scorer = self._own_scorer = Scorer(score)
            scorer = self._scorer
            overtaken = [group for group, other in self._scoring.values() if other is not scorer]
        for group in overtaken:
            self._start_scoring(group, scorer)
        return scorer

    def _score_if_wanted(self, group: Group) -> bool:
        """Begin to score a group that has just finished. True if there is nothing to wait for."""
        with self._lock:
            scorer = self._scorer if _is_scored(group) else None
        if scorer is not None:
            self._start_scoring(group, scorer)
        return scorer is None

    def _start_scoring(self, group: Group, scorer: Scorer) -> None:
        with self._lock:
            self._scoring[group[0].group_id] = group, scorer
        scores = scorer.start(group, prepare=self._with_text)
        scores.add_done_callback(partial(self._take_scores, group, scorer))

    def _take_scores(self, group: Group, scorer: Scorer, scores: "Future[list[Reward]]") -> None:
        group_id = group[0].group_id
        error = CancelledError() if scores.cancelled() else scores.exception()
        with self._lock:
            if self._scoring.get(group_id, (None, None))[1] is not scorer:  # another one has taken over
                return
            del self._scoring[group_id]
            if error is not None:
                self._failed[group_id] = error, scorer
            else:
                self._scored_by[group_id] = scorer
                for rollout, reward in zip(group, scores.result(), strict=True):
                    rollout.reward = reward
        self._inbox.ready(group)

    def _with_text(self, group: Group) -> Group:
        if self._tokenizer is None or group[0].prompt or group[0].text:
            return group
        with self._tokenizer_lock:
            prompt = str(self._tokenizer.decode(group[0].prompt_token_ids.tolist(), skip_special_tokens=True))
            texts = [str(self._tokenizer.decode(r.token_ids.tolist(), skip_special_tokens=True)) for r in group]
        for rollout, text in zip(group, texts, strict=True):
            rollout.prompt, rollout.text = prompt, text
        return group


def _is_scored(group: Group) -> bool:
    """Whether rewards are wanted for it at all."""
    return usable(group) and not group[0].params.greedy


def usable(group: Group) -> bool:
    """Whether every sample of the group ended by itself."""
    return all(rollout.finish_reason in ("stop", "length") for rollout in group)


def with_rewards(group: Group) -> Group:
    """The samples of a group that can be trained on: none of a group that failed, else those that have a reward."""
    return [rollout for rollout in group if rollout.reward is not None] if usable(group) else []


def num_unscored(group: Group) -> int:
    """Samples that ended by themselves and have no reward."""
    return len(group) - len(with_rewards(group)) if usable(group) else 0


def pack_groups(
    groups: list[list[Rollout]],
    *,
    trainer_version: int,
    staleness: StalenessFilter | None = None,
    advantages_of: Advantages = group_advantages,
) -> PackedBatch | None:
    """Pack scored groups with advantages relative to their groups, for a trainer whose weights are `trainer_version`.

    None if `staleness` leaves no rollout. Raises ValueError for a rollout without a reward.
    """
    advantages = advantages_of([[rollout.reward for rollout in group] for group in groups])
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


def _named(group_ids: Collection[int]) -> str:
    ids = sorted(group_ids)
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
