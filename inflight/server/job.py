"""One request while it is drawn, and its answer: at once, or as server-sent events."""

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
        pieces = [_piece(index, rollout, _Progress(self.shape, self.served)) for index, rollout in enumerate(rollouts)]
        used = usage(rollouts)
        self._count(used)
        choices = [self.shape.choice(piece) for piece in pieces]
        more = self.shape.extras() | self.shape.of_prompt(rollouts)
        return self.head() | {"choices": choices, "usage": used} | more

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """The answer part by part. What goes wrong on the way is an event too."""
        kind = ".chunk" if isinstance(self.shape, ChatShape) else ""
        head, shape = self.head(kind), self.shape
        num_prompt, drawn, cached = sum(map(len, shape.prompts)), 0, {}
        progress: dict[int, _Progress] = {}
        try:
            for beginning in shape.beginning():
                yield event(head | beginning)
            async for index, rollout in self.generation.parts():
                if not drawn:
                    self.served.metrics.first_token_s.observe(time.monotonic() - self.began_s)
                drawn += len(rollout.token_ids)
                cached[index // shape.params.n] = rollout.prefix_tokens
                piece = _piece(index, rollout, progress.setdefault(index, _Progress(shape, self.served)))
                choice = shape.delta(piece)
                if choice is None:
                    continue
                chunk = head | {"choices": [choice]}
                if options.continuous_usage_stats:
                    chunk["usage"] = usage_of(num_prompt, drawn, sum(cached.values()))
                yield event(chunk)
            used = usage_of(num_prompt, drawn, sum(cached.values()))
            self._count(used)
            if options.include_usage:
                yield event(head | {"choices": [], "usage": used})
        except Exception as error:
            yield event(as_api_error(error).body)
        yield LAST_EVENT

    def _count(self, used: dict[str, Any]) -> None:
        metrics = self.served.metrics
        metrics.prompt_tokens.inc(used["prompt_tokens"])
        metrics.drawn_tokens.inc(used["completion_tokens"])
        metrics.answer_s.observe(time.monotonic() - self.began_s)


class _Progress:
    """How far the answer of one choice is."""

    def __init__(self, shape: Shape, served: Served):
        self.text = AnswerText(served.decoder, shape.rules)
        self.labels = served.updates.labels
        self.versions: list[int] = []
        self.with_versions = shape.with_versions
        self.num_tokens = 0


def _piece(index: int, rollout: Rollout, progress: _Progress) -> Piece:
    first = not progress.num_tokens
    reason = finish_reason(rollout.finish_reason)
    progress.num_tokens += len(rollout.token_ids)
    text = progress.text.push(rollout.token_ids.tolist(), rollout.finish_reason)
    spans = None
    if progress.with_versions:
        progress.versions += rollout.weight_versions.tolist()
        spans = version_spans(progress.versions, progress.labels) if reason is not None else None
    return Piece(index, rollout, text, reason, progress.text.stop_reason, first, spans)


class EventStream(StreamingResponse):
    """The events of a job, which is cancelled if they cannot be sent."""

    def __init__(self, job: Job, options: StreamOptions):
        self._generation = job.generation
        super().__init__(
            job.events(options),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._generation.end()
