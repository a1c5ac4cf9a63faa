"""Teachers outside of the trainer's process: an engine of inflight, or a server with vLLM's `prompt_logprobs`.

Both score the prompt and the tokens of a rollout as one prompt. T tokens after the prompt.
"""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

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
from inflight.core.workers import Workers

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
                urllib.request.Request(self._url + path, body, self._headers), timeout=self._timeout_s
            ) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            kind = UnavailableTeacherError if error.code in (408, 429) or error.code >= 500 else TeacherError
            text = error.read().decode(errors="replace")[:300]
            raise kind(f"the teacher at {self._url}{path} answers {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise UnavailableTeacherError(f"the teacher at {self._url}{path} does not answer: {error}") from error


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
