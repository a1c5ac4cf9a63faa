"""Teachers outside of the trainer's process: they score groups as they finish, next to generation and training.

A teacher is an engine of inflight, a server with vLLM's `prompt_logprobs`, or a function. Engines and servers score the
prompt and the tokens of a rollout as one prompt. T tokens after the prompt.
"""

import asyncio
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from inflight.core.arguments import named
from inflight.core.errors import (
    EngineBusyError,
    EngineHungError,
    InflightError,
    QueueFullError,
    TeacherError,
    VocabularyError,
)
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.waiting import SOCKET_S
from inflight.core.workers import Workers, is_async
from inflight.stream.held_groups import Group
from inflight.training.data.scoring import GroupScorer, Prepare, Reward, Score, Scorer
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS

ScoreTokens = Callable[[Sequence[Rollout], int], Any]
"""A function, plain or `async`, of rollouts and k. It returns `TeacherScores` of each rollout."""
_PAUSE_S = 1.0
"""Time before a teacher that is not available is asked again."""
_PROBE = 'The 3 quick foxes don\'t jump: {"x": [1.5, -2]}\n\tdéjà vu, 你好, привет'
"""Text with tokens of several kinds, to compare tokenizers."""
_PROBE_TOKENS = 16
"""Number of its tokens that one request compares: a tokenizer of bytes makes more of it than a server with a short
context takes."""
_LATER = (EngineBusyError, EngineHungError, QueueFullError)


class TeacherScores(NamedTuple):
    """Scores of one rollout, at temperature 1 and unfiltered."""

    logprobs: np.ndarray
    """f32[T], log π_teacher of each token after the prompt."""
    top_ids: np.ndarray | None = None
    """i32[T, k], the teacher's k likeliest tokens."""
    top_logprobs: np.ndarray | None = None
    """f32[T, k]"""


class UnavailableTeacherError(TeacherError):
    """A teacher that cannot answer now, and is asked again."""


class TeacherSource(Protocol):
    """Scores rollouts, and compares vocabularies."""

    async def score(self, rollouts: Sequence[Rollout], top_k: int) -> Sequence[TeacherScores]:
        """Return the scores of each rollout. Raises TeacherError."""
        ...

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """Raise VocabularyError if the policy has other tokens than the teacher. tokenizer: the policy's, if it has
        one. Raises TeacherError if the teacher does not answer."""
        ...


