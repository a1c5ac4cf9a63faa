"""`inflight demo`: the whole loop on this machine, from random weights to a model that reinforcement improved."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib.util import find_spec
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
from inflight.core.extras import install_hint
from inflight.core.files import file_errors
from inflight.core.garbage import without_full_collections
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.spans import span
from inflight.engine.model.device import resolve_device
from inflight.engine.model.shapes import SHAPES
from inflight.engine.prompts import encode_prompts
from inflight.fleet.engine import Engine
from inflight.fleet.launching import launch
from inflight.observability.events import EVENTS_FILE
from inflight.observability.loggers import JsonLines, Logger, open_logger
from inflight.run import Run
from inflight.tools.demo.checkpoints import (
    OPTIONS_FILE,
    checkpoints,
    newest_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)
from inflight.tools.demo.display import line_of, plot, print_summary
from inflight.tools.demo.options import DemoOptions
from inflight.tools.demo.real import MODEL as REAL_MODEL
from inflight.tools.demo.real import TASK as REAL_TASK
from inflight.tools.demo.real import freeze_lower_layers, load_real, real_task
from inflight.tools.demo.recipes import Recipe, check_options, recipe_of
from inflight.tools.demo.start import ANSWER_TOKENS, PROMPT_TOKENS, RECIPE, load_start, starts_from_file
from inflight.tools.demo.tasks import Task, file_task, gym_task
from inflight.tools.demo.trainer import (
    WarmupConfig,
    load_trainer,
    make_optimizer,
    require_tokenizer,
    saved,
    split_cores,
    torch_threads,
    warm_up,
)
from inflight.tools.environment import environment, write_json
from inflight.tools.progress import Progress, shown_on
from inflight.tools.watch.command import page_of
from inflight.training.data.lead import read_ahead
from inflight.training.data.scored_groups import Dropped
from inflight.training.grpo import Example, GRPOConfig, StepReport, grpo
from inflight.training.recording import RunRecorder

SHOWN_ANSWERS = 10
"""Number of held-out prompts with answers in the summary, before and after training."""
_TRAINER = "trainer.pt"
_STEPS = "steps.jsonl"


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Warm up, train by GRPO, evaluate, and return the summary.

    The summary is also printed and written to `options.out`. Ctrl-C ends the run early and keeps a summary of the steps
    so far. Raises InflightError.
    """
    disable_progress_bar()  # of Transformers; the run has its own
    check_options(options)
    checkpoint = newest_checkpoint(options.resume) if options.resume else None
    if checkpoint is not None:
        options = _options_of(checkpoint, options)
    recipe = recipe_of(options)
    read_ahead(options.ahead)  # A mistake is reported before anything is loaded.
    # The imports of reasoning-gym take seconds, and the engine of the demo's own task starts in this time.
    making = ThreadPoolExecutor(1, "inflight-demo-task").submit(_make_task, options)
    if not starts_from_file(options):
        making.result()
    task_name = REAL_TASK if options.real else options.data.name if options.data else options.task
    mode = "sync" if options.sync else "inflight"
    out = options.out or Path("runs") / f"{task_name}-{mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    options = replace(options, out=out)
    _check_writable(out)
    torch.manual_seed(options.seed)
    device = resolve_device(options.device)
    began_ns = now_ns()
    if options.real and checkpoint is None:
        console.print(f"loading {REAL_MODEL}")
        model, tokenizer = load_real(device)
    else:
        source = str(checkpoint or options.model)
        model, tokenizer = load_trainer(source, device), require_tokenizer(source)
    threads = split_cores(device, model)
    name = REAL_MODEL if options.real else options.model
    title = f"{task_name}, {_parameters(model)} parameters, {mode}"
    if making.done():
        making.result()  # a package might be missing
    with (
        page_of(out, port=options.web_port, console=console) if options.web else nullcontext(),
        tracker(options, out, task_name) as loggers,
        JsonLines(out / _STEPS) as lines,
        shown_on(console) as progress,
    ):
        if checkpoint is None:
            _start(options, model, tokenizer, making, threads.trainer, progress)
        max_context = PROMPT_TOKENS + (options.max_tokens or ANSWER_TOKENS)
        if not starts_from_file(options):
            max_context = longest(making.result(), tokenizer)
        progress("engine start", 0.0)
        with (
            saved(model, tokenizer, out) as directory,
            torch_threads(threads.trainer),
            launch(
                directory,
                backend=options.backend,
                device=options.device,
                max_sequences=recipe.max_sequences,
                max_prefill_tokens=recipe.max_prefill_tokens,
                max_context=max_context,
                threads=threads.engine,
                restarts=options.restarts,
            ) as engine,
        ):
            task = making.result()
            if checkpoint is None:
                if checkpoints(out):
                    console.print(f"replacing the run in {out}; --resume {out} would have continued it")
                _remove_run(out)  # only now, because a start can fail
            example = task.train[0]
            console.print(
                f"{task.name}: {_text(example)!r} asks for {example.metadata['answer']!r}; {len(task.train):,} prompts "
                f"to train on, {len(task.held_out)} held out; {name}, {_parameters(model)} parameters, {device.type}"
            )
            run = _Run(task, options, recipe, out, title, console, progress, tokenizer, loggers, lines)
            run.train(engine, model, checkpoint)
            summary = run.summary(engine)
    summary |= {
        "mode": mode,
        "task": task_name,
        "model": name,
        "backend": options.backend,
        "seed": options.seed,
        "steps": len(run.steps),
        "resumed_after_step": run.resumed_after_step,
        "seconds": (now_ns() - began_ns) / 1e9,
        "environment": environment(),
    }
    can_plot = find_spec("matplotlib") is not None
    with _writing(out):
        write_json(out / "summary.json", summary)
        if run.steps and run.accuracy_before is not None and can_plot:
            plot(out / "demo.png", run.steps, title=title, accuracy_before=run.accuracy_before)
    print_summary(console, summary)
    if not can_plot:
        console.print(f"no plot            matplotlib is not installed: {install_hint('demo')}")
    written = ", ".join(name for name in (_STEPS, EVENTS_FILE, "summary.json", "demo.png") if (out / name).exists())
    console.print(f"written            {out}/{written}")
    console.print(f"to look at it      inflight watch {out}")
    if run.interrupted and checkpoints(out):
        console.print(f"to go on           inflight demo --resume {out}")
    return summary


