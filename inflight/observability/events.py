"""What a run records of itself: one line of JSON per event in the file `events.jsonl` of its directory.

Each event has a "kind" and the "time" at which it was recorded, in seconds since 1970. Where a value is not known it is
left out or null. docs/watch.md says how to read them; `read_events` does it.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from inflight.core.decoders import json_decoder
from inflight.core.errors import InflightError
from inflight.core.files import file_errors

EVENTS_FILE = "events.jsonl"
LOG_RATIO_EDGES = [round(-2 + 0.1 * index, 1) for index in range(41)]
"""The edges of the bins in which log ρ is counted: below −2, 40 bins up to 2, and above."""


class RunError(InflightError):
    """A run's record cannot be read or written; the message names the file."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    time: float


class Began(_Event, frozen=True, kw_only=True, tag="began"):
    """A recorder was opened: a run began, or went on in the same directory."""

    title: str
    model: str = ""
    max_sequences: int = 0
    """Sequences that the engine, or all engines of a pool, decode together at most: batch rows; 0 if not known."""
    resumed_after_step: int = 0
    """Steps after this one that stand above are taken again, and do not count."""
    pid: int = 0
    inflight_version: str = ""


class Step(_Event, frozen=True, kw_only=True, tag="step"):
    """An optimizer step. Several events may tell of one step; their numbers add to each other."""

    step: int
    numbers: dict[str, float]
    """As loggers get them: "reward", "ratio/ess", …"""
    seconds: float | None = None
    """Seconds since the event before of this kind."""
    spans: dict[str, float] = {}
    """Seconds that the trainer's thread spent in each named span since then."""
    mismatch: list[int] = []
    """Tokens by log ρ, in the bins of LOG_RATIO_EDGES: those that the trainer's own version drew."""
    stale: list[int] = []
    """The same of tokens that older versions drew."""


class Consumed(_Event, frozen=True, kw_only=True, tag="consumed"):
    """An optimizer step consumed a batch."""

    num_tokens: int
    measures: dict[str, list[float]]
    """Maps weight_lag_ms, policy_age_ms, token_age_ms and version_lag to their 10th, 50th, 90th and 99th percentile
    over the batch's tokens."""


class Swapped(_Event, frozen=True, kw_only=True, tag="swapped"):
    """The engine drew the first token under a version."""

    version: int
    swap_ms: float
    stall_ms: float


class Engine(_Event, frozen=True, kw_only=True, tag="engine"):
    """What the engine was doing."""

    states: dict[str, float]
    """Shares of the time since the event before, by what the engine did: "generating", "idle" (it has no prompts),
    "waits for weights", "waits for the trainer", "paused", "asleep", "restarting", "silent" (it does not answer),
    "closed"."""
    version: int | None = None
    num_running: int | None = None
    """Sequences that decode: batch rows in use."""
    num_waiting: int | None = None
    """Sequences that wait for a batch row."""
    num_outstanding: int | None = None
    """Groups that were submitted and not taken by the trainer."""
    num_tokens: int | None = None
    """Tokens drawn since the engine began."""
    kv_used: float | None = None
    """Share of the KV cache that sequences hold."""


class Version(_Event, frozen=True, kw_only=True, tag="version"):
    """The life of a weight version so far; a later event replaces it."""

    version: int
    published: float | None = None
    """When `publish()` was called, in seconds since 1970; None for the weights that the engine was launched with."""
    drawn: int = 0
    """Tokens that it drew."""
    trained: int = 0
    """Those of them that had part in the loss of an optimizer step."""
    dropped: int = 0
    """Those that the trainer took out of the stream and did not train on: without an advantage, truncated, too old."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout, shown. Lists have an entry per token."""

    prompt: str
    tokens: list[str]
    versions: list[int]
    log_ratios: list[float | None]
    """log ρ under the trainer's weights when it took the step; null where the token has no part in the loss."""
    reward: float | None = None
    finish_reason: str = ""
    num_tokens: int = 0
    """All tokens of the rollout, of which long ones show only the first."""


class Samples(_Event, frozen=True, kw_only=True, tag="samples"):
    """Some rollouts of a batch."""

    trainer_version: int | None
    rollouts: list[Sample]


class Ended(_Event, frozen=True, kw_only=True, tag="ended"):
    """The recorder was closed. A run that is killed has no such event."""

    num_lost: int = 0
    """Events that were not recorded, since they came faster than they could be written or held what JSON cannot say."""


Event = Began | Step | Consumed | Swapped | Engine | Version | Samples | Ended

encode = msgspec.json.Encoder().encode
_decoder = json_decoder(Event)


def decode(line: bytes) -> Event | None:
    """The event of a line; None for one that is cut off or is no event."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_events(directory: Path) -> Iterator[Event]:
    """Yield all events of a run, in order; lines that are none are left out. Raises RunError if there is no record."""
    path = directory / EVENTS_FILE
    with file_errors(RunError, f"cannot read {path}"), open(path, "rb") as file:
        yield from (event for line in file if (event := decode(line)) is not None)
