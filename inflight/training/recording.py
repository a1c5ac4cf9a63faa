"""Recorder of a run: writes events in the background for `inflight watch` and for later reports."""

import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial, wraps
from inspect import unwrap
from math import isfinite
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from inflight.core import spans
from inflight.core.arguments import named
from inflight.core.clock import now_ns
from inflight.core.closing import ClosedAtEnd
from inflight.core.errors import InflightError
from inflight.core.messages import Status, Welcome
from inflight.core.options import EngineOptions
from inflight.core.version import __version__
from inflight.observability.event_file import MAX_BYTES, EventFile
from inflight.observability.events import (
    LOG_RATIO_EDGES,
    Began,
    Consumed,
    Ended,
    Engine,
    Episodes,
    Event,
    RunError,
    Samples,
    Step,
    Swapped,
    Version,
    read_events,
    rounded,
)
from inflight.observability.staleness_meter import StalenessMeter, TokenStaleness
from inflight.training.data.batch import PackedBatch
from inflight.training.data.rollout_stream import RolloutStream
from inflight.training.shown_rollouts import ShownRollouts

logger = logging.getLogger("inflight")

_WRITE_EVERY_S = 1.0
"""Time between two writes, and between two status calls to the engine."""
_WAITING_EVENTS = 4096
_VERSIONS = 256
"""Number of versions whose tokens are counted. The counts of older versions are final by then."""
_CLOSE_S = 5.0
_ASK_S = 1.0
_MEASURES = ("weight_lag_ms", "policy_age_ms", "token_age_ms", "version_lag")
_PERCENTS = (10, 50, 90, 99)
_MOST_ITEMS = 32
"""Length of lists in closures above which they are taken for data and are not recorded."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_BIN = LOG_RATIO_EDGES[1] - LOG_RATIO_EDGES[0]
_NUM_BINS = len(LOG_RATIO_EDGES) + 1


class RecordedEngine(Protocol):
    """The part of an engine that is recorded."""

    options: EngineOptions
    staleness: StalenessMeter

    @property
    def info(self) -> Welcome: ...

    @property
    def stream(self) -> RolloutStream: ...

    def status(self) -> Status: ...


def _harmless(listen: Callable[..., None]) -> Callable[..., None]:
    """Wrap a callback of the recorder: if it raises, the recorder stops listening and the run continues."""

    @wraps(listen)
    def listen_harmlessly(recorder: "RunRecorder", *told: Any) -> None:
        try:
            listen(recorder, *told)
        except Exception:
            recorder._stop_listening()
            logger.exception("the run goes on, but its record has no staleness, versions and ratios from now on")

    return listen_harmlessly


@named()
class RunRecorder(ClosedAtEnd):
    """Writes the events of a run into `events.jsonl` of a directory while it is open. One at a time in a process.

        with inflight.RunRecorder(engine, "runs/mine") as recorder:
            for step, batch in enumerate(engine.stream.batches(…), 1):
                …
                recorder.log(step, {"reward": engine.stream.last_reward, **stats.as_dict()})

    It is a logger, too: `inflight.grpo(…, loggers=[recorder])`. Staleness, swaps, ratios, sample rollouts and the state
    of the engine are recorded without further calls. title: name of the run. resumed_after_step: continue the file of
    the run after this step; None: a new file. max_bytes: size to which the file is thinned out. config: options to show
    in addition to the engine's, by name; values can be dataclasses, such as {"grpo": GRPOConfig(…)}.

    A thread writes the file. If a later write fails, a warning is logged and the run continues without a record. Raises
    RunError if the file cannot be opened, and InflightError if another recorder is open.
    """

    def __init__(
        self,
        engine: RecordedEngine,
        directory: str | Path,
        *,
        title: str = "",
        resumed_after_step: int | None = None,
        max_bytes: int = MAX_BYTES,
        config: Mapping[str, Any] | None = None,
    ):
        self._meter, self._stream = engine.staleness, engine.stream
        self.directory = Path(directory)
        self._lock = threading.Lock()
        self._mismatch, self._stale = np.zeros(_NUM_BINS, np.int64), np.zeros(_NUM_BINS, np.int64)
        self._shown = ShownRollouts(engine.stream.texts)
        self._logged_ns = now_ns()
        self._to_unix_s = time.time() - now_ns() / 1e9
        began = Began(
            time=_now(),
            title=title or self.directory.name,
            model=engine.options.model or "",
            max_sequences=sum(one.info.max_sequences for one in getattr(engine, "members", [engine])),
            resumed_after_step=resumed_after_step or 0,
            pid=os.getpid(),
            inflight_version=__version__,
            config=_texts({"engine": engine.options, **(config or {})}),
        )
        spans.start_adding_up()  # Refuses a second recorder before it removes the file of the first.
        with ExitStack() as undo:
            undo.callback(spans.stop_adding_up)
            file = EventFile(self.directory, keep=resumed_after_step is not None, max_bytes=max_bytes)
            undo.callback(file.close)
            self._writer = _Writer(file, began, {} if resumed_after_step is None else _lives_of(self.directory))
            undo.pop_all()
        self._watcher = _EngineWatcher(engine, self._writer)
        self._meter.listener = self
        self._stream.observers.append(self._observe)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the finite numbers of a step."""
        numbers = {name: rounded(value) for name, value in values.items() if isfinite(value)}
        now, before = now_ns(), self._logged_ns
        with self._lock:
            mismatch, stale = self._mismatch.tolist(), self._stale.tolist()
            self._mismatch[:] = self._stale[:] = 0
        self._logged_ns = now
        self._show()
        self._writer.put(
            Step(
                time=_now(),
                step=int(step),
                numbers=numbers,
                seconds=rounded((now - before) / 1e9),
                spans={name: rounded(seconds) for name, seconds in spans.added_up().items()},
                mismatch=mismatch if any(mismatch) else [],
                stale=stale if any(stale) else [],
            )
        )

    def close(self) -> None:
        """Write the remaining events, and record that the run has ended. Safe to call twice."""
        if self._writer.closing.is_set():
            return
        self._stop_listening()
        self._show()
        spans.stop_adding_up()
        self._writer.closing.set()
        self._watcher.thread.join(_ASK_S)  # An engine that does not respond is not waited for.
        self._writer.thread.join(_CLOSE_S)
        if self._writer.thread.is_alive():
            logger.warning("the last second of the run is not in %s: its writer does not end", self._writer.file.path)

    # ---- callbacks of the meter (`StalenessListener`) ----------------------------------------------------------------

    @_harmless
    def published(self, version: int, called_ns: int) -> None:
        self._writer.publish(version, round(self._to_unix_s + called_ns / 1e9, 3))

    @_harmless
    def drawn(self, version: int, num_tokens: int) -> None:
        self._writer.count(drawn=[(version, num_tokens)])

    @_harmless
    def swapped(self, version: int, swap_ms: float, stall_ms: float) -> None:
        event = Swapped(time=_now(), version=version, swap_ms=rounded(swap_ms), stall_ms=rounded(stall_ms))
        self._writer.put(event)

    @_harmless
    def taken(self, weight_versions: np.ndarray, in_loss: np.ndarray) -> None:
        lost = [(version, -count) for version, count in _counts(in_loss)]
        self._writer.count(dropped=_counts(weight_versions) + lost)

    @_harmless
    def consumed(self, weight_versions: np.ndarray, staleness: TokenStaleness, in_loss: np.ndarray) -> None:
        measures = {}
        if len(weight_versions):
            percentiles = _percentiles([getattr(staleness, name) for name in _MEASURES])
            measures = {name: [*map(rounded, values)] for name, values in zip(_MEASURES, percentiles, strict=True)}
        self._writer.count(trained=_counts(weight_versions[in_loss]))
        self._writer.put(Consumed(time=_now(), num_tokens=len(weight_versions), measures=measures))

    # ---- callback of the loss ----------------------------------------------------------------------------------------

    @_harmless
    def _observe(self, batch: PackedBatch, rows: torch.Tensor, log_ratios: torch.Tensor) -> None:
        logs = log_ratios.float().cpu().numpy()
        if batch.trainer_version is not None:  # Otherwise mismatch and staleness cannot be distinguished.
            finite = np.isfinite(logs)
            bins = np.clip(np.floor((logs[finite] - LOG_RATIO_EDGES[0]) / _BIN) + 1, 0, _NUM_BINS - 1).astype(np.int64)
            own = (batch.version_lags[rows] <= 0).cpu().numpy()[finite]
            with self._lock:
                self._mismatch += np.bincount(bins[own], minlength=_NUM_BINS)
                self._stale += np.bincount(bins[~own], minlength=_NUM_BINS)
        if batch.rollouts:
            self._put(self._shown.observe(batch, rows, logs))

    @_harmless
    def _show(self) -> None:
        self._put(self._shown.take())

    def _put(self, shown: Samples | None) -> None:
        if shown is not None:
            self._writer.put(shown)

    def _stop_listening(self) -> None:
        self._meter.listener = None
        with suppress(ValueError):  # The observer has been removed already.
            self._stream.observers.remove(self._observe)


