"""Rollout functions that play environments of Gymnasium, skyrl-gym, TextArena and OpenEnv. Their packages are not
imported. The attribute `on_restart` of an environment ("replay", "load" or "drop") decides about its episodes after a
restart of the trainer (`OnRestart`)."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from itertools import zip_longest
from types import MethodType
from typing import Any, Literal

from inflight.core.errors import InflightError, QueueFullError
from inflight.core.extras import needing
from inflight.core.rollout import Rollout, samples_of
from inflight.core.waiting import Wait
from inflight.episodes.calls import on_restart_of
from inflight.episodes.episodes import RolloutFunction
from inflight.episodes.limits import EpisodeEnd
from inflight.episodes.reply import Reply
from inflight.episodes.segment import Message
from inflight.episodes.session import Session
from inflight.training.data.advantages import per_group, rloo_advantages

_CAPACITY_S = 0.5
"""Time between two questions to a server without a free environment."""
MakeEnvironment = Callable[[Any], Any]
"""Makes an environment from the row of an episode. It is called in a thread."""


def gym_rollout(
    make_env: MakeEnvironment,
    *,
    to_messages: Callable[[Any], Sequence[Message]] | None = None,
    to_action: Callable[[Reply], Any] | None = None,
) -> RolloutFunction:
    """Return a rollout function for environments of Gymnasium: `reset(seed=, options=) -> (observation, info)`,
    `step(action) -> (observation, reward, terminated, truncated, info)`, and `close()`.

    Every reply is an action, and its reward is a reward of that turn. `reset` gets the seed and the options that the
    row has as a mapping. Without a seed, the seed is the number of the group, so that its episodes begin alike.
    to_messages: returns the messages of an observation; None: an observation is text, the message of a user. to_action:
    returns the action of a reply; None: its content. If an environment is truncated, the episode ends by the reason
    "max_steps", and `Limits.at_limit` decides about its reward.
    """
    to_messages, to_action = to_messages or _as_user, to_action or (lambda reply: reply.content)

    async def rollout(session: Session, row: Any) -> None:
        async with _opened(session, make_env, row) as env:
            options = row.get("options") if isinstance(row, Mapping) else None
            observation, _ = await env.call("reset", seed=_seed_of(session, row), options=options)
            messages: list[Message] = []
            while True:
                messages += to_messages(observation)
                reply = await session.chat(messages)
                observation, reward, terminated, truncated, _ = await env.call("step", to_action(reply))
                session.reward(reward)
                if terminated:
                    return
                if truncated:
                    raise EpisodeEnd("max_steps")
                messages.append(reply.message)

    return rollout


def skyrl_rollout(make_env: MakeEnvironment) -> RolloutFunction:
    """Return a rollout function for environments of skyrl-gym (`BaseTextEnv`): `init(prompt) -> (messages, info)`,
    `step(action) -> {"observations": messages, "reward": …, "done": …}`, and `close()`.

    `init` gets row["prompt"], and `step` the whole text of a reply with its thoughts and calls. Raises InflightError if
    `postprocessed_action` differs from this text: the environment would have judged other tokens than the drawn ones.
    """

    async def rollout(session: Session, row: Mapping[str, Any]) -> None:
        async with _opened(session, make_env, row) as env:
            first, _ = await env.call("init", list(row["prompt"]))
            messages: list[Message] = list(first)
            while True:
                reply = await session.chat(messages)
                step = await env.call("step", reply.text)
                if step.get("postprocessed_action") not in (None, reply.text):
                    raise InflightError(
                        f"{env.name} has changed the drawn text: postprocessed_action is "
                        f"{step['postprocessed_action']!r}, and the policy drew {reply.text!r}; end a turn with "
                        "SamplingParams.stop instead"
                    )
                session.reward(step["reward"])
                if step["done"]:
                    return
                messages += [reply.message, *step["observations"]]

    return rollout


def textarena_rollout(make_env: MakeEnvironment, *, num_players: int = 2) -> RolloutFunction:
    """Return a rollout function for games of TextArena: `reset(num_players=, seed=)`,
    `get_observation() -> (player, observation)`, `step(action) -> (done, info)`, and `close() -> (rewards, info)`.

    The policy plays all players. Each player has its own conversation, and so its own token sequence; its messages are
    the observations that are new to it. An observation is a list of (sender, text, …), as games with "-raw" in their
    name return it, or the text of all observations so far. At the end each player's reward is added to its last turn:
    train with `GRPOConfig(advantages=player_advantages)`, which compares the players separately. The seed is as in
    `gym_rollout`; TextArena seeds the random numbers of the whole process with it.
    """

    async def rollout(session: Session, row: Any) -> None:
        conversations: dict[int, list[Message]] = defaultdict(list)
        last: dict[int, Reply] = {}
        seen: dict[int, str] = defaultdict(str)
        async with _opened(session, make_env, row) as env:
            await env.call("reset", num_players=num_players, seed=_seed_of(session, row))
            done = False
            while not done:
                player, observation = await env.call("get_observation")
                if isinstance(observation, str):
                    new, seen[player] = observation.removeprefix(seen[player]), observation
                else:
                    others = [(sender, text) for sender, text, *_ in observation if sender != player]
                    new = "\n".join(text if sender < 0 else f"[Player {sender}] {text}" for sender, text in others)
                messages = conversations[player]
                messages.append({"role": "user", "content": new})
                reply = last[player] = await session.chat(messages)
                messages.append(reply.message)
                done, _ = await env.call("step", reply.content)
            rewards, _ = await session.call(env.close)
            if not rewards:
                raise InflightError(f"{env.name} has returned no rewards from close()")
            for player, reply in last.items():
                session.reward(rewards[player], reply)

    return rollout


def openenv_rollout(
    url: str | Callable[[Any], str],
    *,
    to_messages: Callable[[Any], Sequence[Message]],
    to_action: Callable[[Reply], Mapping[str, Any]],
    on_restart: Literal["replay", "drop"] = "replay",
) -> RolloutFunction:
    """Return a rollout function for a server of OpenEnv 0.10. Each episode has its own WebSocket, and so its own
    environment. Needs the extra `openenv`.

    url: address of the server, such as "http://host:8000", or a function that returns it for a row. to_messages:
    returns the messages of an observation, a mapping. to_action: returns the fields of the action for a reply. Each
    step rewards its turn. `reset` gets the row's "options" and the seed, as in `gym_rollout`, and tries again while the
    server has no free environment (`max_concurrent_envs`, 1 by default), for `Limits.call_s` at most. An error of the
    server raises InflightError. on_restart: "replay" sends the messages of an episode to a new environment after a
    restart of the trainer. "drop" ends the episode. Raises ValueError for others.
    """
    if on_restart not in ("replay", "drop"):
        raise ValueError(f'on_restart must be "replay" or "drop", got {on_restart!r}')

    async def rollout(session: Session, row: Any) -> None:
        env = _OpenEnv(url(row) if callable(url) else url, on_restart)
        options = row.get("options") or {} if isinstance(row, Mapping) else {}
        try:
            data = await session.call(env.reset, {"seed": _seed_of(session, row), **options})
            messages: list[Message] = []
            while not data.get("done"):
                messages += to_messages(data["observation"])
                reply = await session.chat(messages)
                data = await session.call(env.request, "step", dict(to_action(reply)))
                session.reward(data.get("reward") or 0.0)
                messages.append(reply.message)
        finally:
            await session.clean_up(env.close)

    return rollout


class _OpenEnv:
    """A WebSocket of a server of OpenEnv: one environment. Calls have the limits of `Session.call`."""

    def __init__(self, url: str, on_restart: str):
        self.on_restart = on_restart
        with needing("openenv", "openenv_rollout"):
            import aiohttp

        self.url, self._http = f"{url.rstrip('/')}/ws", aiohttp.ClientSession()
        self._socket: Any = None

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Connect, and begin an episode. Waits while the server has no free environment."""
        waited = Wait()
        while True:
            self._socket = await self._http.ws_connect(self.url)
            try:
                return await self.request("reset", data)
            except QueueFullError:
                await self._socket.close()
            waited.tell(f"{self.url} has no free environment; Episodes(max_running=…) bounds the episodes in progress")
            await asyncio.sleep(_CAPACITY_S)
            waited.tick()

    async def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the observation that answers a message. Raises InflightError."""
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        try:
            answer = message.json()
            data = dict(answer["data"])
            if answer["type"] == "observation" and "observation" in data:
                return data
            code, text = data["code"], data["message"]
        except (ValueError, TypeError, KeyError) as error:
            raise InflightError(f"{self.url} answered {kind} by {message.type.name}, not an observation") from error
        raise (QueueFullError if code == "CAPACITY_REACHED" else InflightError)(f"{self.url}: {kind}: {code}: {text}")

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        await self._http.close()


@per_group
def player_advantages(groups: Sequence[Sequence[Rollout]]) -> list[float]:
    """Return an advantage for each token sequence: the sum of its rewards, relative to the mean of the same sequence
    (the first, the second, …) in the other episodes of its group (RLOO). For `GRPOConfig(advantages=…)` with
    `textarena_rollout`, in which each player has one sequence and the first players move in the same order."""
    of_players = [rollouts for group in groups for rollouts in zip_longest(*samples_of(group))]
    compared = [[rollout for rollout in rollouts if rollout is not None] for rollouts in of_players]
    sums = [[sum(turn.reward or 0.0 for turn in rollout.turns) for rollout in rollouts] for rollouts in compared]
    in_order = [id(rollout) for rollouts in compared for rollout in rollouts]
    found = dict(zip(in_order, rloo_advantages(sums), strict=True))
    return [found[id(rollout)] for group in groups for rollout in group]


class _Environment:
    """An environment of one episode. One thread uses it at a time: a call that has timed out can still be running."""

    def __init__(self, session: Session, make_env: MakeEnvironment, row: Any):
        self._session, self._make_env, self._row = session, make_env, row
        self._lock, self._env, self._is_closed = threading.Lock(), None, False
        self.on_restart = "replay"  # Its making is repeated in any case.
        self.name = getattr(make_env, "__name__", "the environment")

    def make_env(self) -> None:
        """Make the environment, except after `close`."""
        with self._lock:
            if not self._is_closed:
                self._env = self._make_env(self._row)
                self.name, self.on_restart = type(self._env).__name__, on_restart_of(self._env)

    async def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call one of its methods in a thread, within the limits of the session."""
        method = getattr(self._env, name)

        @wraps(method)
        def alone(env: "_Environment", *arguments: Any, **keywords: Any) -> Any:
            with env._lock:
                return method(*arguments, **keywords)

        return await self._session.call(MethodType(alone, self), *arguments, **keywords)

    def save(self) -> Any:
        """Return the state of the environment; None after `close`."""
        with self._lock:
            return None if self._env is None else self._env.save()

    def load(self, state: Any) -> None:
        """Set the state of the environment."""
        with self._lock:
            if self._env is not None:
                self._env.load(state)

    def close(self) -> Any:
        """Close the environment after its calls, once. Returns the result of `env.close`."""
        with self._lock:
            env, self._env, self._is_closed = self._env, None, True
            return None if env is None else env.close()


@asynccontextmanager
async def _opened(session: Session, make_env: MakeEnvironment, row: Any) -> AsyncIterator[_Environment]:
    """Make an environment, and close it at the end of the block in any case."""
    env = _Environment(session, make_env, row)
    try:
        await session.call(env.make_env)
        yield env
    finally:
        await session.clean_up(env.close)


def _as_user(observation: Any) -> list[Message]:
    if not isinstance(observation, str):
        raise TypeError(f"an observation must be text, got {observation!r}; gym_rollout(…, to_messages=) converts it")
    return [{"role": "user", "content": observation}]


def _seed_of(session: Session, row: Any) -> int:
    seed = row.get("seed") if isinstance(row, Mapping) else None
    return session.group_id if seed is None else int(seed)
