"""Reads what benchmarks wrote. A file is somebody else's: what is used of it is checked, and named if it is wrong."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from inflight.core.decoders import convert, json_decoder
from inflight.core.errors import InflightError

_MOST_BYTES = 64 << 20
AGES = ("swap_ms", "stall_ms", "weight_lag_ms", "policy_age_ms", "token_age_ms", "version_lag")
"""The six measures."""
Kind = TypeVar("Kind")


class ReportError(InflightError, ValueError):
    """A file that is none of a benchmark's, or of one that there is no report for; the message names file and key."""


class Quantiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of the values of a measure; None where it is not."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


NOTHING = Quantiles()


class Machine(msgspec.Struct, frozen=True):
    cpu: str | None = None
    cores: int | None = None
    gpu: str | None = None
    system: str | None = None

    def __str__(self) -> str:
        gpu = f", {self.gpu}" if self.gpu else ""
        return f"{self.cpu or 'an unknown processor'}, {self.cores or '?'} cores{gpu}"


class Environment(msgspec.Struct, frozen=True):
    """Where a number comes from (`inflight.tools.environment`)."""

    command: str = ""
    commit: str | None = None
    machine: Machine = Machine()
    versions: dict[str, str | None] = {}


class Staleness(msgspec.Struct, frozen=True):
    """What `bench staleness` wrote, of our own loop or of a server."""

    model: str
    sequences: int
    tokens: int
    tokens_per_s: float
    swap_ms: Quantiles
    weight_lag_ms: Quantiles
    policy_age_ms: Quantiles
    token_age_ms: Quantiles
    version_lag: Quantiles
    stall_ms: Quantiles = NOTHING
    prompt_tokens: int = 0
    steps: int = 0
    dtype: str = "auto"
    backend: str = "inflight"
    mode: str = "inflight"
    publish_every: int = 1
    slots: int = 2
    target: str | None = None
    api: str = ""
    pause: str = ""
    update_ms: Quantiles = NOTHING
    gap_ms: Quantiles = NOTHING
    gap_across_ms: Quantiles = NOTHING
    num_updates: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_aborted_requests: int = 0
    num_tokens_thrown_away: int = 0
    num_requests_across_updates: int = 0
    num_torn_tokens: int = 0
    num_mislabeled_tokens: int | None = None
    num_foreign_logprobs: int = 0
    trainer_s: dict[str, float] = {}
    engine_s: dict[str, float] = {}
    distributions: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    environment: Environment = Environment()

    def __post_init__(self) -> None:
        points = len(self.distributions.get("percentiles", ()))
        for name, values in self.distributions.items():
            if len(values) not in (0, points):
                raise ValueError(f"distributions.{name} has {len(values)} values for {points} percentiles")

    def measure(self, name: str) -> Quantiles:
        return getattr(self, name)


class Failed(msgspec.Struct, frozen=True):
    """A point of a sweep that was not measured."""

    model: str
    sequences: int
    mode: str
    publish_every: int
    slots: int
    reason: str


class Sweep(msgspec.Struct, frozen=True):
    points: list[Staleness]
    failed: list[Failed] = []


class Servers(msgspec.Struct, frozen=True):
    """What benchmarks/served_staleness.py wrote."""

    servers: dict[str, Staleness]


class Swap(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    sequences: int
    swap_ms: Quantiles
    stall_ms: Quantiles
    forward_ms: Quantiles
    gap_ms: dict[str, Quantiles | None]
    gap_ratio: float
    num_swaps: int = 0
    slots: int = 2
    backend: str = "inflight"
    copy_gb_s: float | None = None
    paused_stall_ms: Quantiles | None = None
    peer: str | None = None
    peer_stall_ms: Quantiles | None = None
    peer_mode: str | None = None
    parts: dict[str, list[float]] = {}


class PeerSpeed(msgspec.Struct, frozen=True):
    tokens_per_s: float
    ratio: float
    ratios: list[float] = []
    tokens_per_s_of_runs: list[float] = []


class Speed(msgspec.Struct, frozen=True):
    """One number of sequences."""

    sequences: int
    tokens_per_s: float
    tokens_per_s_of_runs: list[float] = []
    peers: dict[str, PeerSpeed] = {}


class Throughput(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    device: str
    points: list[Speed]
    backend: str = "inflight"


class OfSeed(msgspec.Struct, frozen=True):
    final_reward: float
    seconds_to_target: float | None = None


class OfMode(msgspec.Struct, frozen=True):
    final_reward: float
    seconds_to_target: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    seeds: list[OfSeed] = []


class Ablated(msgspec.Struct, frozen=True):
    lag: int
    correction: str
    final_reward: float


class Step(msgspec.Struct, frozen=True):
    seconds: float
    reward: float


class Curve(msgspec.Struct, frozen=True):
    """A run of learning."""

    points: list[Step]
    mode: str = ""


class Learning(msgspec.Struct, frozen=True):
    model: str
    ratio: float | None = None
    ratios: list[float] = []
    ablation: list[Ablated] = []
    of_modes: dict[str, OfMode] = {}
    """Beside the other keys in the file, one for each mode."""
    curves: list[Curve] = []
    """Of the file beside it."""


_KINDS: dict[str, type] = {
    "staleness": Staleness,
    "sweep": Sweep,
    "served_staleness": Servers,
    "swap": Swap,
    "throughput": Throughput,
    "learning": Learning,
}


class Result(msgspec.Struct, frozen=True):
    """A file that could be read."""

    path: Path
    kind: str
    found: Any
    """What its kind has: a Staleness, a Sweep, …"""
    environment: Environment

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path) -> Result:
    """What a benchmark wrote. Raises ReportError, which names the file, and the key that is wrong or missing."""
    raw = _decoded(path, dict[str, Any])
    kind = raw.get("bench")
    if kind not in _KINDS:
        said = "there is no key 'bench'" if kind is None else f"its key 'bench' is {str(kind)[:60]!r}"
        raise ReportError(f"{path} is nothing to report: {said}, which must be one of {', '.join(_KINDS)}")
    if kind == "learning":
        modes = _converted(path, raw.get("modes", []), list[str], "modes")
        beside = path.with_name(f"{path.stem}-series.json.gz")
        curves = _decoded(beside, list[Any], gzip.open) if beside.exists() else []
        raw |= {"of_modes": {name: raw.get(name) for name in modes}, "curves": curves}
    environment = _converted(path, raw.get("environment") or {}, Environment, "environment")
    return Result(path, kind, _converted(path, raw, _KINDS[kind]), environment)


def _decoded(path: Path, kind: type[Kind], open_file: Callable[..., Any] = open) -> Kind:
    try:
        with open_file(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ReportError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > _MOST_BYTES:
        raise ReportError(f"{path} is longer than {_MOST_BYTES >> 20} MiB: no benchmark writes such a file")
    try:
        return json_decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{path} is not the JSON of a benchmark: {error}") from error


def _converted(path: Path, raw: Any, kind: type[Kind], key: str = "") -> Kind:
    """Of the right types, whatever else is there."""
    try:
        return convert(raw, kind)
    except msgspec.ValidationError as error:
        said = str(error).replace("`$", f"`{key or '$'}").replace("`$.", "`")
        raise ReportError(f"{path} has a wrong or missing key: {said}") from error
