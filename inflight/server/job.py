"""One request while it is drawn, and its answer: at once, or as server-sent events."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import StreamingResponse

from inflight.core.rollout import Rollout
from inflight.server.adapters import Adapter
from inflight.server.answers import finish_reason, usage, usage_of, version_spans
from inflight.server.bodies import LAST_EVENT, event
from inflight.server.errors import as_api_error
from inflight.server.generation import Generation
from inflight.server.requests import StreamOptions
from inflight.server.served import Served
from inflight.server.shapes import ChatShape, Piece, Shape
from inflight.server.text import AnswerText


@dataclass(slots=True)
class Job:
    """One request that is being drawn."""

    served: Served
    shape: Shape
    generation: Generation
    id: str
    model: str
    adapter: Adapter | None
    began_s: float

    def head(self, kind: str = "") -> dict[str, Any]:
        """What an answer, and each of its events, begins with."""
        return {
            "id": self.id,
            "request_id": self.id,
            "object": self.shape.object + kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """The answer, of all samples."""
        pieces = [_Choice(self, index).piece(rollout) for index, rollout in enumerate(rollouts)]
        used, shape = usage(rollouts), self.shape
        self._count(used)
        answer = self.head() | {"choices": [shape.choice(piece) for piece in pieces], "usage": used} | shape.extras()
        return answer if shape.scores_choices else answer | shape.scores(rollouts[0])

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """The answer part by part. What goes wrong on the way is an event too."""
        kind = ".chunk" if isinstance(self.shape, ChatShape) else ""
        head, shape = self.head(kind), self.shape
        num_prompt, drawn, cached = sum(map(len, shape.prompts)), 0, {}
        choices: dict[int, _Choice] = {}
        try:
            for beginning in shape.beginning():
                yield event(head | beginning)
            async for index, rollout in self.generation.parts():
                if not drawn:
                    self.served.metrics.first_token_s.observe(time.monotonic() - self.began_s)
                drawn += len(rollout.token_ids)
                cached[index // shape.params.n] = rollout.prefix_tokens
                if index not in choices:
                    choices[index] = _Choice(self, index)
                delta = shape.delta(choices[index].piece(rollout))
                if delta is None:
                    continue
                chunk = head | {"choices": [delta]}
                if options.continuous_usage_stats:
                    chunk["usage"] = usage_of(num_prompt, drawn, sum(cached.values()))
                yield event(chunk)
            used = usage_of(num_prompt, drawn, sum(cached.values()))
            self._count(used)
            if options.include_usage:
                yield event(head | {"choices": [], "usage": used})
        except Exception as error:
            yield event(as_api_error(error, "a streamed answer").body)
        yield LAST_EVENT

    def _count(self, used: dict[str, Any]) -> None:
        metrics = self.served.metrics
        metrics.prompt_tokens.inc(used["prompt_tokens"])
        metrics.drawn_tokens.inc(used["completion_tokens"])
        metrics.answer_s.observe(time.monotonic() - self.began_s)


class _Choice:
    """How far one choice of an answer is."""

    def __init__(self, job: Job, index: int):
        self._job, self._index = job, index
        prompt = job.shape.prompts[index // job.shape.params.n]
        self._text = AnswerText(job.served.decoder, job.shape.rules, prompt)
        self._is_new = True
        self._versions: list[int] = []
        """Which weights drew each token, where that is told."""

    def piece(self, rollout: Rollout) -> Piece:
        """What is new of it, with the tokens that are new."""
        is_first, self._is_new = self._is_new, False
        reason, spans = finish_reason(rollout.finish_reason), None
        text = self._text.push(rollout.token_ids.tolist(), rollout.finish_reason)
        if self._job.shape.with_versions:
            self._versions += rollout.weight_versions.tolist()
            spans = version_spans(self._versions, self._job.served.updates.labels) if reason is not None else None
        return Piece(self._index, rollout, text, reason, self._text.stop_reason, is_first, spans)


class EventStream(StreamingResponse):
    """The events of a job, which is cancelled if they cannot be sent."""

    def __init__(self, job: Job, options: StreamOptions):
        self._generation, self._served = job.generation, job.served
        super().__init__(
            job.events(options),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        except asyncio.CancelledError:  # the server ends, and the client does not read
            if not self._served.ending:
                raise
        finally:
            self._generation.end()
