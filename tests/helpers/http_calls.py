"""Plain HTTP requests to a server."""

import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams


def call(
    server: Any, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """The status, and the JSON or the text of the answer. server: has a `url`; body: JSON-like, or bytes."""
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.url}{path}", data, {"Content-Type": "application/json", **(headers or {})}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(text) if is_json else text.decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def answered(prompt: list[int], choice: dict[str, Any]) -> Rollout:
    """The rollout that a choice of /v1/completions with token ids and log-probabilities tells of."""
    ids, logprobs = np.array(choice["token_ids"]), np.array(choice["logprobs"]["token_logprobs"])
    none = np.zeros(0)
    return Rollout(0, 0, 0, SamplingParams(), {}, np.array(prompt), ids, logprobs, none, none, choice["finish_reason"])
