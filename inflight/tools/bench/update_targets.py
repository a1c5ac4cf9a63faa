"""Requests to servers that `inflight bench staleness --target` measures: completions and weight updates.

vLLM needs its development mode (`VLLM_SERVER_DEV_MODE=1`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.tools.bench.served_tokens import Answer, Piece


class TargetError(InflightError):
    """A server refused or failed a request of a benchmark."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One request for `max_tokens` tokens at temperature 1."""

    prompt: list[int]
    max_tokens: int
    seed: int


class UpdateTarget(ABC):
    """A server at a URL. pause: kind of pause during an update, in the word of the server; "" does not pause."""

    pauses: Sequence[str] = ("",)

    def __init__(self, http: aiohttp.ClientSession, url: str, pause: str):
        if pause not in self.pauses:
            known = ", ".join(repr(each) for each in self.pauses)
            raise TargetError(f"pause is one of {known} for this server, not {pause!r}")
        self._http, self._url, self._pause = http, url.rstrip("/"), pause

    async def draw(self, what: Draw, answer: Answer) -> None:
        """Draw, and add each part to the answer on arrival. An answer that breaks off has `finish_reason` "error"."""
        try:
            await self._draw(what, answer)
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            answer.finish_reason = ""
        answer.finish_reason = answer.finish_reason or "error"

    @abstractmethod
    async def _draw(self, what: Draw, answer: Answer) -> None: ...

    @abstractmethod
    async def update(self, directory: Path, version: int) -> None:
        """Load the weights of this directory into the server, and wait for its confirmation."""

    async def prepare(self) -> None:
        """Check that the server is up and read its model name. Raises TargetError."""
        await self._ask("/health", method="GET")

    async def _ask(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        """Return the JSON of the response, or None without JSON. Raises TargetError if the server refuses or does not
        respond."""
        try:
            async with self._http.request(method, self._url + path, json=body) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TargetError(f"{self._url}{path} does not answer: {error!r}") from error
        if answer.status != 200:
            raise TargetError(f"{self._url}{path} answers {answer.status}: {text[:500]}")
        try:
            return json.loads(text) if text else None
        except ValueError:
            return None

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[int, Any]]:
        """Yield the server-sent events of a response with their arrival times."""
        async with self._http.post(self._url + path, json=body) as answer:
            if answer.status != 200:
                raise aiohttp.ClientError(f"{path} answers {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield now_ns(), json.loads(line[6:])


class _Completions(UpdateTarget):
    """A server with OpenAI's completions and streamed token ids as in vLLM."""

    _options: Mapping[str, Any] = {}
    """Additional fields of each request."""

    async def prepare(self) -> None:
        await super().prepare()
        self._model = (await self._ask("/v1/models", method="GET"))["data"][0]["id"]

    async def _draw(self, what: Draw, answer: Answer) -> None:
        body = {
            "model": self._model,
            "prompt": what.prompt,
            "max_tokens": what.max_tokens,
            "seed": what.seed,
            "temperature": 1.0,
            "top_p": 1.0,
            "stream": True,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **self._options,
        }
        async for time_ns, event in self._events("/v1/completions", body):
            if "error" in event:
                break
            for choice in event["choices"]:
                if tokens := choice.get("token_ids"):
                    answer.pieces.append(Piece(time_ns, tokens, choice["logprobs"]["token_logprobs"]))
                for span in choice.get("weight_versions") or ():
                    answer.labels = answer.labels or []
                    answer.labels += [span["version"]] * (span["end"] - span["start"])
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


class InflightServer(_Completions):
    """`inflight serve`. Pause "keep" needs a server with --honor-pause."""

    pauses = ("", "keep", "wait", "abort")
    _options = {"return_weight_versions": True}

    async def update(self, directory: Path, version: int) -> None:
        if self._pause:
            await self._ask(f"/pause?mode={self._pause}")
        await self._ask("/update_weights", {"weight_dir": str(directory), "weight_version": str(version)})
        if self._pause:
            await self._ask("/resume")


class VLLMServer(_Completions):
    """`vllm serve` in development mode: pause, reload from a directory, resume."""

    pauses = ("keep", "wait", "abort")

    async def update(self, directory: Path, version: int) -> None:
        await self._ask(f"/pause?mode={self._pause}&clear_cache=false")
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await self._ask("/collective_rpc", call)
        finally:
            await self._ask("/resume")


TARGETS: dict[str, type[UpdateTarget]] = {"inflight": InflightServer, "vllm": VLLMServer}
