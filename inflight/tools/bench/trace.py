"""`inflight bench trace`: a short trace of decoding, publishing and training, and their overlap in numbers."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn

from inflight.core.sampling import SamplingParams
from inflight.observability.trace import check_path
from inflight.observability.trace_file import GPU_WORK, Event, read
from inflight.tools.bench.options import TraceOptions
from inflight.tools.bench.staleness import GROUP_SIZE, engine_and_trainer, parity_of_tokens, random_prompts
from inflight.tools.progress import Progress, untold
from inflight.training.grpo import GRPOConfig, grpo

_PASSES = ("prefill", "decode")
_TRAINING = ("forward", "backward", "optimizer step")
_COPY = "publish copy"
_OWN_STREAM = 0.9
"""Share of publish copies in the work of a stream above which the stream belongs to the publisher. Publish copies wait
for their own end."""


@dataclass(frozen=True, slots=True)
class Work:
    """Intervals of each kind of work: f64[n, 2], starts and ends in seconds. They can overlap."""

    source: str
    """Source of the times: "kernels" (kernels and copies on GPUs) or "spans" (by name, on CPUs)."""
    decode: np.ndarray
    """Passes of the engine: prefill, decode and draws."""
    train: np.ndarray
    copy: np.ndarray


def measure(settings: TraceOptions, progress: Progress = untold) -> dict[str, Any]:
    """Run GRPO on random prompts and arbitrary rewards, publish after each step, and trace `seconds` of it after
    `warmup_steps`.

    Weights of engine and trainer have `dtype`. On a CPU each side gets half of the cores. The result has the seconds of
    each kind of work (`work_in`) and of each overlap.
    """
    out, trace = check_path(settings.out), None
    config = GRPOConfig(
        steps=1 << 30,
        groups_per_step=settings.sequences // GROUP_SIZE,
        sampling=SamplingParams(n=GROUP_SIZE, max_tokens=settings.tokens, ignore_eos=True),
        micro_batch_tokens=settings.micro_batch_tokens,
    )
    with engine_and_trainer(settings) as (engine, model):
        nn.Module.to(model, getattr(torch, engine.info.layout.tensors[0].dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        examples = random_prompts(engine.info.vocab_size, settings.prompt_tokens)
        with engine.publisher(model) as publisher:
            for report in grpo(engine, publisher, model, optimizer, examples, parity_of_tokens, config):
                warmed_up = min(1.0, report.step / settings.warmup_steps)
                progress(f"step {report.step}" + ", tracing" * (trace is not None), warmed_up)
                if trace is None and report.step >= settings.warmup_steps:
                    trace = engine.trace(out, seconds=settings.seconds, details=settings.details)
                elif trace is not None and trace.done:
                    trace.close()
                    break
    return {"bench": "trace", **asdict(settings), **summarize(read(out)), "file_mb": out.stat().st_size / 1e6}


def summarize(trace: dict[str, Any]) -> dict[str, Any]:
    """Return seconds by kind of work in a trace, and seconds with two kinds at once."""
    work, seconds, events = work_in(trace["traceEvents"]), trace["otherData"]["seconds"], trace["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "inflight"]
    return {
        "seconds": seconds,
        "source": work.source,
        "busy_share": busy(work.decode, work.train, work.copy) / seconds,
        "decode_s": busy(work.decode),
        "train_s": busy(work.train),
        "copy_s": busy(work.copy),
        "overlap_train_decode_s": overlap(work.train, work.decode),
        "overlap_copy_decode_s": overlap(work.copy, work.decode),
        "num_passes": sum(name in _PASSES for name in names),
        "num_copies": sum(name.startswith(_COPY) for name in names),
        "num_swaps": sum(name.startswith("swap") for name in names),
        "num_events": len(events),
    }


def work_in(events: Iterable[Event]) -> Work:
    """Return the work in a merged trace.

    With GPUs: kernels and copies of the engine and of the trainer. Streams of the publisher are separated from other
    streams of the trainer. Without GPUs: spans, separated by name.
    """
    events = list(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event.get("cat") == "inflight"]
    copies = _intervals(event for event in spans if event["name"].startswith(_COPY))
    gpu = [event for event in events if event.get("cat") in GPU_WORK]
    if not gpu:
        return Work(
            "spans",
            decode=_intervals(event for event in spans if event["name"] in _PASSES),
            train=_intervals(event for event in spans if event["name"] in _TRAINING),
            copy=copies,
        )
    trainer: dict[tuple[int, int], list[Event]] = {}
    for event in gpu:
        if names[event["pid"]].startswith("trainer"):
            trainer.setdefault((event["pid"], event["tid"]), []).append(event)
    streams = [_intervals(stream) for stream in trainer.values()]
    own = [overlap(stream, copies) >= _OWN_STREAM * busy(stream) for stream in streams]
    return Work(
        "kernels",
        decode=_intervals(event for event in gpu if not names[event["pid"]].startswith("trainer")),
        train=_joined(stream for stream, copies_only in zip(streams, own, strict=True) if not copies_only),
        copy=_joined(stream for stream, copies_only in zip(streams, own, strict=True) if copies_only),
    )


def busy(*intervals: np.ndarray) -> float:
    """Return the seconds covered by at least one of the intervals f64[n, 2]."""
    joined = _joined(intervals)
    begins, ends = joined[np.argsort(joined[:, 0], kind="stable")].T
    covered = np.concatenate(([-np.inf], np.maximum.accumulate(ends)[:-1])) if len(ends) else ends
    return float(np.maximum(ends - np.maximum(begins, covered), 0).sum())


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Return the seconds covered by an interval of `a` and an interval of `b` at the same time."""
    return max(0.0, busy(a) + busy(b) - busy(a, b))


def table(result: dict[str, Any]) -> Table:
    shown = Table("under way", "seconds", "share", title=f"{result['seconds']:.2f} s of {result['model']}")
    rows = {
        "decode": "decode_s",
        "training": "train_s",
        "publish copies": "copy_s",
        "training and decode at once": "overlap_train_decode_s",
        "copy and decode at once": "overlap_copy_decode_s",
    }
    for name, key in rows.items():
        shown.add_row(name, f"{result[key]:.3f}", f"{result[key] / result['seconds']:.1%}")
    shown.add_row("any of it", f"{result['busy_share'] * result['seconds']:.3f}", f"{result['busy_share']:.1%}")
    shown.caption = f"{result['out']}, {result['file_mb']:.2f} MB: open it in ui.perfetto.dev or chrome://tracing"
    return shown


def _intervals(events: Iterable[Event]) -> np.ndarray:
    rows = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return np.array(rows, np.float64).reshape(-1, 2) / 1e6


def _joined(intervals: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty((0, 2)), *intervals])
