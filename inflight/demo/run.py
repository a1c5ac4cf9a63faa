"""`inflight demo`: the whole loop on this machine, from random weights to a model that reinforcement improved."""

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, ModelLoadError
from inflight.core.sampling import SamplingParams
from inflight.demo.display import Display
from inflight.demo.record import StepRecord, append_step, plot
from inflight.demo.tasks import Task
from inflight.demo.warmup import WarmupConfig, ramp_and_decay, warm_up
from inflight.engine.loading import load_tokenizer
from inflight.engine.shapes import SHAPES, shape_config
from inflight.observability.environment import environment, write_json
from inflight.session import LaunchedEngine, launch
from inflight.training.data.dropped import Dropped
from inflight.training.grpo import Example, GRPOConfig, StepReport, grpo


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    model: str
    """A built-in shape, a directory or a hub id."""
    out: Path
    device: str = "auto"
    sync: bool = False
    seed: int = 0
    steps: int = 200
    warmup_steps: int = 250
    learning_rate: float = 3e-4
    groups_per_step: int = 128
    group_size: int = 8
    evaluate_every: int = 25
    quick_evaluation: int = 128
    """Held-out prompts of the evaluations in between; before and after all of them are used."""
    max_sequences: int = 128


def run_demo(task: Task, config: DemoConfig, console: Console) -> dict[str, Any]:
    """Warm up, train by GRPO, evaluate; returns the summary that is also written to `config.out`.

    Ctrl-C ends the run early; what was measured by then is summarised and written all the same.
    """
    disable_progress_bar()  # of Transformers; the run has its own
    steps_file = _prepare(config.out)
    torch.manual_seed(config.seed)
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    began_ns = now_ns()
    model, tokenizer = load_trainer(config.model, device)
    mode = "sync" if config.sync else "inflight"
    title = f"{task.name}, {_parameters(model)} parameters, {mode}"
    example = task.train[0]
    console.print(
        f"{task.name}: {example.prompt!r} asks for {example.metadata['answer']!r}; {len(task.train):,} prompts to "
        f"train on, {len(task.held_out)} held out; {config.model}, {_parameters(model)} parameters, {device.type}",
        highlight=False,
        soft_wrap=True,
    )
    with Display(title, console=console) as display, tempfile.TemporaryDirectory(prefix="inflight-demo-") as directory:
        if config.warmup_steps:
            display.phase("warm-up", config.warmup_steps)
            warm_up(
                model,
                tokenizer,
                task.train,
                WarmupConfig(steps=config.warmup_steps),
                seed=config.seed,
                on_step=lambda _, loss: display.advance(f"loss {loss:.3f}"),
            )
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        run = _Run(task, config, display, steps_file)
        with (
            _share_cores(device) as engine_threads,
            launch(
                directory,
                device=config.device,
                max_sequences=config.max_sequences,
                max_context=longest(task, tokenizer),
                threads=engine_threads,
            ) as engine,
        ):
            run.train(engine, model)
    summary = run.summary() | {
        "mode": mode,
        "task": task.name,
        "model": config.model,
        "seed": config.seed,
        "steps": len(run.records),
        "seconds": (now_ns() - began_ns) / 1e9,
        "environment": environment(),
    }
    with _writing(config.out):
        write_json(config.out / "summary.json", summary)
        if run.records and run.accuracy_before is not None:
            plot(config.out / "demo.png", run.records, title=title, accuracy_before=run.accuracy_before)
    return summary


