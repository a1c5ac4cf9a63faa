"""A teacher outside of the trainer's process scores groups as they finish, next to generation and training."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from inflight.core.arguments import named
from inflight.core.errors import TeacherError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.workers import Workers, is_async
from inflight.stream.held_groups import Group
from inflight.training.data.scoring import GroupScorer, Prepare, Reward, Score, Scorer
from inflight.training.data.teacher_sources import (
    EngineSource,
    ServerSource,
    TeacherScores,
    TeacherSource,
    UnavailableTeacherError,
)
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS

ScoreTokens = Callable[[Sequence[Rollout], int], Any]
"""A function, plain or `async`, of rollouts and k. It returns `TeacherScores` of each rollout."""
_PAUSE_S = 1.0
"""Time before a teacher that is not available is asked again."""


@named()
class Teacher:
    """A teacher outside of the trainer's process, and the way it is called.

        Teacher(engine)                                  # of inflight.launch or inflight.attach
        Teacher("http://host:8000", model="Qwen/…")      # vLLM, inflight serve, or a server with their prompt_logprobs
        Teacher(score, timeout_s=30)                     # a function of rollouts and k

    It scores the rollouts of a group as soon as the group has finished. If that fails, or takes longer than
    `timeout_s`, the rollouts are left out of training and counted, as with a `Scorer`.
    """

    def __init__(
        self,
        source: Any,
        *,
        model: str = "",
        token: str = "",
        timeout_s: float = 120.0,
        retries: int = 3,
        workers: int = 16,
    ):
        """source: an engine, the URL of a server, or a function of rollouts and k that returns `TeacherScores`. model:
        the name of the model at a server; "" takes the first that it lists. token: of a server that needs one.
        timeout_s: limit of one try for a group. retries: maximum number of further tries for a group if the teacher is
        not available, with a pause of a second. workers: groups that are scored at the same time. Raises TypeError for
        another source."""
        self.timeout_s, self.retries, self.workers = timeout_s, retries, workers
        self.source: TeacherSource
        if isinstance(source, str):
            self.source = ServerSource(source, model=model, token=token, timeout_s=timeout_s)
        elif hasattr(source, "agenerate"):
            self.source = EngineSource(source)
        elif callable(source):
            self.source = _FunctionSource(source)
        else:
            raise TypeError(
                f"a teacher is an engine, the URL of a server, or a function of rollouts and k, got {source!r}"
            )


@named()
class TeacherScorer(GroupScorer):
    """Scores the tokens of groups by a teacher, and computes their rewards at the same time.

        engine.stream.batches(score=TeacherScorer(teacher, score), …)

    `grpo(…, teacher=…)` makes it. `Rollout.columns` gets the teacher's log-probabilities under the names in
    `training.objective.distillation`. A rollout that the teacher has not scored has no reward.
    """

    scores_episodes = True

    def __init__(self, teacher: Any, score: Score | GroupScorer | None = None, *, top_k: int = 0):
        """teacher: a `Teacher`, or its source. score: None: the reward is 0, and the reward of an episode is its own.
        top_k: the `teacher_top_k` of the objective."""
        self._teacher, self._top_k = teacher if isinstance(teacher, Teacher) else Teacher(teacher), top_k
        self._score = score if score is None or isinstance(score, GroupScorer) else Scorer(score)
        self._owns_score = self._score is not score
        self.scores_cancelled = self._score is not None and self._score.scores_cancelled
        self._calls = _Calls(
            self._ask,
            batched=True,
            workers=self._teacher.workers,
            timeout_s=self._teacher.timeout_s,
            cancelled=self.scores_cancelled,
            retries={UnavailableTeacherError: self._teacher.retries},
        )

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, sampling: SamplingParams) -> None:
        """Raise ValueError for sampling parameters that a teacher outside of the trainer cannot follow, and
        VocabularyError for a teacher with other tokens than the policy."""
        _check_sampling(sampling)
        self._teacher.source.check(tokenizer, vocab_size)

    def wants(self, rollout: Rollout) -> bool:
        return rollout.is_of_episode or super().wants(rollout)

    def start(self, group: Group, *, prepare: Prepare = lambda group: None) -> "Future[list[Reward]]":
        scored = self._calls.start(group, prepare=prepare)
        plain = [rollout for rollout in group if not rollout.is_of_episode]
        rewards = None if self._score is None or not plain else self._score.start(plain, prepare=prepare)

        async def both() -> list[Reward]:
            parts = [asyncio.wrap_future(part) for part in (scored, rewards) if part is not None]
            of_teacher, *others = await asyncio.gather(*parts)
            own = iter(others[0] if others else [0.0] * len(plain))
            given = [(rollout.reward or 0.0) if rollout.is_of_episode else next(own) for rollout in group]
            return [None if ok is None else reward for ok, reward in zip(of_teacher, given, strict=True)]

        return self._calls.run(both())

    @property
    def failures(self) -> Counter[str]:
        return self._calls.failures + (Counter() if self._score is None else self._score.failures)

    @property
    def last_error(self) -> BaseException | None:
        return self._calls.last_error or (None if self._score is None else self._score.last_error)

    def close(self) -> None:
        self._calls.close()
        if self._score is not None and self._owns_score:
            self._score.close()

    async def _ask(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Fill in the columns of rollouts. Raises TeacherError."""
        for params in {id(rollout.params): rollout.params for rollout in rollouts}.values():
            _check_sampling(params)
        try:
            scores = await self._teacher.source.score(rollouts, self._top_k)
        except UnavailableTeacherError:
            await asyncio.sleep(_PAUSE_S)
            raise
        if len(scores) != len(rollouts):
            raise TeacherError(f"the teacher returned {len(scores)} scores for {len(rollouts)} rollouts")
        columns = [_columns(rollout, of_one, self._top_k) for rollout, of_one in zip(rollouts, scores, strict=True)]
        for rollout, of_one in zip(rollouts, columns, strict=True):
            rollout.columns |= of_one
        return [0.0] * len(rollouts)