class TeacherEngine(Protocol):
    """The part of an engine that a teacher needs; `inflight.launch` and `inflight.attach` return one."""

    # Type checkers take the `cached_property` of an engine for no other type.
    @property
    def tokenizer(self) -> Any: ...
    @property
    def info(self) -> Any: ...
    async def agenerate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[Rollout]]: ...


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
        another source, and ValueError for a URL without http."""
        self.timeout_s, self.retries, self.workers = timeout_s, retries, workers
        self.source: TeacherSource
        if isinstance(source, str):
            if not source.startswith(("http://", "https://")):
                raise ValueError(f'a teacher at a server is a URL such as "http://{source}", got {source!r}')
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
        self._score = score if isinstance(score, GroupScorer) else Scorer(no_reward if score is None else score)
        self._owns_score = self._score is not score
        self.scores_cancelled = self._score.scores_cancelled
        self._calls = Scorer(
            self._ask,
            batched=True,
            workers=self._teacher.workers,
            timeout_s=self._teacher.timeout_s,
            cancelled=self.scores_cancelled,
            retries={UnavailableTeacherError: self._teacher.retries},
        )
        self._calls.scores_episodes = True

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, sampling: SamplingParams) -> None:
        """Raise ValueError for sampling parameters that a teacher outside of the trainer cannot follow, and
        VocabularyError for a teacher with other tokens than the policy."""
        _check_sampling(sampling)
        self._teacher.source.check(tokenizer, vocab_size)

    def start(self, group: Group, *, prepare: Prepare = lambda group: None) -> "Future[list[Reward]]":
        scored = self._calls.start(group, prepare=prepare)
        plain = [rollout for rollout in group if not rollout.is_of_episode]
        rewards = [self._score.start(plain, prepare=prepare)] if plain else []

        async def both() -> list[Reward]:
            of_teacher, *of_plain = await asyncio.gather(*map(asyncio.wrap_future, [scored, *rewards]))
            own = chain(*of_plain)
            given = [(rollout.reward or 0.0) if rollout.is_of_episode else next(own) for rollout in group]
            return [None if ok is None else reward for ok, reward in zip(of_teacher, given, strict=True)]

        return self._calls.run(both())

    @property
    def failures(self) -> Counter[str]:
        return self._calls.failures + self._score.failures

    @property
    def last_error(self) -> BaseException | None:
        return self._calls.last_error or self._score.last_error

    def close(self) -> None:
        self._calls.close()
        if self._owns_score:
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


class EngineSource:
    """An engine that scores rollouts next to its other prompts."""

    def __init__(self, engine: TeacherEngine):
        self._engine = engine

    async def score(self, rollouts: Sequence[Rollout], top_k: int) -> Sequence[TeacherScores]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top_k)
        try:
            groups = await self._engine.agenerate([_ids(rollout) for rollout in rollouts], params)
        except InflightError as error:
            kind = UnavailableTeacherError if isinstance(error, _LATER) else TeacherError
            raise kind(f"the teacher's engine has scored no rollout: {error}") from error
        return [_after_prompt(rollout, group[0]) for rollout, group in zip(rollouts, groups, strict=True)]

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        check_tokens(tokenizer, self._engine.tokenizer, vocab_size, self._engine.info.vocab_size)


class ServerSource:
    """A server with /v1/completions and vLLM's `prompt_logprobs`. Each rollout is one request."""

    def __init__(self, url: str, *, model: str, token: str, timeout_s: float):
        """url: with or without "/v1". model: "" takes the first that the server lists."""
        self._url, self._model, self._timeout_s = url.rstrip("/").removesuffix("/v1"), model, timeout_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._workers = Workers("teacher")

    async def score(self, rollouts: Sequence[Rollout], top_k: int) -> Sequence[TeacherScores]:
        calls = [self._workers.start(self._score, rollout, top_k) for rollout in rollouts]
        return await asyncio.gather(*map(asyncio.wrap_future, calls))

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """Compare the text of tokens with the server's. Without a tokenizer, or if the server returns no text of
        tokens, only its answer to an id at the end of the vocabulary is checked."""
        ids = [0, vocab_size - 1] if tokenizer is None else tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        try:
            parts = [[*ids[begin : begin + _PROBE_TOKENS + 1]] for begin in range(0, len(ids) - 1, _PROBE_TOKENS)]
            entries = [entry for part in parts for entry in self._prompt_logprobs(part, 0)[1:]]
        except UnavailableTeacherError:
            raise
        except TeacherError as error:
            raise VocabularyError(
                f"the teacher at {self._url} did not score tokens of the policy's vocabulary; take a teacher of the "
                f"same model family. {error}"
            ) from error
        for token_id, entry in zip(ids[1:], entries, strict=True):
            theirs = entry[str(token_id)].get("decoded_token")
            ours = None if tokenizer is None else str(tokenizer.decode([token_id]))
            # Servers show spaces and parts of characters in different ways.
            if ours is not None and theirs and "\ufffd" not in ours + theirs and _letters(ours) != _letters(theirs):
                raise VocabularyError(
                    f"token {token_id} is {ours!r} for the policy and {theirs!r} for the teacher at {self._url}; take "
                    "a teacher with the same vocabulary"
                )

    def _score(self, rollout: Rollout, top_k: int) -> TeacherScores:
        ids, first = _ids(rollout), len(rollout.prompt_token_ids)
        rows = self._prompt_logprobs(ids, top_k)[first:]
        own = [row[str(token)]["logprob"] for token, row in zip(ids[first:], rows, strict=True)]
        logprobs = np.array(own, np.float32)
        if not top_k:
            return TeacherScores(logprobs)
        # A server adds the token itself if it is not among the likeliest.
        tops = [sorted(row.items(), key=lambda item: (item[1]["rank"], -item[1]["logprob"]))[:top_k] for row in rows]
        if any(len(top) < top_k for top in tops):
            raise TeacherError(
                f"the teacher at {self._url} returned fewer than teacher_top_k={top_k} likeliest tokens; a vLLM server "
                "returns at most its --max-logprobs"
            )
        top_ids = np.array([[int(token) for token, _ in top] for top in tops], np.int32).reshape(-1, top_k)
        of_top = np.array([[entry["logprob"] for _, entry in top] for top in tops], np.float32).reshape(-1, top_k)
        return TeacherScores(logprobs, top_ids, of_top)

    def _prompt_logprobs(self, ids: list[int], top_k: int) -> list[Any]:
        """Return for each token but the first an object from token ids to log-probability, rank and text."""
        self._model = self._model or self._first_model()
        fields = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
        answer = self._call("/v1/completions", fields)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            if len(rows) != len(ids) or any(str(i) not in row for i, row in zip(ids[1:], rows[1:], strict=True)):
                raise KeyError(f"{len(rows)} entries for {len(ids)} tokens")
        except (KeyError, TypeError, IndexError) as error:
            raise TeacherError(
                f"the teacher at {self._url} answers without the prompt_logprobs of every token ({error!r}); it "
                "needs vLLM's option prompt_logprobs at /v1/completions"
            ) from error
        return rows

    def _first_model(self) -> str:
        try:
            return self._call("/v1/models", None)["data"][0]["id"]
        except (KeyError, TypeError, IndexError) as error:
            raise TeacherError(f"the teacher at {self._url} lists no model: give Teacher(…, model=…)") from error

    def _call(self, path: str, fields: Mapping[str, Any] | None) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self._url + path, body, self._headers), timeout=min(self._timeout_s, SOCKET_S)
            ) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            kind = UnavailableTeacherError if error.code in (408, 429) or error.code >= 500 else TeacherError
            text = error.read().decode(errors="replace")[:300]
            raise kind(f"the teacher at {self._url}{path} answers {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise UnavailableTeacherError(f"the teacher at {self._url}{path} does not answer: {error}") from error


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


def no_reward(rollout: Rollout) -> float:
    """Return 0, the reward of a rollout that only a teacher scores."""
    return 0.0


def check_tokens(
    ours: PreTrainedTokenizerBase | None, theirs: PreTrainedTokenizerBase | None, our_size: int, their_size: int
) -> None:
    """Raise VocabularyError if a token of the policy has another id in the teacher's vocabulary, or is missing there.
    Without both tokenizers the numbers of ids are compared."""
    if ours is None or theirs is None:
        if our_size != their_size:
            raise VocabularyError(
                f"the policy has {our_size} token ids and the teacher {their_size}, and not both have a tokenizer to "
                "compare; take a teacher with the same vocabulary"
            )
        return
    of_teacher = theirs.get_vocab()
    other = [(token, place) for token, place in ours.get_vocab().items() if of_teacher.get(token) != place]
    if other:
        token, place = min(other, key=lambda item: item[1])
        raise VocabularyError(
            f"{len(other):,} of the policy's {len(ours.get_vocab()):,} tokens are others for the teacher, such as "
            f"{token!r} with id {place}, there {of_teacher.get(token)}; take a teacher with the same vocabulary"
        )


def _letters(text: str) -> str:
    return text.strip(" \n\t▁ĠĊ")


def _ids(rollout: Rollout) -> list[int]:
    return [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]


def _after_prompt(rollout: Rollout, scored: Rollout) -> TeacherScores:
    """Return the scores of a rollout's tokens from the prompt scores of an engine. Row t is of token t + 1."""
    scores, begin = scored.prompt_scores, len(rollout.prompt_token_ids) - 1
    if scores is None:
        raise TeacherError(f"the teacher's engine ended a request with {scored.finish_reason!r} before it was scored")
    return TeacherScores(scores.logprobs[begin:], scores.top_token_ids[begin:], scores.top_logprobs[begin:])


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
