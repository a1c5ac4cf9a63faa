"""`inflight bench scaling`: what a decode step costs with more sequences, longer ones, and a long queue behind them."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from inflight.core.errors import InflightError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.device import resolve_device
from inflight.engine.engine import Engine
from inflight.engine.loading import load_config
from inflight.tools.bench.options import ScalingOptions
from inflight.tools.bench.peers import engine_dtype
from inflight.tools.demo.trainer import without_full_collections
from inflight.tools.plots import draw_sizes, new_figure, new_table, save_figure
from inflight.tools.progress import Progress, part_of, untold

CONTEXT_SEQUENCES = 16
"""Sequences at each context length."""
PREFILL_TOKENS = 8192
"""Prompt tokens that the engine lets join in one pass."""

QUEUE_SEQUENCES = 32
"""Sequences that decode while others wait."""
QUEUE_PROMPT_TOKENS = 32
QUEUE_TOKENS = (32, 96)
"""The shortest and the longest of the requests whose steps are timed, so that they end and join at different steps."""
QUEUE_WARMUP_STEPS = 4
"""Steps that are not timed: they prefill and announce all requests, those that wait too."""
QUEUE_STEPS = 256


def measure(settings: ScalingOptions, progress: Progress = untold) -> dict[str, Any]:
    """Time decode steps in an engine of this process.

    by_sequences, by_context: the median over the steps that drew a token for every sequence and started none. The
    context is that of the prompts; it grows by one in each of the `tokens` steps that are measured.
    queue: tokens per second without and with `queued` requests waiting behind the same work, in alternated runs;
    `ratio` (with / without) is the median over the pairs, 1 where the queue costs nothing.
    """
    sizes, contexts = sorted(set(settings.sequences)), sorted(set(settings.contexts))
    by_sequences, by_context = [], []
    dtype = engine_dtype(settings, load_config(settings.model))
    with _engine(settings, sizes[-1], settings.prompt_tokens) as engine:
        for done, size in enumerate(sizes):
            progress(f"{size} sequences of {settings.prompt_tokens} tokens", done / len(sizes) / 3)
            by_sequences.append(_measure_steps(engine, settings, size, settings.prompt_tokens))
    with _engine(settings, CONTEXT_SEQUENCES, contexts[-1]) as engine:
        for done, context in enumerate(contexts):
            progress(f"{CONTEXT_SEQUENCES} sequences of {context} tokens", (1 + done / len(contexts)) / 3)
            by_context.append(_measure_steps(engine, settings, CONTEXT_SEQUENCES, context))
    return {
        "bench": "scaling",
        **asdict(settings),
        "device": resolve_device(settings.device).type,
        "dtype": str(dtype).removeprefix("torch."),
        "by_sequences": by_sequences,
        "by_context": by_context,
        "queue": _measure_queue(settings, part_of(progress, 2 / 3, 1)) if settings.queued else None,
    }


def table(result: dict[str, Any]) -> Table:
    """Show both curves, and below them the price of the queue."""
    shown = new_table(_title(result), "sequences", "context", "step ms (p50)", "tokens/s of decoding")
    shown.caption_justify = "left"
    for curve in ("by_sequences", "by_context"):
        for point in result[curve]:
            step_ms, speed = point["step_ms"]["p50"], point["tokens_per_s"]
            shown.add_row(str(point["sequences"]), str(point["context"]), f"{step_ms:.2f}", f"{speed:,.0f}")
        shown.add_section()
    if result["queue"]:
        shown.caption = _queue_sentence(result)
    return shown


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw step time against sequences and against context. `path` is a PNG file."""
    title = f"{_title(result)}; context {result['prompt_tokens']}"
    figure, (left, right) = new_figure(title, f"{CONTEXT_SEQUENCES} sequences")
    for axes, curve, size in ((left, "by_sequences", "sequences"), (right, "by_context", "context")):
        sizes = [point[size] for point in result[curve]]
        axes.plot(sizes, [point["step_ms"]["p50"] for point in result[curve]], "o-")
        axes.set_ylabel("decode step, p50 in ms")
        draw_sizes(axes, size, sizes, linear=True)
    right.set_xlabel("tokens of context")
    if result["queue"]:
        figure.text(0.01, 0.01, _queue_sentence(result), fontsize=8)
    save_figure(path, figure)


def _title(result: dict[str, Any]) -> str:
    return f"{result['model']} {result['dtype']} on {result['device']}"


