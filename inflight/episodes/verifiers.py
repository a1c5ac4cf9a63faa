"""A rollout function that plays an environment of verifiers 0.4, whose agents draw at the endpoint of the session."""

import asyncio
import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from inflight.core.errors import InflightError
from inflight.core.extras import needing
from inflight.episodes.episodes import RolloutFunction
from inflight.episodes.limits import Reward
from inflight.episodes.reply import Reply
from inflight.episodes.session import Session

logger = logging.getLogger(__name__)

_NO_KEY = "INFLIGHT_NO_KEY"
"""Variable that is not set: verifiers must not send the user's own key."""


def verifiers_rollout(env: Any) -> RolloutFunction:
    """Return a rollout function for an environment of verifiers 0.4, such as `vf.load_environment(config)`. Needs the
    extra `verifiers`.

    A row is a `vf.Task` of `env.taskset`, or its data as a mapping, `task.data.model_dump(mode="json")`. The rewards of
    an agent's trace are added to its last turn, by name if only one agent draws. An agent with another client, such as
    a judge, is not trained. An episode that is not `ok` raises its last error, as the class of verifiers with that
    name. Retries of `env` and of its agents are not used. The environment serves one `Episodes`, until it is closed.
    """
    with needing("verifiers", "verifiers_rollout"):
        vf: Any = import_module("verifiers.v1")
    served, task_type = _Served(env), env.taskset.task_type()

    async def rollout(session: Session, row: Any) -> Reward:
        task = row
        if not isinstance(row, task_type):
            task = task_type(task_type.data_type().model_validate(row), env.config.taskset.task)
        endpoint = await session.endpoint()
        await served.ready()
        context = vf.ModelContext("inflight", vf.EvalClientConfig(base_url=endpoint.shared_url, api_key_var=_NO_KEY))
        replies: dict[str, Sequence[Reply]] = {}
        discarded: list[Any] = []

        def begin(trace: Any) -> None:
            replies[trace.id] = endpoint.accept(trace.id)

        episode = await env.run_episode(task, context, on_trace=begin, on_discard=discarded.append)
        if not episode.ok:
            raise _error_of(vf, episode)
        if discarded:
            raise InflightError(
                "an agent has repeated its run, and the tokens of both runs are in the episode; set `retries` of its "
                "AgentConfig to 0, and use Episodes(retries=…)"
            )
        return _reward(session, [trace for trace in episode.traces if replies[trace.id]], replies)

    return rollout


def _reward(session: Session, traces: Sequence[Any], replies: dict[str, Sequence[Reply]]) -> Reward:
    """Return the rewards of a single trace by name, or add the rewards of several traces to their last turns. traces:
    all that have turns of the session."""
    for trace in traces:
        if not trace.agent.trainable:
            raise InflightError(
                f"agent {trace.agent.name!r} is not trainable, and the policy has drawn for it; give it another "
                "client (AgentConfig.client)"
            )
        if not trace.rewards:
            raise InflightError(
                f"the episode of {trace.task.type} has no reward; give the task a method with @vf.reward"
            )
    parts = [{name: part.value for name, part in trace.rewards.items() if part is not None} for trace in traces]
    if len(traces) == 1:
        return parts[0]
    for trace, part in zip(traces, parts, strict=True):
        session.reward(sum(part.values()), replies[trace.id][-1])
    return None


def _error_of(vf: Any, episode: Any) -> Exception:
    """Return the last error of an episode that has failed, with the traceback of verifiers as a note."""
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if not errors:
        return InflightError("verifiers has ended an episode as not ok, without an error")
    kind = getattr(vf, errors[-1].type, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        failure = kind(errors[-1].message)
    else:
        failure = InflightError(f"{errors[-1].type}: {errors[-1].message}")
    failure.add_note(errors[-1].traceback or "")
    return failure


class _Served:
    """The servers of an environment. They run as a task of the event loop of the episodes, until it is cancelled."""

    def __init__(self, env: Any):
        self._env = env
        self._begun: tuple[asyncio.Future[None], asyncio.Task[None]] | None = None
        """A future of the start, and the task."""

    async def ready(self) -> None:
        """Return when the environment serves. Raises the exception of its start."""
        loop = asyncio.get_running_loop()
        if self._begun is None or self._begun[1].done():
            started: asyncio.Future[None] = loop.create_future()
            self._begun = started, loop.create_task(self._serve(started))
        started, task = self._begun
        if task.get_loop() is not loop:
            raise InflightError("an environment of verifiers serves one Episodes; load it again for the other one")
        await asyncio.shield(started)

    async def _serve(self, started: "asyncio.Future[None]") -> None:
        try:
            async with self._env.serving():
                started.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if started.done():
                logger.exception("the servers of an environment of verifiers have failed")
            else:
                started.set_exception(error)