def _prepare(out: Path) -> Path:
    """The file of steps in a directory that can be written to, empty. Raises InflightError now rather than after the
    run."""
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
    """The reinforcement-learning part, and what is known of it so far."""

    def __init__(self, task: Task, config: DemoConfig, display: Display, steps_file: Path):
        self._task, self._config, self._display, self._steps_file = task, config, display, steps_file
        self.records: list[StepRecord] = []
        self.accuracy_before: float | None = None
        self.accuracy_after: float | None = None
        self.interrupted = False
        self._swaps: dict[str, int] = {}
        self._staleness: dict[str, Any] = {}
        self._num_tokens = 0
        self._dropped = Dropped()
        self._began_ns = 0

    def train(self, engine: LaunchedEngine, model: PreTrainedModel) -> None:
        config = self._config
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        scheduler = ramp_and_decay(optimizer, ramp=10, steps=config.steps, floor=0.1)
        grpo_config = GRPOConfig(
            steps=config.steps,
            groups_per_step=config.groups_per_step,
            sampling=SamplingParams(n=config.group_size, max_tokens=self._task.max_tokens),
            schedule="sync" if config.sync else "inflight",
        )
        gc.collect()
        gc.freeze()  # a full collection would delay a publish by a quarter of a second, now and then
        try:
            self._display.phase("evaluation", 1)
            self.accuracy_before = held_out_accuracy(engine, self._task, self._task.held_out)
            self._display.phase("GRPO", config.steps)
            with engine.publisher(model) as publisher:
                self._began_ns = last_ns = now_ns()
                examples = self._task.shuffled(config.seed)
                last_tokens = engine.stream.num_tokens
                reports = grpo(engine, publisher, model, optimizer, examples, self._task.score, grpo_config, scheduler)
                for report in reports:
                    tokens, seconds = engine.stream.num_tokens - last_tokens, (report.finished_ns - last_ns) / 1e9
                    last_tokens, last_ns = engine.stream.num_tokens, report.finished_ns
                    accuracy = None
                    if report.step % config.evaluate_every == 0 and report.step < config.steps:
                        some = self._task.held_out[: config.quick_evaluation]
                        accuracy = held_out_accuracy(engine, self._task, some)
                    self._record(engine, report, tokens / seconds, accuracy)
                engine.wait_for_version(publisher.version)
                self._display.phase("evaluation", 1)
                self.accuracy_after = held_out_accuracy(engine, self._task, self._task.held_out)
                self.records[-1].accuracy = self.accuracy_after
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            gc.unfreeze()  # what is never collected is reported as leaked by some libraries when the process ends
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
            ratio_mean=stats.ratio_mean if stats else None,
        )
        self.records.append(record)
        with _writing(self._config.out):
            append_step(self._steps_file, record)
        self._display.add(record)


def held_out_accuracy(engine: LaunchedEngine, task: Task, examples: Sequence[Example]) -> float:
    """Share of these prompts whose greedy answer scores 1."""
    params = SamplingParams(max_tokens=task.max_tokens, temperature=0)
    groups = engine.generate([e.prompt for e in examples], params, metadata=[e.metadata for e in examples])
    return float(np.mean([task.score(group[0]) >= 1 for group in groups]))


class _share_cores:
    """Split the CPU's cores between trainer and engine for a while; gives the engine's number of threads."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before = torch.get_num_threads()

    def __enter__(self) -> int:
        if self._device.type == "cuda":
            return 0
        torch.set_num_threads(max(1, self._before // 2))
        return max(1, self._before - self._before // 2)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def longest(task: Task, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt and the longest answer together."""
    prompts = [str(example.prompt) for example in (*task.train, *task.held_out)]
    return max(len(ids) for ids in tokenizer(prompts)["input_ids"]) + task.max_tokens


def load_trainer(name: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The trainer's model, fp32, with gradient, and its tokenizer."""
    tokenizer = load_tokenizer(name)
    if name in SHAPES:
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.float32)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot load model {name!r}: {str(error).splitlines()[0]}") from error
    if tokenizer is None:
        raise ModelLoadError(f"model {name!r} has no tokenizer, which the demo needs to read and write text")
    nn.Module.to(model, device)
    return model, tokenizer


def _parameters(model: PreTrainedModel) -> str:
    count = sum(p.numel() for p in model.parameters())
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.1f} B"