class _Writer:
    """A thread that writes events to a file until `closing` is set, and with them the versions that have changed."""

    def __init__(self, file: EventFile, first: Event, lives: dict[int, Version]):
        """lives: token counts of the newest versions of the run before it was resumed."""
        self.file, self.lives = file, lives
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self.waiting: deque[Event] = deque([first])
        self._changed: set[int] = set()
        """Versions whose counts have changed since they were written."""
        self._num_lost = 0
        self.thread = threading.Thread(target=self._run, name="inflight-recorder", daemon=True)
        self.thread.start()

    def put(self, event: Event) -> None:
        """Queue an event. It is lost if too many are waiting."""
        with self._lock:
            if len(self.waiting) < _WAITING_EVENTS:
                self.waiting.append(event)
            else:
                self._num_lost += 1

    def publish(self, version: int, published: float) -> None:
        """Note a publish. A resumed run can publish a version again, so its counts start from 0."""
        with self._lock:
            self._set(Version(time=0.0, version=version, published=published))

    def count(self, **columns: Sequence[tuple[int, int]]) -> None:
        """Add counts of tokens by version to columns of `Version`."""
        with self._lock:
            for column, counts in columns.items():
                for version, count in counts:
                    life = self.lives.get(version) or Version(time=0.0, version=version)
                    self._set(msgspec.structs.replace(life, **{column: getattr(life, column) + count}))

    def _set(self, life: Version) -> None:
        self.lives[life.version] = life
        self._changed.add(life.version)
        while len(self.lives) > _VERSIONS:
            oldest = min(self.lives)
            del self.lives[oldest]
            self._changed.discard(oldest)

    def _run(self) -> None:
        try:
            while not self.closing.wait(_WRITE_EVERY_S):
                self._write_out()
            self._write_out()
            self.file.append([Ended(time=_now(), num_lost=self._num_lost)])
        except RunError as error:
            logger.warning("the run goes on without a record: %s", error)
        except Exception:
            logger.exception("the run goes on without a record")
        finally:
            self.file.close()

    def _write_out(self) -> None:
        with self._lock:
            events, self.waiting = [*self.waiting], deque()
            events += [msgspec.structs.replace(self.lives[version], time=_now()) for version in sorted(self._changed)]
            self._changed = set()
        num_lost = self.file.append(events)
        with self._lock:
            self._num_lost += num_lost


