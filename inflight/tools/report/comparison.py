"""What two files of the same kind measured, side by side: ratios, and whether they are more than the spread of a run.

The spread is that of repetitions where a benchmark has some (pairs, seeds), else that of consecutive parts of a run.
Two sides differ beyond it if every value of one is above every value of the other. With values that are exchangeable
that happens by chance in 2 of C(2n, n) cases: 1 in 10 for three values each, 1 in 126 for five.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import comb
from typing import Any, Literal

from inflight.tools.report.results import Learning, Result, Servers, Staleness, Swap, Sweep, Throughput
from inflight.tools.report.systems import MODES

LEAST_VALUES = 3
_SHOWN = (
    ("tokens_per_s", ""),
    ("swap_ms", "p50"),
    ("stall_ms", "p50"),
    ("stall_ms", "p99"),
    ("weight_lag_ms", "p99"),
    ("policy_age_ms", "p50"),
    ("token_age_ms", "p50"),
    ("version_lag", "p50"),
    ("update_ms", "p50"),
)

_SETTINGS: dict[type, tuple[str, ...]] = {
    Staleness: (
        *("model", "mode", "slots", "sequences", "tokens", "prompt_tokens", "steps", "publish_every"),
        *("dtype", "backend", "api", "pause"),
    ),
    Swap: ("model", "dtype", "sequences", "slots", "backend"),
    Throughput: ("model", "dtype", "device", "backend"),
    Learning: ("model",),
}
"""Runs that differ in these are compared, and it is said."""

Verdict = Literal["beyond the spread", "within the spread", "spread unknown"]


@dataclass(frozen=True, slots=True)
class Number:
    """A measured number, and the values that it sums up."""

    value: float
    values: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One number of both sides."""

    system: str
    measure: str
    ours: Number
    theirs: Number

    @property
    def ratio(self) -> float | None:
        """Theirs over ours; None where ours is 0."""
        return self.theirs.value / self.ours.value if self.ours.value else None

    @property
    def verdict(self) -> Verdict:
        a, b = self.ours.values, self.theirs.values
        if min(len(a), len(b)) < LEAST_VALUES:
            return "spread unknown"
        return "beyond the spread" if max(a) < min(b) or max(b) < min(a) else "within the spread"

    @property
    def chance(self) -> int | None:
        """Of so many comparisons of equal things one says that they differ; None where the spread is not known."""
        n, m = len(self.ours.values), len(self.theirs.values)
        return comb(n + m, n) // 2 if min(n, m) >= LEAST_VALUES else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two files of a kind. The other one is compared with the base."""

    base: Result
    other: Result
    rows: list[Row]
    differing: list[str] = field(default_factory=list)
    """Settings in which what is compared differs, each in words."""
    unmatched: list[str] = field(default_factory=list)
    """What only one of them has."""

    @property
    def summary(self) -> str:
        """How many numbers differ, in words."""
        known = [row.verdict for row in self.rows if row.verdict != "spread unknown"]
        if not known:
            return f"{len(self.rows)} numbers, whose spread is not known" if self.rows else "nothing in common"
        return f"{known.count('beyond the spread')} of {len(known)} numbers differ by more than the spread"

    @property
    def by_system(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.system, []).append(row)
        return found


def comparisons_of(results: Sequence[Result]) -> list[Comparison]:
    """Each file with the first one of its kind."""
    first: dict[str, Result] = {}
    found = []
    for result in results:
        base = first.setdefault(_kind(result), result)
        if base is not result:
            found.append(_compare(base, result))
    return found


def _kind(result: Result) -> str:
    if result.kind != "learning":
        return result.kind
    return "learning, lags" if result.found.ablation else "learning, modes"


def _compare(base: Result, other: Result) -> Comparison:
    ours, theirs = (dict(_numbers(result.found)) for result in (base, other))
    rows = [Row(*key, ours[key], theirs[key]) for key in ours if key in theirs]
    systems_of_one = {system for system, _ in ours} ^ {system for system, _ in theirs}
    return Comparison(base, other, rows, _differing(base.found, other.found), sorted(systems_of_one))


