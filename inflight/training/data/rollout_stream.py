"""The trainer's stream: finished groups, scored while others are drawn, and batches of them."""

import asyncio
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, closing
from math import ceil, inf
from threading import TIMEOUT_MAX
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from inflight.core.arguments import named
from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.frames import TokenFrame
from inflight.core.sampling import SamplingParams, check_not_greedy
from inflight.core.spans import span
from inflight.core.text import listed
from inflight.observability.staleness_meter import StalenessMeter
from inflight.stream.group_table import GroupRecord
from inflight.stream.held_groups import Group
from inflight.stream.ledger import Ledger
from inflight.stream.stream_thread import FrameSource, StreamThread
from inflight.training.data.advantages import Advantages, resolve_advantages
from inflight.training.data.batch import LossObserver, PackedBatch
from inflight.training.data.concurrency import Concurrency
from inflight.training.data.examples import PromptEngine, Submitted
from inflight.training.data.group_scoring import GroupScoring
from inflight.training.data.lead import LeadState, check_ahead
from inflight.training.data.scored_groups import Dropped, NothingToLearn, ScoredGroups, measure_consumed, measure_taken
from inflight.training.data.scoring import GroupScorer, Score
from inflight.training.data.staleness_filter import StalenessRule, check_rules
from inflight.training.data.submitter import Submitter
from inflight.training.data.texts import Texts

_CHECK_S = 0.1


class Sharing(Protocol):
    """The part of `fleet.ranks.sharing.RankSharing` that rank 0 of a trainer uses."""

    @property
    def size(self) -> int: ...
    def check(self) -> None: ...
    def send(self, what: str, shares: Sequence[bytes] | bytes) -> None: ...
    def settle(self) -> None: ...
    def wait_for_rollouts(self) -> None: ...
    def fail(self, error: BaseException, doing: str = ...) -> None: ...
    def shares(self, batches: Iterator[PackedBatch], stream: "RolloutStream") -> Iterator[PackedBatch]: ...


