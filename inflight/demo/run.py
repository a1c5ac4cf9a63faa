"""`inflight demo`: the whole loop on this machine, from random weights to a model that reinforcement improved."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.sampling import SamplingParams
from inflight.core.spans import span
from inflight.demo.checkpoints import OPTIONS_FILE, checkpoints, newest_checkpoint, remove_checkpoints, save_checkpoint
from inflight.demo.display import Display, StepRecord, plot, print_summary
from inflight.demo.options import DemoOptions
from inflight.demo.tasks import Task, file_task, gym_task
from inflight.demo.trainer import (
    WarmupConfig,
    load_trainer,
    ramp_and_decay,
    require_tokenizer,
    saved,
    split_cores,
    torch_threads,
    warm_up,
    without_full_collections,
)
from inflight.engine.device import resolve_device
from inflight.engine.shapes import SHAPES
from inflight.observability.environment import environment, replacing, write_json
from inflight.observability.events import EVENTS_FILE
from inflight.observability.loggers import Logger, open_logger
from inflight.run import Run
from inflight.session import LaunchedEngine, launch
from inflight.training.data.scored_groups import Dropped
from inflight.training.grpo import Example, GRPOConfig, StepReport, grpo
from inflight.training.recording import RunRecorder
from inflight.watch.command import page_of

EVALUATE_EVERY = 25
"""Optimizer steps between two evaluations."""
QUICK_EVALUATION = 128
"""Held-out prompts of those evaluations; the first and the last take all of them."""
MAX_SEQUENCES = 128
"""Sequences that the engine decodes together, at most."""
WARMUP_STEPS = 250
_TRAINER = "trainer.pt"
_STEPS = "steps.jsonl"


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Warm up, train by GRPO and evaluate; return the summary, which is also printed and written to `options.out`.

    Ctrl-C ends the run early; what was measured by then is summarised and written all the same. Raises InflightError.
    """
    disable_progress_bar()  # of Transformers; the run has its own
    checkpoint = newest_checkpoint(options.resume) if options.resume else None
    if checkpoint is not None:
        options = _options_of(checkpoint, options)
    task = _make_task(options)
    mode = "sync" if options.sync else "inflight"
    out = options.out or Path("runs") / f"{task.name}-{mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    options = replace(options, out=out)
    _prepare(out, keep=checkpoint is not None)
    torch.manual_seed(options.seed)
    device = resolve_device(options.device)
    threads = split_cores(device)
    began_ns = now_ns()
    source = str(checkpoint or options.model)
    model, tokenizer = load_trainer(source, device), require_tokenizer(source)
    title = f"{task.name}, {_parameters(model)} parameters, {mode}"
    example = task.train[0]
    console.print(
        f"{task.name}: {example.prompt!r} asks for {example.metadata['answer']!r}; {len(task.train):,} prompts to "
        f"train on, {len(task.held_out)} held out; {options.model}, {_parameters(model)} parameters, {device.type}",
        highlight=False,
        soft_wrap=True,
    )
    with (
        page_of(out, port=options.web_port, console=console) if options.web else nullcontext(),
        tracker(options, out, task.name) as loggers,
        Display(title, console=console) as display,
    ):
        warmup_steps = options.warmup_steps
        if warmup_steps is None and options.model in SHAPES:
            warmup_steps = WARMUP_STEPS
        if warmup_steps and checkpoint is None:
            display.phase("warm-up", warmup_steps)
            for loss in warm_up(model, tokenizer, task.train, WarmupConfig(steps=warmup_steps, seed=options.seed)):
                display.advance(f"loss {loss:.3f}")
        run = _Run(task, options, out, title, display, tokenizer, loggers)
        with (
            saved(model, tokenizer, out / "start") as directory,
            torch_threads(threads.trainer),
            launch(
                directory,
                backend=options.backend,
                device=options.device,
                max_sequences=MAX_SEQUENCES,
                max_context=longest(task, tokenizer),
                threads=threads.engine,
                restarts=options.restarts,
            ) as engine,
        ):
            run.train(engine, model, checkpoint)
            summary = run.summary(engine)
    summary |= {
        "mode": mode,
        "task": task.name,
        "model": options.model,
        "backend": options.backend,
        "seed": options.seed,
        "steps": len(run.records),
        "resumed_after_step": run.resumed_after_step,
        "seconds": (now_ns() - began_ns) / 1e9,
        "environment": environment(),
    }
    with _writing(out):
        write_json(out / "summary.json", summary)
        if run.records and run.accuracy_before is not None:
            plot(out / "demo.png", run.records, title=title, accuracy_before=run.accuracy_before)
    print_summary(console, summary)
    console.print(f"written            {out}/steps.jsonl, events.jsonl, summary.json, demo.png")
    console.print(f"to look at it      inflight watch {out}", highlight=False)
    if run.interrupted and checkpoints(out):
        console.print(f"to go on           inflight demo --resume {out}")
    return summary