class _EngineWatcher:
    """A thread that queries the engine. A slow engine does not delay the writer."""

    def __init__(self, engine: RecordedEngine, writer: _Writer):
        self._engine, self._writer = engine, writer
        self._seconds_by_state: Counter[str] = Counter()
        self.thread = threading.Thread(target=self._run, name="inflight-recorder-asks", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self._writer.closing.wait(_WRITE_EVERY_S) and self._writer.thread.is_alive():
                self._writer.put(self._engine_now())
                for activity in self._engine.stream.episodes[:1]:
                    self._writer.put(Episodes(time=_now(), **activity()))
        except Exception:
            logger.exception("the run goes on, but its record has no counters of the engine from now on")

    def _engine_now(self) -> Engine:
        """Return the counters of the engine, or only its state if it cannot respond."""
        stream = self._engine.stream
        state = stream.state
        if state in ("restarting", "silent", "closed"):
            return Engine(time=_now(), states={state: 1.0})
        try:
            status = self._engine.status()
        except (InflightError, TimeoutError):  # The callers that wait for rollouts receive the error.
            return Engine(time=_now(), states={"silent": 1.0})
        before, self._seconds_by_state = self._seconds_by_state, Counter(status.seconds_by_state)
        spent = self._seconds_by_state - before  # Empty if the engine has just been restarted.
        return Engine(
            time=_now(),
            states={name: rounded(seconds / spent.total()) for name, seconds in spent.items()},
            version=status.version,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            num_outstanding=len(stream.outstanding),
            num_tokens=status.num_tokens,
            kv_used=rounded(status.kv_blocks_used / status.kv_blocks) if status.kv_blocks else None,
        )


def _texts(options: Any, name: str = "") -> dict[str, str]:
    """Return options as text under flat names, such as "grpo.sampling.n"."""
    plain = msgspec.to_builtins(options, enc_hook=_text)
    if not isinstance(plain, dict):
        return {name: str(plain)}
    texts: dict[str, str] = {}
    for key, value in plain.items():
        texts |= _texts(value, f"{name}.{key}".strip("."))
    return texts


def _text(value: Any, depth: int = 4) -> str:
    """Return a value as text that is equal in every process. Functions and classes become their names, partials and
    closures with their arguments: "ppo_clip(high=0.28)". Arguments named "seed" are left out. Of a closure only numbers
    and functions are recorded, because other objects can be data or secrets."""
    if isinstance(value, partial):
        name, given = _text(value.func, depth - 1), {**dict(enumerate(value.args)), **value.keywords}
    elif isinstance(value := unwrap(value) if callable(value) else value, FunctionType) and value.__closure__:
        name, given = value.__qualname__, {}
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            with suppress(ValueError):  # an empty cell
                if _is_plain(cell.cell_contents):
                    given[variable] = cell.cell_contents
    else:
        return getattr(value, "__qualname__", None) or _ADDRESS.sub("", str(value))
    if depth <= 0:  # A function can refer to itself.
        return name
    texts = [f"{key}={_text(one, depth - 1)}" for key, one in given.items() if key != "seed"]
    return f"{name}({', '.join(texts)})"


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of a few numbers and functions."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_ITEMS and all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | FunctionType | partial)


def _now() -> float:
    return round(time.time(), 3)


def _lives_of(directory: Path) -> dict[int, Version]:
    """Read the recorded counts of the newest versions of a run."""
    lives = {event.version: event for event in read_events(directory) if isinstance(event, Version)}
    return dict(sorted(lives.items())[-_VERSIONS:])


def _counts(versions: np.ndarray) -> list[tuple[int, int]]:
    """Count each version of i64[n]."""
    return [(int(version), int(count)) for version, count in zip(*np.unique(versions, return_counts=True), strict=True)]


def _percentiles(columns: Sequence[np.ndarray]) -> list[list[float]]:
    """Return the recorded percentiles of each of these columns [n], as `np.percentile` in a tenth of its time."""
    ordered = np.sort(np.stack(columns).astype(np.float64))
    places = np.array(_PERCENTS) / 100 * (ordered.shape[1] - 1)
    below, above = np.floor(places).astype(int), np.ceil(places).astype(int)
    return (ordered[:, below] + (places - below) * (ordered[:, above] - ordered[:, below])).tolist()