def _differing(base: Any, other: Any) -> list[str]:
    """The settings in which runs differ that are compared all the same; of several runs, in how many of them."""
    ours, theirs = _runs_of(base), _runs_of(other)
    both = [(ours[name], theirs[name]) for name in ours if name in theirs]
    found = Counter[str]()
    for one, another in both:
        for name in _SETTINGS.get(type(one), ()):
            values = getattr(one, name), getattr(another, name)
            if values[0] != values[1]:
                found[f"{name} {values[0]} and {values[1]}"] += 1
    return [said if times == len(both) else f"{said} ({times} of {len(both)})" for said, times in found.items()]


def _runs_of(found: Any) -> dict[str, Any]:
    """The runs of a file, by the name under which each is compared."""
    if isinstance(found, Servers):
        return found.servers
    if isinstance(found, Sweep):
        return {_point(one): one for one in found.points}
    return {"": found}


def _numbers(found: Any) -> Iterator[tuple[tuple[str, str], Number]]:
    """All numbers of a file, by system and measure."""
    if isinstance(found, Staleness | Servers | Sweep):
        for name, one in _runs_of(found).items():
            yield from _of_parts(name or "the run", one, _SHOWN)
    elif isinstance(found, Swap):
        yield from _of_swap(found)
    elif isinstance(found, Throughput):
        yield from _of_throughput(found)
    elif isinstance(found, Learning):
        yield from _of_learning(found)


def _point(one: Staleness) -> str:
    every = f", publish every {one.publish_every}" if one.publish_every > 1 else ""
    size = f"{one.sequences} × {one.tokens} tokens"
    return f"{one.model}, {MODES.get(one.mode, one.mode)}, {size}{every}, {one.slots} slots"


def _of_parts(
    system: str, one: Staleness | Swap, measures: Iterable[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], Number]]:
    """What is known of measures, or of points of their distribution, whose values are those of parts of the run."""
    for name, point in measures:
        value = getattr(getattr(one, name), point) if point else getattr(one, name)
        if value is not None:
            label = f"{name}.{point}" if point else name
            yield (system, label), Number(value, one.parts.get(label, ()))


def _of_swap(found: Swap) -> Iterator[tuple[tuple[str, str], Number]]:
    yield from _of_parts("inflight", found, product(("swap_ms", "stall_ms", "forward_ms"), ("p50", "p99")))
    yield ("inflight", "gap_ratio"), Number(found.gap_ratio)
    if found.peer_stall_ms is not None and found.peer_stall_ms.p50 is not None:
        yield (f"{found.peer}, {found.peer_mode}", "stall_ms.p50"), Number(found.peer_stall_ms.p50)


def _of_throughput(found: Throughput) -> Iterator[tuple[tuple[str, str], Number]]:
    for point in found.points:
        system = f"{point.sequences} sequences"
        yield (system, "tokens_per_s"), Number(point.tokens_per_s, point.tokens_per_s_of_runs)
        for peer, speed in point.peers.items():
            yield (system, f"ours / {peer}"), Number(speed.ratio, speed.ratios)


def _of_learning(found: Learning) -> Iterator[tuple[tuple[str, str], Number]]:
    for mode, one in found.of_modes.items():
        system, reached = MODES.get(mode, mode), [seed.seconds_to_target for seed in one.seeds]
        yield (system, "final_reward"), Number(one.final_reward, [seed.final_reward for seed in one.seeds])
        if one.seconds_to_target is not None:
            known = [seconds for seconds in reached if seconds is not None]  # those that never got there have no time
            yield (
                (system, "seconds_to_target"),
                Number(one.seconds_to_target, known if len(known) == len(reached) else []),
            )
    if found.ratio is not None:
        yield ("synchronous / in flight", "seconds_to_target"), Number(found.ratio, found.ratios)
    rewards: dict[tuple[str, int], list[float]] = {}
    for one in found.ablation:
        rewards.setdefault((one.correction, one.lag), []).append(one.final_reward)
    for (correction, lag), values in rewards.items():
        yield (f"{correction}, lag {lag}", "final_reward"), Number(sum(values) / len(values), values)