def _options_of(checkpoint: Path, given: DemoOptions) -> DemoOptions:
    """The options of the run that the checkpoint is of, which goes on in its directory; those of this machine are the
    given ones."""
    try:
        found = msgspec.json.decode(
            (checkpoint / OPTIONS_FILE).read_bytes(), type=DemoOptions, dec_hook=lambda kind, value: kind(value)
        )
    except (OSError, msgspec.DecodeError) as error:
        raise InflightError(f"cannot go on from {checkpoint}: {error}") from error
    return replace(found, device=given.device, web=given.web, web_port=given.web_port, out=checkpoint.parent)


def _make_task(options: DemoOptions) -> Task:
    if options.data:
        return file_task(options.data, max_tokens=options.max_tokens or 64)
    return gym_task(options.task, seed=options.seed, max_tokens=options.max_tokens)


def _prepare(out: Path, *, keep: bool) -> None:
    """Make a directory that can be written to, with an empty file for steps, unless `keep`. Raises InflightError now
    rather than after the run."""
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if not keep:
            remove_checkpoints(out)  # of another run
            (out / EVENTS_FILE).unlink(missing_ok=True)
            (out / _STEPS).write_text("\n")  # of a full file system, an empty file would tell nothing
            (out / _STEPS).write_text("")


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

    def __init__(
        self,
        task: Task,
        options: DemoOptions,
        out: Path,
        title: str,
        display: Display,
        tokenizer: PreTrainedTokenizerBase,
        loggers: Sequence[Logger],
    ):
        self._task, self._options, self._out, self._display = task, options, out, display
        self._title, self._tokenizer, self._loggers = title, tokenizer, loggers
        self.records: list[StepRecord] = []
        self.accuracy_before: float | None = None
        self.accuracy_after: float | None = None
        self.interrupted = False
        self.resumed_after_step = 0
        self._dropped = Dropped()
        self._began_ns = 0

    def train(self, engine: LaunchedEngine, model: PreTrainedModel, checkpoint: Path | None) -> None:
        """checkpoint: where the run goes on from."""
        task, options = self._task, self._options
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        scheduler = ramp_and_decay(optimizer, ramp=10, steps=options.steps, floor=0.1)
        state = {"optimizer": optimizer, "scheduler": scheduler}
        config = GRPOConfig(
            steps=options.steps,
            groups_per_step=options.groups_per_step,
            sampling=SamplingParams(n=options.group_size, max_tokens=task.max_tokens),
            schedule="sync" if options.sync else "inflight",
        )
        try:
            with without_full_collections():
                if checkpoint is None:
                    self._display.phase("evaluation", 1)
                    self.accuracy_before = held_out_accuracy(engine, task, task.held_out)
                with engine.publisher(model) as publisher:
                    run = Run(engine, publisher)
                    self._began_ns = now_ns()
                    if checkpoint is not None:
                        self._resume(checkpoint, run, state)
                    resumed = self.resumed_after_step or None
                    with RunRecorder(engine, self._out, title=self._title, resumed_after_step=resumed) as recorder:
                        reports = grpo(
                            engine,
                            publisher,
                            model,
                            optimizer,
                            task.shuffled(options.seed),
                            task.score,
                            config,
                            scheduler,
                            run=run,
                            loggers=[*self._loggers, recorder],
                        )
                        for report in self._followed(engine, reports, recorder):
                            at_end = report.step == options.steps
                            if options.save_every and (at_end or report.step % options.save_every == 0):
                                self._save(report.step, run, model, state)
                        engine.wait_for_version(publisher.version)
                        self._display.phase("evaluation", 1)
                        self.accuracy_after = held_out_accuracy(engine, task, task.held_out)
                        self.records[-1].accuracy = self.accuracy_after
                        recorder.log(self.records[-1].step, {"accuracy": self.accuracy_after})
        except KeyboardInterrupt:
            self.interrupted = True

    def _followed(
        self, engine: LaunchedEngine, reports: Iterator[StepReport], recorder: RunRecorder
    ) -> Iterator[StepReport]:
        """The reports, of which each was recorded, and some steps evaluated."""
        task, options = self._task, self._options
        if not self.resumed_after_step and self.accuracy_before is not None:
            recorder.log(0, {"accuracy": self.accuracy_before})
        self._display.phase("GRPO", options.steps - len(self.records))
        last_ns, last_tokens = now_ns(), engine.stream.num_tokens
        for report in reports:
            tokens, seconds = engine.stream.num_tokens - last_tokens, (report.finished_ns - last_ns) / 1e9
            last_tokens, last_ns = engine.stream.num_tokens, report.finished_ns
            accuracy = None
            if report.step % EVALUATE_EVERY == 0 and report.step < options.steps:
                accuracy = held_out_accuracy(engine, task, task.held_out[:QUICK_EVALUATION])
                recorder.log(report.step, {"accuracy": accuracy})
            self._record(engine, report, tokens / seconds, accuracy)
            yield report

    def summary(self, engine: LaunchedEngine) -> dict[str, Any]:
        last = self.records[-1] if self.records else None
        tail, meter, num_tokens = self.records[-10:], engine.staleness, engine.stream.num_tokens
        return {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "reward_last_10_steps": float(np.mean([r.reward for r in tail])) if tail else None,
            "num_swaps": meter.num_swaps,
            "num_swaps_in_flight": meter.num_swaps_in_flight,
            "dropped": self._dropped.as_dict(),
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / last.seconds if last else None,
            "seconds_rl": last.seconds if last else None,
            "interrupted": self.interrupted,
            **meter.summary(),
        }

    def _save(self, step: int, run: Run, model: PreTrainedModel, state: Mapping[str, Any]) -> None:
        def write(directory: Path) -> None:
            model.save_pretrained(directory)
            self._tokenizer.save_pretrained(directory)
            torch.save({name: one.state_dict() for name, one in state.items()}, directory / _TRAINER)
            (directory / OPTIONS_FILE).write_bytes(msgspec.json.encode(self._options, enc_hook=str))
            run.progress["accuracy_before"] = self.accuracy_before
            run.save(directory)

        with _writing(self._out):
            save_checkpoint(self._out, step, write)

    def _resume(self, checkpoint: Path, run: Run, state: Mapping[str, Any]) -> None:
        saved_state = torch.load(checkpoint / _TRAINER, weights_only=True)
        for name, one in state.items():
            one.load_state_dict(saved_state[name])
        run.load(checkpoint)
        self.accuracy_before = run.progress["accuracy_before"]
        self.resumed_after_step = run.progress["grpo"]["step"]
        lines = (self._out / _STEPS).read_text().splitlines()[: self.resumed_after_step]
        with replacing(self._out / _STEPS) as partial:  # steps after the checkpoint are taken again
            partial.write_text("".join(f"{line}\n" for line in lines))
        self.records = [StepRecord(**json.loads(line)) for line in lines]
        self._began_ns -= int(self.records[-1].seconds * 1e9)

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
        with _writing(self._out), open(self._out / _STEPS, "a") as file:
            file.write(json.dumps(asdict(record)) + "\n")  # at once: an interrupted run keeps what it had
        self._display.add(record)


@contextmanager
def tracker(options: DemoOptions, out: Path, task: str) -> Iterator[list[Logger]]:
    """Open what the numbers of a run go to, or nothing, and close it at the end. Raises LoggerError."""
    if options.tracker == "none":
        yield []
        return
    config = {key: str(value) for key, value in asdict(options).items()}
    with open_logger(options.tracker, out, project=f"inflight-{task}", config=config) as logger:
        yield [logger]


def held_out_accuracy(engine: LaunchedEngine, task: Task, examples: Sequence[Example]) -> float:
    """Return the share of these prompts whose greedy answer scores 1."""
    params = SamplingParams(max_tokens=task.max_tokens, temperature=0)
    with span("evaluation"):
        groups = engine.generate([e.prompt for e in examples], params, metadata=[e.metadata for e in examples])
        return float(np.mean([task.score(group[0]) >= 1 for group in groups]))


def longest(task: Task, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens of the longest prompt and the longest answer together."""
    prompts = [str(example.prompt) for example in (*task.train, *task.held_out)]
    return max(len(ids) for ids in tokenizer(prompts)["input_ids"]) + task.max_tokens


def _parameters(model: PreTrainedModel) -> str:
    count = sum(p.numel() for p in model.parameters())
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.1f} B"