def _start(
    options: DemoOptions,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    making: Future[Task],
    threads: int,
    progress: Progress,
) -> None:
    """Prepare a model for reinforcement learning: load the checkpoint of the package, or train it on examples."""
    if starts_from_file(options):
        load_start(model)
        return
    steps = options.warmup_steps
    if steps is None:
        steps = RECIPE.steps if options.model in SHAPES and not options.real else 0
    if not steps:
        return
    with torch_threads(threads):  # small products run slower on more cores if other programs run there, too
        losses = warm_up(model, tokenizer, making.result().train, WarmupConfig(steps=steps, seed=options.seed))
        for step, loss in enumerate(losses, start=1):
            progress(f"warm-up, step {step} of {steps}: loss {loss:.3f}", step / steps)


def _options_of(checkpoint: Path, given: DemoOptions) -> DemoOptions:
    """Return the options of the resumed run. Options of this machine are taken from the command."""
    try:
        found = msgspec.json.decode(
            (checkpoint / OPTIONS_FILE).read_bytes(), type=DemoOptions, dec_hook=lambda kind, value: kind(value)
        )
    except (OSError, msgspec.DecodeError) as error:
        raise InflightError(f"cannot continue from {checkpoint}: {error}") from error
    return replace(
        found,
        steps=given.steps or found.steps,
        device=given.device,
        web=given.web,
        web_port=given.web_port,
        out=checkpoint.parent,
    )


def _make_task(options: DemoOptions) -> Task:
    if options.real:
        return real_task(seed=options.seed)
    if options.data:
        return file_task(options.data, max_tokens=options.max_tokens or 64)
    return gym_task(options.task, seed=options.seed, max_tokens=options.max_tokens)


def _check_writable(out: Path) -> None:
    """Make a directory, and write to it. Raises InflightError."""
    probe = out / ".probe"
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        probe.write_text("\n")  # a full file system accepts an empty file
        probe.unlink()


def _remove_run(out: Path) -> None:
    """Remove the files of an earlier run, and leave an empty file for steps."""
    with _writing(out):
        remove_checkpoints(out)
        for name in (EVENTS_FILE, "summary.json", "demo.png"):
            (out / name).unlink(missing_ok=True)
        (out / _STEPS).write_text("")


def _writing(out: Path) -> AbstractContextManager[None]:
    return file_errors(InflightError, f"cannot write to {out}", "--out takes another directory")


