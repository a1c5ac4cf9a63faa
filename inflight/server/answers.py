"""Parts of responses, in the formats of OpenAI and vLLM."""

import base64
import io
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from inflight.chat.text import TextDecoder
from inflight.core.rollout import Rollout, SamplingMask
from inflight.server.responses import ApiError

Name = Callable[[int], str]
"""Returns the text of a token, or its id as text."""
_LEAST_LOGPROB = -9999.0
"""Number that vLLM writes for −inf, since JSON has no −inf."""
_MOST_ID_CHARACTERS = 128
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "": None}


def new_id(kind: str, given: str | None) -> str:
    """Return the id of a response. `given` is the client's id, from the body or the X-Request-Id header."""
    return f"{kind}-{client_id(given or uuid.uuid4().hex)}"


def client_id(given: str) -> str:
    """Return the part of a client's id that the id of its response contains."""
    return given[:_MOST_ID_CHARACTERS]


def finish_reason(reason: str) -> str | None:
    """Return the finish reason of a sample. Raises ApiError for a sample that the engine could not continue."""
    if reason == "error":
        raise ApiError(500, "the engine could not finish a sample: its logits were not finite, or its tokens were lost")
    return _FINISH_REASONS[reason]


def usage(prompt_tokens: int, drawn: int, cached: int) -> dict[str, Any]:
    """Return the `usage` object. A prompt counts once for all its samples."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": drawn,
        "total_tokens": prompt_tokens + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_message(content: str, reasoning: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message of a whole chat reply."""
    message = {"role": "assistant", "content": content or (None if calls else "")} | reasoned(reasoning)
    return message | {"tool_calls": list(calls)} if calls else message


def chat_delta(content: str, reasoning: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a part of a streamed chat reply. Each tool call has its index."""
    delta: dict[str, Any] = reasoned(reasoning) | ({"content": content} if content else {})
    return delta | {"tool_calls": [{**call, "index": i} for i, call in enumerate(calls)]} if calls else delta


def chat_finish_reason(reason: str | None, calls: Sequence[Any]) -> str | None:
    """Return the finish reason of a chat reply with these tool calls."""
    return "tool_calls" if calls and reason == "stop" else reason


def reasoned(reasoning: str) -> dict[str, Any]:
    """Return reasoning under both names that clients read."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def version_spans(versions: Sequence[int], labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return half-open spans of tokens that were drawn by one version each. labels: names of versions."""
    spans, begin = [], 0
    for version, run in groupby(versions):
        end = begin + len(list(run))
        spans.append({"version": labels.get(version, str(version)), "start": begin, "end": end})
        begin = end
    return spans


def completion_logprobs(rollout: Rollout, name: Name, *, offset: int) -> dict[str, list[Any]]:
    """Return the `logprobs` object of /v1/completions: the requested most likely tokens, and always the drawn token.
    offset: number of characters before these tokens."""
    return _named_logprobs(rollout.token_ids, _finite(rollout.logprobs.tolist()), _tops(rollout), name, offset)


def prompt_logprobs(rollout: Rollout, decoder: TextDecoder, top: int) -> list[dict[str, Any] | None] | None:
    """Return, for each prompt token but the first, its log-probability and rank, and the same for the `top` most likely
    tokens, by id. None if the sample was cancelled before its prompt was computed."""
    if (scores := rollout.prompt_scores) is None:
        return None

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, dict[str, Any]]:
        return {str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": decoder.token(token_id)}}

    told: list[dict[str, Any] | None] = [None]
    own = zip(
        rollout.prompt_token_ids[1:].tolist(), _finite(scores.logprobs.tolist()), scores.ranks.tolist(), strict=True
    )
    for (token_id, logprob, rank), tops in zip(own, _rows(scores.top_token_ids, scores.top_logprobs), strict=True):
        of_one = entry(token_id, logprob, rank)
        for place, (each, likelihood) in enumerate(tops[:top], 1):
            of_one |= entry(each, likelihood, place) if each != token_id else {}
        told.append(of_one)
    return told


def echoed_logprobs(rollout: Rollout, name: Name, top: int) -> dict[str, list[Any]]:
    """Return the object of `completion_logprobs` for prompt tokens. The entry of the first token is None. So are all
    entries if the sample was cancelled before its prompt was computed."""
    logprobs: list[float | None] = [None] * len(rollout.prompt_token_ids)
    tops: list[list[tuple[int, float]]] = [[]] * len(logprobs)
    if (scores := rollout.prompt_scores) is not None:
        logprobs[1:] = _finite(scores.logprobs.tolist())
        tops[1:] = [likeliest[:top] for likeliest in _rows(scores.top_token_ids, scores.top_logprobs)]
    return _named_logprobs(rollout.prompt_token_ids, logprobs, tops, name, 0)


def _named_logprobs(
    token_ids: np.ndarray,
    logprobs: list[float] | list[float | None],
    tops: Iterable[list[tuple[int, float]]],
    name: Name,
    offset: int,
) -> dict[str, list[Any]]:
    tokens = [name(i) for i in token_ids.tolist()]
    likeliest = [
        None if logprob is None else {token: logprob} | {name(i): p for i, p in top}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
    offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}


def chat_logprobs(rollout: Rollout, name: Name) -> dict[str, Any]:
    """Return the `logprobs` object of /v1/chat/completions. Each entry has the id of the token, and its text or
    name."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = name(token_id)
        return {"token": token, "token_id": token_id, "logprob": logprob, "bytes": list(token.encode())}

    drawn = zip(rollout.token_ids.tolist(), _finite(rollout.logprobs.tolist()), _tops(rollout), strict=True)
    return {"content": [entry(i, p) | {"top_logprobs": [entry(*each) for each in top]} for i, p, top in drawn]}


def token_id_name(token_id: int) -> str:
    """Return the name of a token that is not written as text."""
    return f"token_id:{token_id}"


def npy(array: np.ndarray) -> str:
    """Encode an array as base64 of NumPy's file format."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def kept_tokens(mask: SamplingMask | None) -> list[list[int] | None] | None:
    """Return the ids that the filters kept at each position; None for the whole vocabulary."""
    if mask is None:
        return None
    parts = mask.split()
    sizes = np.zeros(len(parts), np.int64) if mask.cut_from is None else mask.cut_from
    kept: list[list[int] | None] = []
    for part, size in zip(parts, sizes.tolist(), strict=True):
        ids: Sequence[int] = np.setdiff1d(np.arange(size), part).tolist() if size else part.tolist()
        kept.append(list(ids) or None)
    return kept


def _tops(rollout: Rollout) -> Iterable[list[tuple[int, float]]]:
    if "top_logprobs" not in rollout.columns:
        return ([] for _ in range(len(rollout.token_ids)))
    return _rows(rollout.columns["top_token_ids"], rollout.columns["top_logprobs"])


def _rows(top_token_ids: np.ndarray, top_logprobs: np.ndarray) -> Iterable[list[tuple[int, float]]]:
    """Yield the most likely tokens of each position, with their log-probabilities."""
    rows = zip(top_token_ids.tolist(), top_logprobs.tolist(), strict=True)
    return ([(i, p) for i, p in zip(ids, _finite(ps), strict=True) if i >= 0] for ids, ps in rows)


def _finite(logprobs: list[float]) -> list[float]:
    return [p if math.isfinite(p) else _LEAST_LOGPROB for p in logprobs]