class _Calls(Scorer):
    """Calls of a teacher. Episodes are scored however they ended."""

    def wants(self, rollout: Rollout) -> bool:
        return rollout.is_of_episode or super().wants(rollout)


class _FunctionSource:
    """A teacher that the user wrote."""

    def __init__(self, function: ScoreTokens):
        self._function, self._workers = function, Workers("teacher")

    async def score(self, rollouts: Sequence[Rollout], top_k: int) -> Sequence[TeacherScores]:
        if is_async(self._function):
            return await self._function(rollouts, top_k)
        return await asyncio.wrap_future(self._workers.start(self._function, rollouts, top_k))

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """Do nothing: the function has no vocabulary to compare."""


def _columns(rollout: Rollout, scores: TeacherScores, top_k: int) -> dict[str, np.ndarray]:
    """Return the columns of a rollout. Raises TeacherError for scores of other shapes or that are not
    finite, and for negative ids."""
    length = len(rollout.token_ids)
    found: dict[str, tuple[Any, Any, tuple[int, ...]]] = {LOGPROBS: (scores.logprobs, np.float32, (length,))}
    if top_k:
        found[TOP_IDS] = scores.top_ids, np.int32, (length, top_k)
        found[TOP_LOGPROBS] = scores.top_logprobs, np.float32, (length, top_k)
    columns = {name: np.asarray(values, dtype) for name, (values, dtype, _) in found.items()}
    for name, (_, _, shape) in found.items():
        if columns[name].shape != shape or not np.isfinite(columns[name]).all():
            raise TeacherError(
                f"the teacher's {name} of rollout {rollout.request_id} must be finite numbers {list(shape)}, one for "
                f"each token after the prompt, got {columns[name].dtype}{list(columns[name].shape)}"
            )
    if top_k and (columns[TOP_IDS] < 0).any():
        raise TeacherError(
            f"the teacher's {TOP_IDS} of rollout {rollout.request_id} contain negative numbers, which are not tokens"
        )
    return columns


def _check_sampling(params: SamplingParams) -> None:
    """Raise ValueError if the policy draws from another distribution than the one that a teacher compares with."""
    if params.temperature != 1 or params.filtered or params.adjusted:
        raise ValueError(
            "a teacher outside of the trainer's process scores at temperature 1, over the whole vocabulary: sample "
            "with temperature=1 and without top_k, top_p, min_p, penalties and biases, or give the teacher as a "
            f"module (teacher=model); got {params}"
        )
