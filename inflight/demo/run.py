"""`inflight demo`: the whole loop on this machine, from random weights to a model that reinforcement improved."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.sampling import SamplingParams
from inflight.demo.display import Display, print_summary
from inflight.demo.options import DemoOptions
from inflight.demo.record import StepRecord, append_step, plot
from inflight.demo.tasks import Task, file_task, gym_task
from inflight.demo.trainer import load_trainer, require_tokenizer, split_cores, torch_threads, without_full_collections
from inflight.demo.warmup import WarmupConfig, ramp_and_decay, warm_up
from inflight.engine.device import resolve_device
from inflight.engine.shapes import SHAPES
from inflight.observability.environment import environment, write_json
from inflight.session import LaunchedEngine, launch
from inflight.training.data.scored_groups import Dropped
from inflight.training.grpo import Example, GRPOConfig, StepReport, grpo

EVALUATE_EVERY = 25
"""Optimizer steps between two evaluations."""
QUICK_EVALUATION = 128
"""Held-out prompts of those evaluations; the first and the last take all of them."""
MAX_SEQUENCES = 128
"""Sequences that the engine decodes together, at most."""
WARMUP_STEPS = 250


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Warm up, train by GRPO and evaluate; return the summary, which is also printed and written to `options.out`.

    Ctrl-C ends the run early; what was measured by then is summarised and written all the same. Raises InflightError.
    """
    disable_progress_bar()  # of Transformers; the run has its own
    task = _make_task(options)
    mode = "sync" if options.sync else "inflight"
    out = options.out or Path("runs") / f"{task.name}-{mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    steps_file = _prepare(out)
    torch.manual_seed(options.seed)
    device = resolve_device(options.device)
    threads = split_cores(device)
    began_ns = now_ns()
    model, tokenizer = load_trainer(options.model, device), require_tokenizer(options.model)
    title = f"{task.name}, {_parameters(model)} parameters, {mode}"
    example = task.train[0]
    console.print(
        f"{task.name}: {example.prompt!r} asks for {example.metadata['answer']!r}; {len(task.train):,} prompts to "
        f"train on, {len(task.held_out)} held out; {options.model}, {_parameters(model)} parameters, {device.type}",
        highlight=False,
        soft_wrap=True,
    )
    with Display(title, console=console) as display, tempfile.TemporaryDirectory(prefix="inflight-demo-") as directory:
        warmup_steps = options.warmup_steps
        if warmup_steps is None:
            warmup_steps = WARMUP_STEPS if options.model in SHAPES else 0
        if warmup_steps:
            display.phase("warm-up", warmup_steps)
            warm_up(
                model,
                tokenizer,
                task.train,
                WarmupConfig(steps=warmup_steps),
                seed=options.seed,
                on_step=lambda _, loss: display.advance(f"loss {loss:.3f}"),
            )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        run = _Run(task, options, display, steps_file)
        with (
            torch_threads(threads.trainer),
            launch(
                directory,
                device=options.device,
                max_sequences=MAX_SEQUENCES,
                max_context=longest(task, tokenizer),
                threads=threads.engine,
            ) as engine,
        ):
            run.train(engine, model)
    summary = run.summary() | {
        "mode": mode,
        "task": task.name,
        "model": options.model,
        "seed": options.seed,
        "steps": len(run.records),
        "seconds": (now_ns() - began_ns) / 1e9,
        "environment": environment(),
    }
    with _writing(out):
        write_json(out / "summary.json", summary)
        if run.records and run.accuracy_before is not None:
            plot(out / "demo.png", run.records, title=title, accuracy_before=run.accuracy_before)
    print_summary(console, summary)
    console.print(f"written            {out}/steps.jsonl, summary.json, demo.png")
    return summary


def _make_task(options: DemoOptions) -> Task:
    if options.data:
        return file_task(options.data, max_tokens=options.max_tokens or 64)
    return gym_task(options.task, seed=options.seed, max_tokens=options.max_tokens)


def _prepare(out: Path) -> Path:
    """Return an empty file for steps, in a directory that can be written to. Raises InflightError now rather than after
    the run."""
    steps_file = out / "steps.jsonl"
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        steps_file.write_text("\n")  # of a full file system, an empty file would tell nothing
        steps_file.write_text("")
    return steps_file


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InflightError(
            f"cannot write to {out}: {error.strerror or error}; --out takes another directory"
        ) from error


