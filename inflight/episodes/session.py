"""The handle of one episode: a rollout function draws turns with it, calls tools, and sets rewards."""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import fsum, isfinite
from random import Random
from time import perf_counter
from typing import Any, NoReturn

import numpy as np

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, PromptTooLongError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.workers import name_of
from inflight.engine.loop.sequence import sample_seed
from inflight.episodes.calls import Calls
from inflight.episodes.conversations import Conversations
from inflight.episodes.endpoint import Endpoint
from inflight.episodes.limits import EpisodeEnd, Limits
from inflight.episodes.reply import Reply, Request
from inflight.episodes.segment import DrawnTurn, Message, Segment, comparable, digests_of
from inflight.episodes.tools import Tool, schemas_of
from inflight.episodes.turns import Place, Turns
from inflight.episodes.watching import Every, Feedback, Watch, Watcher, feedback_of
from inflight.training.data.advantages import WEIGHT

logger = logging.getLogger(__name__)


class Session:
    """One episode in progress. Its methods raise EpisodeEnd at a limit, and after the end.

    Each call of `chat` is compared with the earlier ones. It continues their tokens as they were drawn, and only new
    messages are rendered. Calls can run at the same time. Two replies to the same messages are two branches.
    """

    def __init__(
        self,
        turns: Turns,
        params: SamplingParams,
        limits: Limits,
        *,
        metadata: Mapping[str, Any],
        group_id: int,
        sample: int,
        seed: int,
    ):
        """seed: of the episode; the draws of each turn depend on it and on the number of the turn."""
        self.turns, self._limits, self._seed = turns, limits, seed
        self.params = params
        """Sampling parameters of every turn."""
        self.metadata = dict(metadata)
        """Metadata of the episode's rollouts."""
        self._num_spares = 0
        """Number of calls of `spare`."""
        self.group_id, self.sample = group_id, sample
        self.conversations = Conversations()
        self.segments = self.conversations.segments
        """Token sequences, in the order of their beginnings."""
        self.num_turns = self.num_tokens = self.num_calls = 0
        """Numbers of turns without cancelled ones, drawn tokens and calls."""
        self._num_requests = 0
        """Number of turns that were requested."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Time spent in "turns", "calls", "waits" for rate limits, and "rendering"."""
        self.ended: str | None = None
        """The reason of the end, or None."""
        self.at_close: list[Callable[[], None]] = []
        """Functions that end the endpoints of this session. `close` calls them."""
        self._drawing: set[asyncio.Task[Any]] = set()
        """Tasks that draw turns."""
        self.last: tuple[Segment, int] | None = None
        """The last drawn turn: its segment, and its index among the segment's drawn turns. None: no turn was drawn."""
        self._calls = Calls(turns, limits, group_id, sample, self.seconds, self._end)

    # ---- turns --------------------------------------------------------------------------------------------------

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
        adapter: str | None = None,
        watch: Watch | None = None,
        every: Every = 32,
        **template_kwargs: Any,
    ) -> Reply:
        """Draw the reply to chat messages: the whole conversation so far, with earlier replies as they were returned.

        tools: functions with type hints and a docstring with "Args:", or schemas of the API of OpenAI. max_tokens: at
        most `params.max_tokens`, its default. adapter: the LoRA adapter that draws the turn; each has its own token
        sequences. None: the adapter of the `Episodes`. watch: a function, also async, that gets the unfinished turn, a
        Rollout, after each further `every` tokens, or with every="line" after each line, and at the end the rest. It
        returns True to end the turn, or `Feedback`. template_kwargs: variables of the chat template. Raises EpisodeEnd,
        and InvalidRequestError for messages that do not fit the chat template.
        """
        await self._check_open()
        if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(
                f'messages must be a list of messages such as {{"role": "user", "content": …}}, got {messages!r}'
            )
        if not messages or messages[-1].get("role") == "assistant":
            raise ValueError("messages must end with a message that the policy answers, of a user or a tool")
        schemas, adapter = schemas_of(tools), self.turns.adapter if adapter is None else adapter
        began = perf_counter()
        digests = digests_of(comparable(messages), (schemas, template_kwargs, adapter))
        segment, given = self.conversations.continue_messages(
            self.turns.conversation, messages, digests, schemas, template_kwargs, adapter
        )
        self.seconds["rendering"] += perf_counter() - began
        segment.give(given)
        self.conversations.note(digests[-1], segment)
        request = Request(len(segment.token_ids), self._most(max_tokens), digests[-1], schemas)
        return await self._answer(segment, request, watch, every)

    async def complete(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        adapter: str | None = None,
        watch: Watch | None = None,
        every: Every = 32,
    ) -> Reply:
        """Draw the tokens after these. If they begin with an earlier turn and everything before it, they continue its
        token sequence. If they leave an earlier sequence at some token, also within a turn, they are a branch from
        there. The other arguments are as in `chat`. Raises EpisodeEnd."""
        await self._check_open()
        token_ids = [int(token) for token in token_ids]
        segment, given = self.conversations.continue_tokens(
            token_ids, self.turns.adapter if adapter is None else adapter
        )
        segment.give(given)
        return await self._answer(segment, Request(len(segment.token_ids), self._most(max_tokens)), watch, every)

    async def fork(
        self, reply: Reply, at: int, n: int = 1, *, watch: Watch | None = None, every: Every = 32
    ) -> list[Reply]:
        """Draw n other continuations of the first `at` tokens of a reply, at the same time. Each is a branch. With the
        shared tokens it has at most as many tokens as the reply could have. A stop string that begins in the shared
        tokens does not end it. The other arguments are as in `chat`.
        Raises EpisodeEnd, and ValueError if `at` or n is out of range."""
        await self._check_open()
        most = min(len(reply.token_ids) - (reply.finish_reason == "stop"), reply.request.max_tokens - 1)
        if not 0 <= at <= most or n < 1:
            raise ValueError(f"at must be in [0, {most}], and n at least 1, got {at} and {n}")
        token_ids = reply.place[0].token_ids[: reply.prompt_tokens + at]
        return await self._fork(reply.place[0], token_ids, reply.request, n, watch, every)

    async def endpoint(self, *, rewards: bool = False) -> Endpoint:
        """Return an address for an agent that calls the API of OpenAI or Anthropic. Its requests are calls of `chat`.
        Only programs on this machine reach it, unless `Episodes` has `agents`. rewards: requests can also set rewards.
        An agent that runs code of the policy could then set its own. It needs the extra `serve`. Raises EpisodeEnd."""
        await self._check_open()
        return (await self.turns.agent_server()).open(self, rewards=rewards)

    # ---- rewards ------------------------------------------------------------------------------------------------

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """Add a reward to a drawn turn. The reward of the episode is the sum over its turns. reply: of the turn; None:
        the turn that was drawn last. Raises ValueError for a number that is not finite, and without a turn."""
        value = float(value)
        if not isfinite(value):
            raise ValueError(f"a reward must be finite, got {value}")
        place = self.last if reply is None else reply.place
        if place is None:
            raise ValueError("reward() adds to the last drawn turn, and no turn has been drawn")
        segment, index = place
        drawn = segment.drawn[index]
        drawn.reward = (drawn.reward or 0.0) + value

    @property
    def total_reward(self) -> float | None:
        """Sum of the rewards so far; None if there are none."""
        given = [total for segment in self.segments if (total := segment.total_reward) is not None]
        return fsum(given) if given else None

    # ---- tools --------------------------------------------------------------------------------------------------

    async def call(
        self, function: Callable[..., Any], /, *arguments: Any, timeout_s: float | None = None, **keywords: Any
    ) -> Any:
        """Call a tool, a judge or a method of an environment, and return its result. A function that is not async runs
        in a thread, so that it does not stop other episodes. timeout_s: None is `Limits.call_s`. A function with a rate
        limit (`Limits.rates`) waits for it. Raises TimeoutError, the exceptions of the function, and EpisodeEnd.

        After a restart of the trainer the call returns or raises the saved result, as long as requests have the same
        functions and arguments in the same order. Results are saved if they are JSON-like, bytes, tuples, or arrays of
        NumPy. Functions that might have a state are called again: methods, functions within functions, and functions
        with `function.on_restart = "replay"`. The attribute `on_restart` of an object changes it for its methods."""
        await self._check_open()
        if 0 < self._limits.max_calls <= self.num_calls:
            self._end("max_calls")
        self.num_calls += 1
        timeout_s = self._limits.call_s if timeout_s is None else timeout_s
        return await self._calls.call(timeout_s, function, arguments, keywords)

    async def clean_up(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function that releases the resources of the episode, such as `env.close`, also after the end and after
        a cancellation. Returns after `Limits.cleanup_s` at the latest, and logs an exception of the function."""
        call, name = self._calls.start(function, *arguments), name_of(function)
        await asyncio.wait([call], timeout=self._limits.cleanup_s)
        if not call.done():
            call.cancel()
            self.turns.counts["calls that timed out"] += 1
            logger.warning("%s did not return within %g s, and is left behind", name, self._limits.cleanup_s)
            return
        try:
            call.result()
        except (Exception, asyncio.CancelledError) as error:
            logger.warning("%s has failed at the end of an episode: %s: %s", name, type(error).__name__, error)

    async def use_tools(self, reply: Reply, tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
        """Call the functions that a reply names, all at the same time, and return a tool message for each call. The
        exception of a call, or the unknown name of its function, becomes the content of the message. Raises
        EpisodeEnd."""
        if not all(map(callable, tools)):
            raise TypeError("tools must be functions: use_tools calls them, and a schema cannot be called")
        by_name = {name_of(function): function for function in tools}

        async def use(request: Mapping[str, Any]) -> dict[str, Any]:
            name, arguments = request["function"]["name"], request["function"]["arguments"]
            content: Any
            if name not in by_name:
                content = f"error: there is no tool {name!r}"
            else:
                try:
                    keywords = json.loads(arguments) if isinstance(arguments, str) else arguments
                    content = await self.call(partial(by_name[name], **keywords))
                    if not isinstance(content, str):
                        content = json.dumps(content, ensure_ascii=False, default=str)
                except EpisodeEnd:
                    raise
                except Exception as error:
                    content = f"error: {type(error).__name__}: {error}"
            return {"role": "tool", "name": name, "tool_call_id": request.get("id", ""), "content": content}

        return list(await asyncio.gather(*map(use, reply.calls)))

    def spare(self, watch: Watch, share: float) -> Watch:
        """Return a function for `watch=` that ends a turn when `watch` ends it, except for a random share of the
        turns, which are drawn to their end. The episode gets the weight 0 or 1 / share for
        `advantages=inflight.spared_advantages`. share: above 0, at most 1."""
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        self._num_spares += 1
        chance, decided = Random(f"{self._seed} {self._num_spares}").random(), False

        async def decide(turn: Rollout) -> Feedback:
            nonlocal decided
            feedback = await feedback_of(watch, turn)
            if feedback.stop and not decided:
                decided = True
                weight = 1 / share if chance < share else 0.0
                self.metadata[WEIGHT] = self.metadata.get(WEIGHT, 1.0) * weight
            return replace(feedback, stop=feedback.stop and chance >= share)

        return decide

    # ---- for `Episodes` -----------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Let every later call raise EpisodeEnd, and end the endpoints and the turns in progress."""
        self.ended = self.ended or reason
        while self.at_close:
            self.at_close.pop()()
        for task in self._drawing:
            task.cancel()

    def rollouts(self, finish_reason: str | None, reward: float | None, parts: Mapping[str, float]) -> list[Rollout]:
        """Return a rollout for each segment with a drawn turn. finish_reason: None takes each segment's last one."""
        rollouts = [
            segment.rollout(
                group_id=self.group_id,
                sample=self.sample,
                params=self.params,
                metadata=self.metadata,
                finish_reason=finish_reason or segment.drawn[-1].turn.finish_reason,
            )
            for segment in self.segments
            if segment.drawn
        ]
        for rollout in rollouts:
            rollout.reward, rollout.rewards = reward, dict(parts)
            rollout.prompt = self.turns.text(rollout.prompt_token_ids, self.params)
            rollout.text = self.turns.text(rollout.token_ids, self.params, rollout.prompt_token_ids.tolist())
        return rollouts

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _most(self, max_tokens: int | None) -> int:
        if max_tokens is None:
            return self.params.max_tokens
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        return min(max_tokens, self.params.max_tokens)

    async def _check_open(self) -> None:
        if self.ended is not None:
            await asyncio.sleep(0)  # A function that catches all exceptions and tries again leaves time to others.
            raise EpisodeEnd(self.ended)

    def _end(self, reason: str) -> NoReturn:
        self.ended = self.ended or reason
        raise EpisodeEnd(reason)

    async def _answer(self, segment: Segment, request: Request, watch: Watch | None, every: Every) -> Reply:
        """Draw a reply after all tokens of the segment, and its forks."""
        watcher = None
        if watch is not None:
            before = list(segment.token_ids)

            def fork(token_ids: list[int], n: int) -> "asyncio.Future[list[Reply]]":
                return asyncio.ensure_future(self._fork(segment, before + token_ids, request, n))

            watcher = Watcher(watch, every, fork)
        try:
            reply = await self._draw(segment, request, watcher)
            return reply if watcher is None else replace(reply, forks=await watcher.forks())
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _fork(
        self,
        segment: Segment,
        token_ids: list[int],
        request: Request,
        n: int,
        watch: Watch | None = None,
        every: Every = 32,
    ) -> list[Reply]:
        """Draw n replies after these tokens, the first ones of a segment or of its turn in progress."""
        origin = segment.origin(len(token_ids))
        branches = [self.conversations.new(token_ids, segment.adapter, origin) for _ in range(n)]
        replies = [asyncio.ensure_future(self._answer(branch, request, watch, every)) for branch in branches]
        try:
            return await asyncio.gather(*replies)
        except BaseException:
            for other in replies:
                other.cancel()
            raise

    async def _draw(self, segment: Segment, request: Request, watcher: Watcher | None) -> Reply:
        """Draw a turn after all tokens of the segment."""
        limits, most = self._limits, request.num_prompt + request.max_tokens - len(segment.token_ids)
        if 0 < limits.max_turns <= self.num_turns:
            self._end("max_turns")
        if limits.max_tokens:
            most = min(most, limits.max_tokens - self.num_tokens)
            if most <= 0:
                self._end("max_tokens")
        seed = sample_seed(self._seed, self._num_requests) & (2**63 - 1)
        least = self.params.min_tokens - (len(segment.token_ids) - request.num_prompt)  # A fork has some of them.
        params = self.turns.params_of_turn(self.params, self._num_requests, seed, max(0, least), most)
        place = Place(self.group_id, self.sample, self._num_requests, segment.digest)
        self._num_requests += 1
        self.num_turns += 1
        segment.is_busy, began_ns = True, now_ns()
        task = asyncio.current_task()
        assert task is not None
        self._drawing.add(task)
        try:
            async with asyncio.timeout(limits.turn_s) as timer:
                turn = await self.turns.draw(
                    segment.token_ids, params, place, segment.num_routed, watcher, segment.adapter
                )
        except TimeoutError:
            if timer.expired():  # otherwise the engine or the watch function raised it
                self._end("turn_timeout")
            raise
        except PromptTooLongError:
            self._end("context")
            raise
        except asyncio.CancelledError:
            self.num_turns -= 1
            self.conversations.take_back(segment)
            raise
        finally:
            segment.is_busy = False
            self._drawing.discard(task)
            self.seconds["turns"] += (now_ns() - began_ns) / 1e9
        if turn.finish_reason == "cancelled":
            self._end("cancelled")
        if turn.finish_reason not in ("stop", "length", "stopped"):
            raise InflightError(f"a turn ended with {turn.finish_reason!r}")
        segment.draw(DrawnTurn(turn, began_ns, now_ns(), watcher.rewards if watcher is not None else ()))
        self.last = place = segment, len(segment.drawn) - 1
        self.num_tokens += len(turn.token_ids)
        return self._read(place, turn, request)

    def _read(self, place: tuple[Segment, int], turn: Rollout, request: Request) -> Reply:
        """Return a drawn turn at the end of a segment as a reply."""
        segment, (num_prompt, _, digest, schemas) = place[0], request
        before, token_ids = segment.token_ids[:num_prompt], segment.token_ids[num_prompt:]
        is_fork = len(token_ids) > len(turn.token_ids)
        text = self.turns.text(np.array(token_ids), self.params, before) if is_fork else turn.text
        message: dict[str, Any] = {}
        stop_reason = None
        if digest is not None:
            began, conversation = perf_counter(), self.turns.conversation
            sample = conversation.sample_text(before, self.params) if turn.finish_reason == "stop" else None
            message = conversation.read(before, token_ids, schemas, sample)
            stop_reason = None if sample is None else sample.stop_reason
            [replied] = digests_of(comparable([message]), digest)
            self.seconds["rendering"] += perf_counter() - began
            self.conversations.note(replied, segment, message)
        return Reply(message, text, token_ids, turn.finish_reason, place, request, turn.prefix_tokens, stop_reason)