class RolloutStream:
    """Groups in the order in which they finish, or in which they are scored. Safe to use from several threads at once.

    A thread receives them, also while the trainer computes. tokenizer_lock: held while the tokenizer is used. in_order:
    return groups in the order in which they finished, regardless of their scoring times.
    """

    def __init__(
        self,
        source: FrameSource,
        ledger: Ledger,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        meter: StalenessMeter,
        tokenizer_lock: AbstractContextManager[Any] | None = None,
        in_order: bool = False,
        **options: Any,
    ):
        """options: the options of `StreamThread`."""
        self._meter = meter
        self.ledger = ledger
        """Records of the groups."""
        self.concurrency = Concurrency()
        """Speed of the engines by the number of rows."""
        self.texts = Texts(tokenizer, tokenizer_lock)
        self.scoring = GroupScoring(ledger, prepare=self.texts.fill_in, in_order=in_order)
        ledger.frames.on_frame, ledger.queue.on_finished = self._measure_frame, self.scoring.start_if_wanted
        self.thread = StreamThread(source, ledger, **options)
        """Reads the frames."""
        self.engine: PromptEngine | None = None
        """Receives the prompts of `batches(prompts=…)`."""
        self.lead: LeadState | None = None
        """State of the lead controller at the last batch of `batches(prompts=…)`."""
        self.sharing: Sharing | None = None
        """If set, `batches` yields only the shares of this rank."""
        self.dropped = Dropped()
        """Counts of what `batches` has omitted, with the reasons."""
        self.last_reward = float("nan")
        """Mean reward of the last batch."""
        self.observers: list[LossObserver] = []
        """Functions that every loss of a batch of this stream calls."""
        self.episodes: list[Callable[[], dict[str, Any]]] = []
        """Functions that return the fields of an event `Episodes`, one of each `inflight.Episodes` in progress."""
        self._nothing_to_learn = NothingToLearn()
        self._unsubmitted: dict[int, tuple[Iterable[Any], list[Any]]] = {}
        """Maps the `id` of an iterator of prompts to the iterator and the prompts that were read from it and not
        submitted when `batches` ended."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens received, of finished and unfinished samples."""
        return self.ledger.frames.num_tokens

    @property
    def failures(self) -> Counter[str]:
        """As `GroupScorer.failures`, of the present score function."""
        return self.scoring.failures

    @property
    def state(self) -> str:
        """State of the engine: "generating" (also while its forward passes are slow), "idle", "paused", "asleep",
        "waits for weights", "waits for the trainer", "restarting"; "silent" if nothing has arrived for some seconds,
        and "closed" once nothing can arrive any more."""
        return self.thread.state

    @property
    def outstanding(self) -> list[int]:
        """Ids of the groups that were submitted and not returned yet."""
        return self.ledger.outstanding

    def groups(
        self,
        group_ids: Collection[int] | None = None,
        *,
        score: Score | GroupScorer | None = None,
        before_waiting: Callable[[], None] | None = None,
    ) -> Iterator[Group]:
        """Yield every finished group, its samples in order, until no group is outstanding.

        group_ids: only these, each as soon as it has finished. None: all that were submitted for training
        (`engine.submit(…)` without `train=False`) and that no call has named.
        score: samples that ended by themselves have their rewards (None for a sample that has none, and for all of a
        group of which too many were cancelled). Groups arrive in the order in which they are scored. A rollout whose
        score fails has no reward, and `failures` counts it.
        before_waiting: called each time before this waits for a group.
        Raises EngineDiedError, EngineHungError, JournalError when a journal cannot be written, or FrameError or
        StreamGapError when frames were lost. Then the samples of every group that was in flight have the finish_reason
        "error" when `groups` is called again.
        """
        for answer in self._groups(group_ids, score):
            if isinstance(answer, Future):
                self._wait(answer, before_waiting)
            else:
                yield answer

    async def agroups(
        self, group_ids: Collection[int] | None = None, *, score: Score | GroupScorer | None = None
    ) -> AsyncIterator[Group]:
        """Yield the same groups as `groups`, for asyncio: `async for group in engine.stream.agroups(ids)`."""
        for answer in self._groups(group_ids, score):
            if isinstance(answer, Future):
                await self._await(answer)
            else:
                yield answer

    def collect(self, group_ids: Collection[int], *, timeout_s: float | None = None) -> list[Group]:
        """Return these groups, in the order of `group_ids`, as soon as all have finished.

        timeout_s: None waits as long as the engine lives and answers. Raises TimeoutError, ValueError if a group is not
        outstanding, and what `groups` raises; then nothing has been taken.
        """
        deadline_s = now_ns() / 1e9 + (inf if timeout_s is None else timeout_s)
        while isinstance(found := self.ledger.take(group_ids), Future):
            left_s = min(max(0.0, deadline_s - now_ns() / 1e9), TIMEOUT_MAX)
            try:
                if not wait([found], timeout=left_s).done:
                    raise TimeoutError(
                        f"groups {_named(group_ids)} did not finish within {timeout_s} s; state of the engine: "
                        f"{self.state}"
                    )
                found.result()
            except BaseException:
                self.ledger.leave(found)
                raise
        return [self.texts.fill_in(found[group_id]) for group_id in group_ids]

    async def acollect(self, group_ids: Collection[int], *, texts: bool = True) -> list[Group]:
        """Do the same as `collect`, for asyncio. texts: False leaves prompts and texts empty."""
        while isinstance(found := self.ledger.take(group_ids), Future):
            await self._await(found)
        groups = [found[group_id] for group_id in group_ids]
        return [self.texts.fill_in(group) for group in groups] if texts else groups

    @named()
    def batches(
        self,
        *,
        rollouts: int,
        score: Score | GroupScorer | None = None,
        staleness: Sequence[StalenessRule] = (),
        advantages: str | Advantages = "grpo",
        prompts: Iterable[Any] | None = None,
        params: SamplingParams | None = None,
        ahead: int | Literal["auto"] = "auto",
        episodes: PromptEngine | None = None,
        adapter: str | None = None,
    ) -> Iterator[PackedBatch]:
        """Yield batches of at least `rollouts` rollouts in whole groups, scored, with advantages.

        prompts: submitted by the stream itself, with `params`: prompts for `engine.submit`, or `Example`s of such a
        prompt and metadata; prompts with a method `observe`, such as a `Curriculum`, receive the groups of each batch.
        None: the caller submits prompts. episodes: `inflight.Episodes`, which runs episodes for them. adapter: the LoRA
        adapter that draws their tokens, as in `engine.submit`; `Episodes` has its own. ahead: as
        `GRPOConfig.ahead`, for such prompts. Ranks other than 0 give none. Prompts that the engine refuses are skipped
        and counted.
        Prompts submitted with `train=False`, drawn by `generate`, or drawn greedily are excluded (`collect` returns
        those). score: a function of a rollout, plain or `async`, or a `Scorer` with a time limit, or several as
        `Rewards`; it is called during training and generation. None: episodes have rewards. staleness: the rules for
        tokens that are too old. advantages: their name in `ADVANTAGES`, or a function of the groups. Omitted rollouts
        are counted in `dropped`.
        Ends when all submitted prompts are finished; the last batch can be smaller. Warns if it ends without a batch,
        and if there is nothing to learn from one: all rewards are equal, or n is 1 and advantages are relative to a
        group. The age of a batch's tokens is measured when the next batch is requested.
        Raises the exceptions of `groups`, and ScoreError if `score` fails and no rollout of a batch gets a reward. With
        prompts, InflightError if it takes more groups than a batch has and none can be trained on.
        They lose no rollout, and neither does Ctrl-C: the next call of `batches` yields the rollouts that were not in a
        batch yet, and calls `score` again. Prompts are read from their iterator up to one batch before they are
        submitted. The next call with the same iterator begins with the prompts that were read and not submitted. A
        list begins again with each call, and so does any other iterable that is not an iterator.
        On rank 0 of a trainer of several ranks, yields this rank's share of such batches. It then also raises
        RankLostError, naming a rank that has ended or does not take its share.
        """
        if score is None and prompts is not None and episodes is None:
            raise ValueError("prompts need a score; only episodes have rewards: give score=…, or episodes=…")
        if adapter is not None and (prompts is None or episodes is not None):
            raise ValueError("adapter is for prompts: give it to engine.submit, or to Episodes(…, adapter=…)")
        submitter = None
        if prompts is not None:
            submitter = self._submitter(prompts, params, rollouts, ahead, episodes or self.engine, adapter)
        try:
            with (
                ExitStack() as background,
                closing(self._whole_batches(rollouts, score, staleness, advantages, submitter, background)) as whole,
            ):
                for batch in whole if self.sharing is None else self.sharing.shares(whole, self):
                    batch.observers = self.observers
                    yield batch
        finally:
            unsubmitted = [] if submitter is None else submitter.unsubmitted
            if unsubmitted and isinstance(prompts, Iterator):  # Other iterables begin again in the next call.
                self._unsubmitted[id(prompts)] = prompts, unsubmitted

    def _whole_batches(
        self,
        rollouts: int,
        score: Score | GroupScorer | None,
        staleness: Sequence[StalenessRule],
        advantages: str | Advantages,
        submitter: Submitter | None,
        background: ExitStack,
    ) -> "Generator[PackedBatch, None, None]":
        """Yield the batches of all ranks. background: holds `submitter.in_background()` once the arguments are checked
        and groups are scored."""
        if rollouts < 1:
            raise ValueError(f"rollouts must be at least 1, got {rollouts}")
        check_rules(staleness)
        resolve_advantages(advantages)
        scorer = None if score is None else self.scoring.score_with(score)
        if submitter is not None:
            background.enter_context(submitter.in_background())
        more, num_batches, num_greedy, left_out = True, 0, 0, Dropped()
        while more:
            taken: list[GroupRecord] = []
            scored = ScoredGroups()
            if submitter is not None:
                submitter.ask()
            try:
                while len(scored.rollouts) < rollouts:
                    if submitter is not None:
                        submitter.fill()
                    num_accepted = 0 if submitter is None else submitter.num_accepted
                    if (answer := self.scoring.next(scorer)) is None:
                        if submitter is not None and submitter.has_more(num_accepted):
                            continue
                        more = False
                        break
                    if isinstance(answer, Future):
                        with span("wait for rollouts"):
                            self._wait(answer)
                        continue
                    # A greedy group has no importance ratio, and was not meant for training.
                    if answer.rollouts[0].params.greedy:
                        self.ledger.reserve([answer.group_id])
                        num_greedy += 1
                    else:
                        taken.append(answer)
                        if not scored.add(answer.rollouts):
                            count = ceil(rollouts / len(answer.rollouts))
                            self.scoring.check(scored, count)
                            # Prompts might never end. The next call continues with other ones.
                            if submitter is not None and not scored.groups and len(taken) > count:
                                self.ledger.table.remove([record.group_id for record in taken])
                                taken.clear()
                                scored.check_usable(count, self.failures + submitter.failures)
                    if submitter is not None:
                        missing = ceil((rollouts - len(scored.rollouts)) / len(answer.rollouts))
                        submitter.took(answer.group_id, missing)
                if not num_batches:
                    self.scoring.check(scored, 1)
                if submitter is not None:
                    submitter.fill()
                    self.lead = submitter.begin()
                    scored.dropped.num_unfit_examples = submitter.fitting.take_num_unfit()
                batch = scored.pack(
                    trainer_version=self._meter.trainer_version,
                    foreign_versions=self._meter.foreign_versions,
                    staleness=staleness,
                    advantages=advantages,
                )
            except BaseException:
                self.ledger.queue.put_back([record.group_id for record in taken])
                raise
            self.ledger.table.remove([record.group_id for record in taken])
            if submitter is not None:
                for record in taken:
                    submitter.examples.observe(record.rollouts)
            measure_taken(self._meter, scored, batch)
            self.dropped += scored.dropped
            left_out += scored.dropped
            if scored.groups:
                self.last_reward = scored.mean_reward
            self._nothing_to_learn.note(scored)
            if batch is not None:
                num_batches += 1
                yield batch
                measure_consumed(self._meter, batch)
        if not num_batches:
            _warn_of_no_batch(left_out, num_greedy)

    def _measure_frame(self, frame: TokenFrame) -> None:
        self._meter.frame(frame)
        self.concurrency.frame(frame.header)

    def _submitter(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | None,
        rollouts: int,
        ahead: int | Literal["auto"],
        engine: PromptEngine | None,
        adapter: str | None,
    ) -> Submitter:
        check_ahead(ahead)
        if engine is None:
            raise InflightError("this stream has no engine that receives prompts: submit them to the engine yourself")
        params = params or SamplingParams()
        check_not_greedy("params", params)
        _, unsubmitted = self._unsubmitted.pop(id(prompts), (prompts, []))
        return Submitter(
            engine,
            prompts,
            params,
            ceil(rollouts / params.n),
            ahead=ahead,
            submitted=Submitted(in_flight=self.ledger.queue.outstanding, unsubmitted=unsubmitted),
            adapter=adapter,
        )

    def close(self) -> None:
        """Stop reading, and end the threads."""
        self.thread.close()
        self.scoring.close()

    def _wait(self, answer: "Future[None]", before_waiting: Callable[[], None] | None = None) -> None:
        """Wait as long as generation takes. A thread checks that the engine is alive, and `sharing` that the ranks
        are."""
        try:
            if before_waiting is not None and not answer.done():
                before_waiting()
            while self.sharing is not None and not wait([answer], timeout=_CHECK_S).done:
                self.sharing.check()
            answer.result()
        except BaseException:
            self.ledger.leave(answer)
            raise

    async def _await(self, answer: "Future[None]") -> None:
        try:
            await asyncio.wrap_future(answer)
        except BaseException:
            self.ledger.leave(answer)
            raise

    def _groups(
        self, group_ids: Collection[int] | None, score: Score | GroupScorer | None
    ) -> "Iterator[Group | Future[None]]":
        """Yield the groups of `groups`, and futures to wait for before the next item is requested."""
        if group_ids is None:
            scorer = None if score is None else self.scoring.score_with(score)
            while (answer := self.scoring.next(scorer)) is not None:
                if isinstance(answer, GroupRecord):
                    self.ledger.table.remove([answer.group_id])
                    yield answer.rollouts
                else:
                    yield answer
            return
        if score is not None:
            raise ValueError("groups that are asked for by their ids come without rewards: leave score out")
        self.ledger.reserve(group_ids)
        wanted = set(group_ids)
        while wanted:
            if isinstance(finished := self.ledger.finished(wanted, 1), Future):
                yield finished
                continue
            for group_id in [record.group_id for record in finished]:
                # One at a time: a caller that stops in between leaves the others.
                taken = self.ledger.take([group_id])
                assert not isinstance(taken, Future)
                wanted.discard(group_id)
                yield self.texts.fill_in(taken[group_id])


def _warn_of_no_batch(left_out: Dropped, num_greedy: int) -> None:
    if num_greedy:
        reason = f"{num_greedy:,} groups were drawn greedily (temperature 0) and have no importance ratio"
    elif left_out == Dropped():
        reason = "nothing was submitted for training; call engine.submit() before, and again before each next batch"
    else:
        reason = f"all that was submitted was left out: {left_out}"
    warnings.warn(f"batches() ended without a batch: {reason}", stacklevel=4)


def _named(group_ids: Collection[int]) -> str:
    return listed(sorted(group_ids), 8)