class _Run:
    """The reinforcement learning of a demo, and what is known of it so far."""

    def __init__(self, task: Task, options: DemoOptions, display: Display, steps_file: Path):
        self._task, self._options, self._display, self._steps_file = task, options, display, steps_file
        self.records: list[StepRecord] = []
        self.accuracy_before: float | None = None
        self.accuracy_after: float | None = None
        self.interrupted = False
        self._swaps: dict[str, Any] = {}
        self._staleness: dict[str, Any] = {}
        self._num_tokens = 0
        self._dropped = Dropped()
        self._began_ns = 0

    def train(self, engine: LaunchedEngine, model: PreTrainedModel) -> None:
        options = self._options
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        scheduler = ramp_and_decay(optimizer, ramp=10, steps=options.steps, floor=0.1)
        grpo_config = GRPOConfig(
            steps=options.steps,
            groups_per_step=options.groups_per_step,
            sampling=SamplingParams(n=options.group_size, max_tokens=self._task.max_tokens),
            schedule="sync" if options.sync else "inflight",
        )
        try:
            with without_full_collections():
                self._display.phase("evaluation", 1)
                self.accuracy_before = held_out_accuracy(engine, self._task, self._task.held_out)
                self._display.phase("GRPO", options.steps)
                with engine.publisher(model) as publisher:
                    self._began_ns = last_ns = now_ns()
                    examples = self._task.shuffled(options.seed)
                    last_tokens = engine.stream.num_tokens
                    reports = grpo(
                        engine, publisher, model, optimizer, examples, self._task.score, grpo_config, scheduler
                    )
                    for report in reports:
                        tokens, seconds = engine.stream.num_tokens - last_tokens, (report.finished_ns - last_ns) / 1e9
                        last_tokens, last_ns = engine.stream.num_tokens, report.finished_ns
                        accuracy = None
                        if report.step % EVALUATE_EVERY == 0 and report.step < options.steps:
                            some = self._task.held_out[:QUICK_EVALUATION]
                            accuracy = held_out_accuracy(engine, self._task, some)
                        self._record(engine, report, tokens / seconds, accuracy)
                    engine.wait_for_version(publisher.version)
                    self._display.phase("evaluation", 1)
                    self.accuracy_after = held_out_accuracy(engine, self._task, self._task.held_out)
                    self.records[-1].accuracy = self.accuracy_after
        except KeyboardInterrupt:
            self.interrupted = True
        meter = engine.staleness
        self._swaps = {"num_swaps": meter.num_swaps, "num_swaps_in_flight": meter.num_swaps_in_flight}
        self._staleness = meter.summary()
        self._num_tokens = engine.stream.num_tokens

    def summary(self) -> dict[str, Any]:
        last = self.records[-1] if self.records else None
        tail = self.records[-10:]
        return {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "reward_last_10_steps": float(np.mean([r.reward for r in tail])) if tail else None,
            **self._swaps,
            "dropped": self._dropped.as_dict(),
            "num_tokens": self._num_tokens,
            "tokens_per_s": self._num_tokens / last.seconds if last else None,
            "seconds_rl": last.seconds if last else None,
            "interrupted": self.interrupted,
            **self._staleness,
        }

    def _record(self, engine: LaunchedEngine, report: StepReport, tokens_per_s: float, accuracy: float | None) -> None:
        staleness, stats, self._dropped = report.staleness, report.stats, report.dropped
        record = StepRecord(
            step=report.step,
            seconds=(report.finished_ns - self._began_ns) / 1e9,
            reward=report.reward,
            accuracy=accuracy,
            num_tokens=report.num_tokens,
            tokens_per_s=tokens_per_s,
            swap_ms=engine.staleness.last_swap_ms,
            weight_lag_ms=float(staleness.weight_lag_ms.mean()) if staleness else None,
            token_age_ms=float(staleness.token_age_ms.mean()) if staleness else None,
            version_lag=float(staleness.version_lag.mean()) if staleness else None,
            ess=stats.ess if stats else None,
            kl=stats.kl if stats else None,
            ratio_mean=stats.ratios.mean if stats else None,
        )
        self.records.append(record)
        with _writing(self._steps_file.parent):
            append_step(self._steps_file, record)
        self._display.add(record)


def held_out_accuracy(engine: LaunchedEngine, task: Task, examples: Sequence[Example]) -> float:
    """Return the share of these prompts whose greedy answer scores 1."""
    params = SamplingParams(max_tokens=task.max_tokens, temperature=0)
    groups = engine.generate([e.prompt for e in examples], params, metadata=[e.metadata for e in examples])
    return float(np.mean([task.score(group[0]) >= 1 for group in groups]))


def longest(task: Task, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens of the longest prompt and the longest answer together."""
    prompts = [str(example.prompt) for example in (*task.train, *task.held_out)]
    return max(len(ids) for ids in tokenizer(prompts)["input_ids"]) + task.max_tokens


def _parameters(model: PreTrainedModel) -> str:
    count = sum(p.numel() for p in model.parameters())
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.1f} B"
