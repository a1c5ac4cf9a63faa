"""`inflight bench staleness --target URL`: the effect of weight updates of a server on its clients and its trainer."""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from inflight.core.clock import now_ns
from inflight.tools.bench.options import StalenessOptions
from inflight.tools.bench.served_tokens import Answer, ServedTokens, Update
from inflight.tools.bench.truth_teller import TruthTeller, versions_of
from inflight.tools.bench.update_targets import TARGETS, Draw, TargetError, UpdateTarget
from inflight.tools.progress import Progress, untold

_START_S, _POLL_S = 600.0, 0.5
_ANSWER_S = 120.0
"""Maximum time without a response of the server, in seconds."""
_AGAIN_S = 0.02
"""Time between a refused request and the next one, in seconds."""


def measure(settings: StalenessOptions, progress: Progress = untold) -> dict[str, Any]:
    """Draw with `sequences` requests at a time, while the trainer publishes new weights every `interval_ms`, `steps`
    times.

    The server must serve the truth-teller in `settings.weights`. The model is written if it is missing. Raises
    TargetError if the server serves another model, refuses an update, or sends nothing for two minutes.
    """
    assert settings.target is not None
    directory = Path(settings.weights).absolute()
    truth = TruthTeller(settings.model)
    if settings.steps >= truth.num_versions:
        raise TargetError(f"{settings.model} can tell {truth.num_versions} versions apart: ask for fewer steps")
    if not (directory / "config.json").exists():
        truth.save(directory)
    copies = [directory / "updates" / name for name in ("even", "odd")]
    for copy in copies:
        truth.save(copy)
    return asyncio.run(_measure(settings, truth, directory, copies, progress))


async def _measure(
    settings: StalenessOptions, truth: TruthTeller, directory: Path, copies: list[Path], progress: Progress
) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        target = TARGETS[settings.api](http, settings.target or "", settings.pause)
        progress(f"waiting for a server of {directory} at {settings.target}")
        await _wait_for(target)
        run = _Run(settings, target, truth, copies, progress)
        await run.check_weights(directory)
        began = time.monotonic()
        await run.drive()
        seconds = time.monotonic() - began
    result = run.seen.result()
    result |= {"seconds": seconds, "tokens_per_s": result["num_tokens"] / seconds}
    return {"bench": "staleness", **asdict(settings), **result}


async def _wait_for(target: UpdateTarget) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return await target.prepare()
        except TargetError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_POLL_S)


class _Run:
    """Clients that draw, and a trainer that publishes at a fixed rate."""

    def __init__(
        self,
        settings: StalenessOptions,
        target: UpdateTarget,
        truth: TruthTeller,
        copies: list[Path],
        progress: Progress,
    ):
        self._settings, self._target, self._truth, self._copies = settings, target, truth, copies
        self._progress = progress
        self._rng = np.random.default_rng(settings.seed)
        self._finished: list[Answer] = []
        self.seen = ServedTokens(exact=settings.dtype == "float32")

    async def check_weights(self, directory: Path) -> None:
        """Check that the server draws by version 0 of this truth-teller."""
        await asyncio.to_thread(self._write, 0)
        await self._target.update(self._copies[0], 0)
        answer = Answer()
        await self._target.draw(self._next(), answer)
        if not answer.ended_by_itself or versions_of(answer.token_ids).any():
            raise TargetError(
                f"the server at {self._settings.target} does not draw by the weights in {directory}: start it with "
                f"that directory as its model, of shape {self._settings.model} (it drew "
                f"{answer.token_ids[:8].tolist()}, and ended with {answer.finish_reason!r})"
            )

    async def drive(self) -> None:
        """Publish all versions while clients draw, and draw for one interval more."""
        clients = [asyncio.ensure_future(self._client()) for _ in range(self._settings.sequences)]
        trainer = asyncio.ensure_future(self._train())
        try:
            done, _ = await asyncio.wait([trainer, *clients], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a client ends only with an error
        finally:
            for task in (trainer, *clients):
                task.cancel()
            await asyncio.gather(trainer, *clients, return_exceptions=True)

    async def _client(self) -> None:
        while True:
            answer = Answer()
            self.seen.answers.append(answer)
            await self._target.draw(self._next(), answer)
            if answer.ended_by_itself:
                self._finished.append(answer)
            elif not answer.pieces:
                await asyncio.sleep(_AGAIN_S)

    async def _train(self) -> None:
        interval_s, next_s = self._settings.interval_ms / 1e3, time.monotonic()
        for version in range(1, self._settings.steps + 1):
            self._progress(f"update {version} of {self._settings.steps}", (version - 1) / self._settings.steps)
            await asyncio.to_thread(self._write, version)
            next_s = max(next_s + interval_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            taken, self._finished = self._finished, []
            self.seen.consumed(taken, time_ns=now_ns(), trainer_version=version - 1)
            called_ns = now_ns()
            self.seen.called(version, called_ns)
            await self._target.update(self._copies[version % 2], version)
            self.seen.updates.append(Update(version, called_ns, now_ns()))
        await asyncio.sleep(interval_s)

    def _write(self, version: int) -> None:
        self._truth.teach(version)
        self._truth.save_weights(self._copies[version % 2])

    def _next(self) -> Draw:
        prompt = self._rng.integers(1, self._truth.num_versions, self._settings.prompt_tokens).tolist()
        return Draw(prompt, self._settings.tokens, int(self._rng.integers(1 << 31)))
