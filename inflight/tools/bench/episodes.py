"""`inflight bench episodes`: episodes of several turns with tools, compared with the same turns without tools.

A tool waits for a time from a log-uniform distribution. The comparison repeats every turn of the episodes as a plain
request: the same prompt tokens, number of tokens, seed, and order within a conversation, as many conversations in
progress, the same reuse of earlier turns, and as many publishes per second. It has no tools, no messages and no
sessions.
"""

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, pairwise
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from inflight.core.clock import now_ns
from inflight.core.errors import ModelLoadError
from inflight.core.rollout import Rollout, Turn
from inflight.core.sampling import SamplingParams
from inflight.engine.model.device import resolve_device
from inflight.episodes.episodes import Episodes, RolloutFunction
from inflight.episodes.session import Session
from inflight.episodes.turns import Place
from inflight.fleet.engine import Engine
from inflight.fleet.launching import launch
from inflight.tools.bench.options import EpisodesOptions
from inflight.tools.demo.trainer import load_trainer, split_cores, torch_threads
from inflight.tools.progress import Progress, untold
from inflight.weights.trainer.publisher import Publisher

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Chat template of models without one."""
TEMPLATE_TOKENS = 32
"""Maximum number of tokens that a chat template adds to a message. Larger templates shorten the last turn."""
ACROSS = 8
"""Maximum version lag of a reused prefix, as in `Episodes`."""
Requests = list[tuple[list[int], SamplingParams]]
"""The turns of an episode."""
Figures = dict[str, float]
"""Tokens per second and totals of a run of episodes, or of their turns as plain requests."""


class _Recorded(Episodes):
    """Episodes that record the requests of their turns."""

    def __init__(self, engine: Engine, rollout: RolloutFunction, *, max_running: int):
        super().__init__(engine, rollout, max_running=max_running, prefix_across_versions=ACROSS)
        self.requests: dict[int, Requests] = defaultdict(list)
        turns: Any = self.turns
        draw = turns.draw

        async def record(token_ids: list[int], params: SamplingParams, place: Place, *others: Any) -> Rollout:
            self.requests[place.group_id].append((list(token_ids), params))
            return await draw(token_ids, params, place, *others)

        turns.draw = record


def measure(settings: EpisodesOptions, progress: Progress = untold) -> dict[str, Any]:
    """Run `episodes` episodes at a time, three times as many in all, and then their turns as plain requests, `pairs`
    times in alternation. Weights that do not change are published every `publish_s` seconds. The results are defined in
    docs/benchmarks.md#episodes.
    """
    device = resolve_device(settings.device)
    threads = split_cores(device)
    added = settings.turns * (settings.tokens + settings.tool_tokens + 2 * TEMPLATE_TOKENS)
    context = settings.prompt_tokens + added
    with (
        torch_threads(threads.trainer),
        launch(
            settings.model,
            device=device.type,
            dtype=settings.dtype,
            max_sequences=settings.sequences,
            max_context=context,
            kv_cache_tokens=2 * settings.episodes * context,
            seed=settings.seed,
            threads=threads.engine,
        ) as engine,
        ThreadPoolExecutor(1) as thread,
    ):
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise ModelLoadError(f"model {settings.model!r} has no tokenizer, and messages need one")
        if tokenizer.chat_template is None:
            tokenizer.chat_template = TEMPLATE
        torch.manual_seed(settings.seed)
        with engine.publisher(load_trainer(settings.model, device)) as publisher:
            bench = _Bench(settings, engine, tokenizer, publisher, thread)
            progress("warm-up")
            bench.pair(min(settings.episodes, settings.sequences), tool_s=(0.0, 0.0))
            pairs = []
            for pair in range(settings.pairs):
                progress(f"pair {pair + 1} of {settings.pairs}", pair / settings.pairs)
                pairs.append(bench.pair(settings.episodes, settings.tool_s))
        episodes, plain = zip(*pairs, strict=True)
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs]
        total = {name: sum(run[name] for run in episodes) for name in episodes[0]}
        return {
            "engine": engine.info.execution(),
            "tokens_per_s": median(run["tokens_per_s"] for run in episodes),
            "plain_tokens_per_s": median(run["tokens_per_s"] for run in plain),
            "ratio": median(ratios),
            "ratios": ratios,
            "prefix_hit_share": total["reused"] / total["later"],
            "prefix_known_share": total["known"] / total["later"],
            "plain_prefix_hit_share": sum(run["reused"] for run in plain) / total["later"],
            "render_share": total["render_s"] / total["episodes_s"],
            "render_thread_share": total["render_s"] / total["seconds"],
            "dropped": int(total["dropped"]),
            "token_bytes": total["bytes"] / total["tokens"],
            "num_swaps": engine.status().num_swaps,
        }


class _Bench:
    """Pairs of runs on one engine."""

    def __init__(
        self,
        settings: EpisodesOptions,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        publisher: Publisher,
        thread: ThreadPoolExecutor,
    ):
        self._settings, self._engine, self._tokenizer = settings, engine, tokenizer
        self._publisher, self._thread = publisher, thread
        self._draw, self._salts = random.Random(settings.seed), map(str, count())
        engine.wait_for_version(publisher.publish())  # the weights of all later versions

    def pair(self, in_progress: int, tool_s: tuple[float, float]) -> tuple[Figures, Figures]:
        """Run three times as many episodes as are in progress, and then their turns as plain requests."""
        settings = self._settings
        episodes = _Recorded(self._engine, self._rollout(tool_s), max_running=in_progress)
        with episodes:
            rows = [self._text(settings.prompt_tokens) for _ in range(3 * in_progress)]
            params = SamplingParams(
                max_tokens=settings.tokens, ignore_eos=True, cache_salt=next(self._salts), seed=settings.seed
            )
            groups, totals = self._with_publishes(lambda: _run_episodes(episodes, rows, params))
        chains, salt = list(episodes.requests.values()), next(self._salts)
        plain, of_plain = self._with_publishes(lambda: asyncio.run(_run_plain(self._engine, chains, in_progress, salt)))
        return _measured(groups, in_progress, totals), _measured(plain, in_progress, of_plain)

    def _with_publishes(self, work: Callable[[], Any]) -> Any:
        """Do the work in another thread, and publish in the meantime."""
        result = self._thread.submit(work)
        while True:
            try:
                return result.result(self._settings.publish_s or None)
            except TimeoutError:
                if result.done():  # the work itself has raised it
                    raise
                self._publisher.publish()

    def _rollout(self, tool_s: tuple[float, float]) -> RolloutFunction:
        shortest, longest = (math.log(max(seconds, 1e-9)) for seconds in tool_s)
        draw, result = random.Random(self._settings.seed), self._text(self._settings.tool_tokens)

        def tool(seconds: float) -> str:
            time.sleep(seconds)
            return result

        async def rollout(session: Session, row: str) -> float:
            messages: list[Any] = [{"role": "user", "content": row}]
            for _ in range(self._settings.turns - 1):
                reply = await session.chat(messages)
                content = await session.call(tool, math.exp(draw.uniform(shortest, longest)))
                messages += [reply.message, {"role": "user", "content": content}]
            await session.chat(messages)
            return 1.0

        return rollout

    def _text(self, length: int) -> str:
        """Return a text of about as many tokens; of bytes exactly."""
        letters = "".join(self._draw.choices("abcdefghijklmnopqrstuvwxyz ", k=8 * length))
        return str(self._tokenizer.decode(self._tokenizer.encode(letters, add_special_tokens=False)[:length]))


def _run_episodes(episodes: _Recorded, rows: list[str], params: SamplingParams) -> tuple[list[list[Rollout]], Figures]:
    """Return the rollouts of each episode, and the totals of the run."""
    began_ns = now_ns()
    groups = episodes.engine.stream.collect(episodes.submit(rows, params, train=False))
    rollouts = [rollout for group in groups for rollout in group]
    return groups, {
        "seconds": (now_ns() - began_ns) / 1e9,
        "render_s": episodes.seconds["rendering"],
        "dropped": sum(any(rollout.reward is None for rollout in group) for group in groups),
        "bytes": sum(rollout.nbytes for rollout in rollouts),
        "tokens": sum(len(rollout.token_ids) for rollout in rollouts),
    }


async def _run_plain(
    engine: Engine, chains: list[Requests], in_progress: int, salt: str
) -> tuple[list[list[Rollout]], Figures]:
    """Draw the turns of each chain, one after another."""
    places, began_ns = asyncio.Semaphore(in_progress), now_ns()

    async def converse(chain: Requests) -> list[Rollout]:
        async with places:
            out = []
            for token_ids, params in chain:
                params = msgspec.structs.replace(params, cache_salt=salt, prefix_across_versions=ACROSS)
                began_ns = now_ns()
                [[turn]] = await engine.agenerate([token_ids], params)
                out.append(replace(turn, turns=(_turn_of(turn, began_ns),)))
            return out

    groups = await asyncio.gather(*map(converse, chains))
    return groups, {"seconds": (now_ns() - began_ns) / 1e9}


def _turn_of(turn: Rollout, began_ns: int) -> Turn:
    """Return a whole request as a turn."""
    span = began_ns, now_ns()
    return Turn(0, len(turn.token_ids), True, None, turn.finish_reason, *span, turn.prefix_tokens, turn.prefix_version)


def _measured(groups: list[list[Rollout]], in_progress: int, totals: Figures) -> Figures:
    """Count the tokens that were drawn while all places were taken, and the reused tokens."""
    began_ns, ended_ns, episodes_ns, later, reused, known = [], [], 0, 0, 0, 0
    for group in groups:
        turns = [
            (turn, len(rollout.prompt_token_ids) + turn.begin, len(rollout.prompt_token_ids) + turn.end)
            for rollout in group
            for turn in rollout.turns
            if turn.drawn
        ]
        began_ns.append(turns[0][0].began_ns)
        ended_ns.append(turns[-1][0].ended_ns)
        episodes_ns += ended_ns[-1] - began_ns[-1]
        for (_, _, end), (turn, begin, _) in pairwise(turns):
            later += begin
            reused += turn.prefix_tokens
            known += end - 1  # the last drawn token was not computed
    from_ns, to_ns = sorted(ended_ns)[in_progress - 1], max(began_ns)
    drawn_at_ns = np.concatenate([rollout.sampled_at_ns[rollout.drawn] for group in groups for rollout in group])
    tokens = np.count_nonzero((from_ns <= drawn_at_ns) & (drawn_at_ns < to_ns))
    counted = {"episodes_s": episodes_ns / 1e9, "later": later, "reused": reused, "known": known}
    return totals | counted | {"tokens_per_s": float(tokens) / ((to_ns - from_ns) / 1e9)}