class _Run:
    """Reinforcement learning of a demo, and its results so far."""

    def __init__(
        self,
        task: Task,
        options: DemoOptions,
        recipe: Recipe,
        out: Path,
        title: str,
        console: Console,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
        loggers: Sequence[Logger],
        lines: JsonLines,
    ):
        self._task, self._options, self._out, self._console, self._progress = task, options, out, console, progress
        self._title, self._tokenizer, self._loggers, self._recipe = title, tokenizer, loggers, recipe
        self._lines = lines
        self.steps: list[dict[str, float]] = []
        """For each step, the numbers of its report, `seconds` since reinforcement learning began, `tokens_per_s` since
        the previous step, `swap_ms` of the newest swap, and the held-out `accuracy` if it was measured."""
        self.accuracy_before: float | None = None
        self.accuracy_after: float | None = None
        self.answers: list[dict[str, str]] = [{} for _ in self._task.held_out[:SHOWN_ANSWERS]]
        self.interrupted = False
        self.resumed_after_step = 0
        self._dropped = Dropped()
        self._began_ns = 0
        self._resumed_after_s = 0.0
        self._num_tokens, self._num_evaluation_tokens = 0, 0

    def train(self, engine: Engine, model: PreTrainedModel, checkpoint: Path | None) -> None:
        """checkpoint: checkpoint to continue from."""
        task, options, recipe = self._task, self._options, self._recipe
        layers = recipe.trained_layers
        trained = model.parameters() if layers is None else freeze_lower_layers(model, layers)
        optimizer, scheduler = make_optimizer(trained, recipe.learning_rate, ramp=recipe.ramp, steps=recipe.steps)
        state = {"optimizer": optimizer, "scheduler": scheduler}
        config = GRPOConfig(
            steps=recipe.steps,
            groups_per_step=recipe.groups_per_step,
            sampling=SamplingParams(n=options.group_size, max_tokens=task.max_tokens, temperature=recipe.temperature),
            schedule="sync" if options.sync else "inflight",
            ahead=read_ahead(options.ahead),
        )
        try:
            with without_full_collections():
                if checkpoint is None:
                    self._progress("evaluation")
                    self.accuracy_before = self._evaluate(engine, "before")
                with engine.publisher(model) as publisher:
                    run = Run(engine, publisher)
                    self._began_ns = now_ns()
                    if checkpoint is not None:
                        self._resume(checkpoint, run, state)
                    resumed = self.resumed_after_step or None
                    shown = {"grpo": config, "learning_rate": recipe.learning_rate, "seed": options.seed}
                    with RunRecorder(
                        engine, self._out, title=self._title, resumed_after_step=resumed, config=shown
                    ) as recorder:
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
                            at_end = report.step == recipe.steps
                            if options.save_every and (at_end or report.step % options.save_every == 0):
                                self._save(report.step, run, model, state)
                        engine.wait_for_version(publisher.version)
                        self._progress("evaluation")
                        self.accuracy_after = self._evaluate(engine, "after")
                        self.steps[-1]["accuracy"] = self.accuracy_after
                        self._log_accuracy(recipe.steps, self.accuracy_after, recorder, self._lines)
        except KeyboardInterrupt:
            self.interrupted = True

    def _evaluate(self, engine: Engine, when: str) -> float:
        """Return the accuracy of all held-out prompts, and keep the first answers."""
        rollouts = self._held_out_answers(engine, self._task.held_out)
        for example, answer, rollout in zip(self._task.held_out, self.answers, rollouts, strict=False):
            answer |= {"question": _text(example), "expected": example.metadata["answer"], when: rollout.text}
        return accuracy_of(self._task, rollouts)

    def _held_out_answers(self, engine: Engine, examples: Sequence[Example]) -> list[Rollout]:
        rollouts = held_out_answers(engine, self._task, examples)
        self._num_evaluation_tokens += sum(len(rollout.token_ids) for rollout in rollouts)
        return rollouts

    def _log_accuracy(self, step: int, accuracy: float, *more: Logger) -> None:
        for each in (*self._loggers, *more):
            each.log(step, {"accuracy": accuracy})

    def _followed(self, engine: Engine, reports: Iterator[StepReport], recorder: RunRecorder) -> Iterator[StepReport]:
        """Yield the reports. Each is recorded, and some steps are evaluated."""
        task, recipe = self._task, self._recipe
        if not self.resumed_after_step and self.accuracy_before is not None:
            self._log_accuracy(0, self.accuracy_before, recorder)
        first_tokens = last_tokens = engine.stream.num_tokens - self._num_evaluation_tokens
        last_ns = now_ns()
        for report in reports:
            num_tokens = engine.stream.num_tokens - self._num_evaluation_tokens
            tokens, seconds = num_tokens - last_tokens, (report.finished_ns - last_ns) / 1e9
            last_tokens, last_ns, self._num_tokens = num_tokens, report.finished_ns, num_tokens - first_tokens
            measured = {"seconds": (report.finished_ns - self._began_ns) / 1e9, "tokens_per_s": tokens / seconds}
            if (swap_ms := engine.staleness.last_swap_ms) is not None:
                measured["swap_ms"] = swap_ms
            if report.step % recipe.evaluate_every == 0 and report.step < recipe.steps:
                rollouts = self._held_out_answers(engine, task.held_out[: recipe.quick_evaluation])
                measured["accuracy"] = accuracy_of(task, rollouts)
                self._log_accuracy(report.step, measured["accuracy"], recorder)
            self._record(report, measured)
            yield report

    def summary(self, engine: Engine) -> dict[str, Any]:
        """Return the results of the run. Times, tokens, swaps and ages are those since the start or the resume."""
        seconds = self.steps[-1]["seconds"] - self._resumed_after_s if self.steps else None
        tail, meter, num_tokens = self.steps[-10:], engine.staleness, self._num_tokens
        return {
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "reward_last_10_steps": float(np.mean([step["reward"] for step in tail])) if tail else None,
            "num_swaps": meter.num_swaps,
            "num_swaps_in_flight": meter.num_swaps_in_flight,
            "dropped": self._dropped.as_dict(),
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / seconds if seconds else None,
            "seconds_rl": seconds,
            "interrupted": self.interrupted,
            "answers": self.answers,
            **meter.summary(),
        }

    def _save(self, step: int, run: Run, model: PreTrainedModel, state: Mapping[str, Any]) -> None:
        def write(directory: Path) -> None:
            model.save_pretrained(directory)
            self._tokenizer.save_pretrained(directory)
            with open(directory / _TRAINER, "wb") as file:  # given a path, torch does not say why it cannot write
                torch.save({name: one.state_dict() for name, one in state.items()}, file)
            (directory / OPTIONS_FILE).write_bytes(msgspec.json.encode(self._options, enc_hook=str))
            run.progress |= {"accuracy_before": self.accuracy_before, "answers": self.answers}
            run.save(directory)

        with _writing(self._out):
            save_checkpoint(self._out, step, write)

    def _resume(self, checkpoint: Path, run: Run, state: Mapping[str, Any]) -> None:
        saved_state = torch.load(checkpoint / _TRAINER, weights_only=True)
        for name, one in state.items():
            one.load_state_dict(saved_state[name])
        run.load(checkpoint)
        self.accuracy_before, self.answers = run.progress["accuracy_before"], run.progress["answers"]
        self.resumed_after_step = run.progress["grpo"]["step"]
        self._lines.continue_after(self.resumed_after_step)
        by_step: dict[int, dict[str, float]] = {}
        for line in map(json.loads, (self._out / _STEPS).read_text().splitlines()):
            by_step.setdefault(line["step"], {}).update(line)  # the last accuracy has its own line
        self.steps = [*by_step.values()]
        self._resumed_after_s = self.steps[-1]["seconds"] if self.steps else 0.0
        self._began_ns -= int(self._resumed_after_s * 1e9)

    def _record(self, report: StepReport, measured: dict[str, float]) -> None:
        numbers, self._dropped = report.as_dict() | measured, report.dropped
        self.steps.append(numbers)
        self._lines.log(report.step, numbers)  # immediately, so that an interrupted run keeps its steps
        if report.step == 1 or report.step % 10 == 0 or "accuracy" in measured:
            self._console.print(line_of(numbers))
        steps = self._recipe.steps
        self._progress(f"step {report.step} of {steps}: reward {report.reward:.3f}", report.step / steps)