def _queue_sentence(result: dict[str, Any]) -> str:
    queue = result["queue"]
    return (
        f"{queue['sequences']} sequences: {queue['tokens_per_s']:,.0f} tokens/s with {result['queued']:,} requests "
        f"waiting, {queue['tokens_per_s_without']:,.0f} without; median ratio of {len(queue['ratios'])} pairs "
        f"{queue['ratio']:.3f}"
    )


@contextmanager
def _engine(settings: ScalingOptions, sequences: int, context: int) -> Iterator[Engine]:
    options = EngineOptions(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_sequences=sequences,
        max_context=context + settings.tokens + _num_prefills(sequences, context) + 1,
        max_prefill_tokens=PREFILL_TOKENS,
        threads=settings.threads,
        seed=settings.seed,
    )
    with Engine(options) as engine, without_full_collections():  # as in the engine's own process
        yield engine


def _num_prefills(sequences: int, context: int) -> int:
    """Return the number of passes until the last of the prompts has joined."""
    return -(-sequences // max(1, PREFILL_TOKENS // context))


def _measure_steps(engine: Engine, settings: ScalingOptions, sequences: int, context: int) -> dict[str, Any]:
    draw = random.Random(settings.seed)
    params = SamplingParams(
        max_tokens=settings.tokens + _num_prefills(sequences, context) + 1, ignore_eos=True, seed=settings.seed
    )
    groups = engine.submit([_prompt(draw, engine, context, params) for _ in range(sequences)])
    steps_s: list[float] = []
    while engine.has_work and len(steps_s) < settings.tokens:
        began = time.perf_counter()
        frame = engine.step()
        seconds = time.perf_counter() - began
        if frame is not None and frame.header.num_tokens == sequences and not frame.header.starts:
            steps_s.append(seconds)
    _drop(engine, groups)
    if not steps_s:
        raise InflightError(f"no decode step of {sequences} sequences of {context} tokens could be measured")
    step_s = median(steps_s)
    return {
        "sequences": sequences,
        "context": context,
        "step_ms": {"p50": step_s * 1e3},
        "tokens_per_s": sequences / step_s,
        "num_steps": len(steps_s),
    }


def _measure_queue(settings: ScalingOptions, progress: Progress) -> dict[str, Any]:
    without, behind = [], []
    with _engine(settings, QUEUE_SEQUENCES, QUEUE_PROMPT_TOKENS + QUEUE_TOKENS[1]) as engine:
        progress("warming up the queue's engine")
        _queue_run(engine, settings, 0)
        for pair in range(settings.pairs):
            text = f"without and with {settings.queued:,} requests waiting, {pair + 1} of {settings.pairs}"
            progress(text, pair / settings.pairs)
            without.append(_queue_run(engine, settings, 0))
            behind.append(_queue_run(engine, settings, settings.queued))
    ratios = [b / a for a, b in zip(without, behind, strict=True)]
    return {
        "sequences": QUEUE_SEQUENCES,
        "num_steps": QUEUE_STEPS,
        "tokens_per_s": median(behind),
        "tokens_per_s_without": median(without),
        "ratio": median(ratios),
        "ratios": ratios,
    }


def _queue_run(engine: Engine, settings: ScalingOptions, queued: int) -> float:
    """Return tokens per second over QUEUE_STEPS steps; the requests are always the same, and keep every row busy."""
    draw = random.Random(settings.seed)
    shortest, longest = QUEUE_TOKENS
    num_working = QUEUE_SEQUENCES * (-(-(QUEUE_WARMUP_STEPS + QUEUE_STEPS) // shortest))

    def prompt() -> Prompt:
        params = SamplingParams(max_tokens=draw.randint(shortest, longest), ignore_eos=True, seed=draw.getrandbits(32))
        return _prompt(draw, engine, QUEUE_PROMPT_TOKENS, params)

    groups = engine.submit([prompt() for _ in range(num_working + queued)])
    for _ in range(QUEUE_WARMUP_STEPS):
        engine.step()
    num_tokens = 0
    began = time.perf_counter()
    for _ in range(QUEUE_STEPS):
        frame = engine.step()
        num_tokens += frame.header.num_tokens if frame else 0
    seconds = time.perf_counter() - began
    _drop(engine, groups)
    return num_tokens / seconds


def _prompt(draw: random.Random, engine: Engine, length: int, params: SamplingParams) -> Prompt:
    return Prompt([draw.randrange(engine.vocab_size) for _ in range(length)], params)


def _drop(engine: Engine, groups: list[int]) -> None:
    """End all requests, so that the next measurement finds the engine empty."""
    engine.cancel(groups)
    while engine.has_work:
        engine.step()
