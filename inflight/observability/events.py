"""Events of a run: one line of JSON per event in the file `events.jsonl` of its directory (docs/watch.md).

Each event has a "kind" and the "time" at which it was recorded, in seconds since 1970. An unknown value is left out or
null.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from inflight.core.decoders import json_decoder
from inflight.core.errors import InflightError
from inflight.core.files import file_errors

EVENTS_FILE = "events.jsonl"
LOG_RATIO_EDGES = [round(-2 + 0.1 * index, 1) for index in range(41)]
"""Edges of the bins of log ρ: below −2, 40 bins up to 2, and above."""


class RunError(InflightError):
    """A run's record cannot be read or written; the message names the file."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    time: float


class Began(_Event, frozen=True, kw_only=True, tag="began"):
    """A recorder was opened: a run began, or continued in the same directory."""

    title: str
    model: str = ""
    max_sequences: int = 0
    """Maximum number of sequences that all members of the engine decode together (batch rows). 0 if unknown."""
    resumed_after_step: int = 0
    """Step after which the run continues. Ignore earlier events of later steps, which are repeated."""
    pid: int = 0
    inflight_version: str = ""
    config: dict[str, str] = {}
    """Options of the engine as "engine.NAME", and options that the user gave, as text."""


class Step(_Event, frozen=True, kw_only=True, tag="step"):
    """An optimizer step. Several events can report one step; their numbers complement each other."""

    step: int
    numbers: dict[str, float]
    """Numbers as loggers receive them: "reward", "ratio/ess", …"""
    seconds: float | None = None
    """Seconds since the previous event of this kind, or since the recorder was opened."""
    spans: dict[str, float] = {}
    """Seconds that the trainer's thread spent in each named span since then."""
    mismatch: list[int] = []
    """Number of tokens of the trainer's own version by log ρ, in the bins of LOG_RATIO_EDGES."""
    stale: list[int] = []
    """The same for tokens of older versions."""


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
    """States of the engine."""

    states: dict[str, float]
    """Maps states to shares of the time since the previous event: "generating", "idle" (it has no prompts), "waits for
    weights", "waits for the trainer", "paused", "asleep", "restarting", "silent" (it does not answer), "closed"."""
    version: int | None = None
    num_running: int | None = None
    """Number of sequences that decode: batch rows in use."""
    num_waiting: int | None = None
    """Number of sequences that wait for a batch row."""
    num_outstanding: int | None = None
    """Number of groups that were submitted and not taken by the trainer."""
    num_tokens: int | None = None
    """Number of tokens drawn since the engine started."""
    kv_used: float | None = None
    """Share of the KV cache that sequences hold."""


class Episodes(_Event, frozen=True, kw_only=True, tag="episodes"):
    """Episodes, counted since the program began. Of several `inflight.Episodes` the one that was started first."""

    num_running: int
    """Number of episodes in progress."""
    num_calling: int
    """Number of calls of tools in progress."""
    counts: dict[str, int]
    """`Episodes.counts`: ended episodes by reason, and turns."""
    seconds: dict[str, float]
    """`Episodes.seconds`: time in turns, calls and rendering, added up over episodes."""
    reward: float | None = None
    """Mean reward of the last 256 episodes that have one."""


class Version(_Event, frozen=True, kw_only=True, tag="version"):
    """The life of a weight version so far; a later event replaces it."""

    version: int
    published: float | None = None
    """Time of the `publish()` call, in seconds since 1970; None for the weights that the engine was launched with."""
    drawn: int = 0
    """Number of tokens that it drew."""
    trained: int = 0
    """Number of its tokens in the loss of an optimizer step."""
    dropped: int = 0
    """Number of its tokens that the trainer took out of the stream and did not train on."""


class SampleTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn of a shown rollout. Turns follow each other without gaps."""

    drawn: bool = False
    """True: the policy drew it. False: it was given, such as the result of a tool."""
    num_tokens: int = 0
    num_left_out: int = 0
    """Number of its last tokens that are not shown."""
    reward: float | None = None
    finish_reason: str = ""
    """Of a drawn turn: stop | length | stopped. "": the next turn continues it."""
    began_s: float | None = None
    """Time of the request of a drawn turn, in seconds after the first turn of the episode."""
    ended_s: float | None = None
    """Time when all of its tokens had arrived."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout, shown. Lists have an entry per shown token."""

    prompt: str
    """The last part of the prompt. "" for a branch whose parent is in the same event."""
    tokens: list[str]
    versions: list[int | None]
    """Null for tokens that the policy did not draw, such as results of tools."""
    log_ratios: list[float | None]
    """log ρ under the trainer's weights when it took the step; null for tokens outside the loss."""
    reward: float | None = None
    finish_reason: str = ""
    num_tokens: int = 0
    """Number of tokens of the rollout. Long rollouts show only the first ones; long turns, too."""
    request_id: int = 0
    group_id: int = 0
    sample: int = 0
    """The token sequences of one episode share its group_id and its sample."""
    adapter: str = ""
    """LoRA adapter that drew its tokens; "": none."""
    turns: list[SampleTurn] = []
    """Turns of an episode; empty: the policy drew all tokens."""
    num_turns: int = 0
    """Number of turns. Long rollouts show only the first ones."""
    num_sequences: int = 0
    """Number of token sequences of the episode. Episodes with many show only the first ones."""
    forked_from: tuple[int, int] | None = None
    """(request_id, k) of a branch: its prompt is the prompt of that request and its first k tokens."""


class Samples(_Event, frozen=True, kw_only=True, tag="samples"):
    """Rollouts of a batch. The token sequences of one episode follow each other."""

    trainer_version: int | None
    rollouts: list[Sample]


class Ended(_Event, frozen=True, kw_only=True, tag="ended"):
    """The recorder was closed. A run that is killed has no such event."""

    num_lost: int = 0
    """Number of events that were not recorded: too many were waiting, or JSON cannot represent a value."""


Event = Began | Step | Consumed | Swapped | Engine | Episodes | Version | Samples | Ended

encode = msgspec.json.Encoder().encode
_decoder = json_decoder(Event)


def rounded(value: float) -> float:
    """Round to five significant digits. Integers are returned in full."""
    value = float(value)
    return value if value.is_integer() else float(f"{value:.5g}")


def decode(line: bytes) -> Event | None:
    """Return the event of a line; None if the line is cut off or not an event."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_events(directory: str | Path) -> Iterator[Event]:
    """Yield all events of a run, in order; other lines are left out. Raises RunError without a record."""
    path = Path(directory) / EVENTS_FILE
    with file_errors(RunError, f"cannot read {path}"), open(path, "rb") as file:
        yield from (event for line in file if (event := decode(line)) is not None)