@contextmanager
def tracker(options: DemoOptions, out: Path, task: str) -> Iterator[list[Logger]]:
    """Open the logger of a run, or none, and close it at the end. Raises LoggerError."""
    if options.tracker == "none":
        yield []
        return
    config = {key: str(value) for key, value in asdict(options).items()}
    with open_logger(options.tracker, out, project=f"inflight-{task}", config=config) as logger:
        yield [logger]


def held_out_accuracy(engine: Engine, task: Task, examples: Sequence[Example]) -> float:
    """Return the share of these prompts whose greedy answer scores 1."""
    return accuracy_of(task, held_out_answers(engine, task, examples))


def held_out_answers(engine: Engine, task: Task, examples: Sequence[Example]) -> list[Rollout]:
    """Return the greedy answer of each prompt."""
    params = SamplingParams(max_tokens=task.max_tokens, temperature=0)
    with span("evaluation"):
        groups = engine.generate([e.prompt for e in examples], params, metadata=[e.metadata for e in examples])
        return [group[0] for group in groups]


def accuracy_of(task: Task, rollouts: Sequence[Rollout]) -> float:
    return float(np.mean([task.score(rollout) >= 1 for rollout in rollouts]))


def longest(task: Task, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens of the longest prompt and the longest answer together."""
    prompts = [e.prompt for e in (*task.train, *task.held_out)]
    if all(isinstance(prompt, str) for prompt in prompts):
        encoded: Any = tokenizer(prompts)["input_ids"]  # many times as fast as one by one
    else:
        encoded = [ids for ids, _ in encode_prompts(prompts, tokenizer, model=task.name)]
    return max(map(len, encoded)) + task.max_tokens


def _text(example: Example) -> str:
    """Return the prompt for readers: its text, or the last of its messages."""
    return example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]


def _parameters(model: PreTrainedModel) -> str:
    count = model.num_parameters()
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.1f} B"
