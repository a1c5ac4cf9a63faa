"""Simulates generators and trainers with the controller of `grpo`: up to 1,024 engines, long-tailed lengths, slow
rewards, engines that fail, and two policies whose trainers share the engines.

    python benchmarks/lead_simulation.py [FILE]

The clock is simulated; no model runs. An engine computes a pass of n rows in `base_s + n · row_s` seconds, and each row
draws one token per pass. Per scenario, the result compares the controller with fixed bounds of 0, 1, 2, 4 and 8 batches
ahead: the share of time in which the trainer waits, the age of tokens, and the share of drawn tokens that were not
trained on.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import exp, log
from random import Random
from statistics import fmean
from typing import Any

from harness import finish

from inflight.training.data.lead import LeadController

FIXED = (0, 1, 2, 4, 8)
P90_OVER_MEDIAN = 5.0
MOST_OVER_MEDIAN = 10.0
"""`max_tokens` ends 3 % of the samples."""
_SIGMA = log(P90_OVER_MEDIAN) / 1.2816


@dataclass(frozen=True, slots=True)
class World:
    """A trainer and its generators."""

    num_engines: int = 1
    rows: int = 64
    """Batch rows of an engine."""
    base_s: float = 0.01
    row_s: float = 0.0
    groups_per_step: int = 16
    samples: int = 4
    median_tokens: float = 100.0
    is_long_tailed: bool = True
    train_s: float = 5.0
    jitter: float = 0.05
    """Relative standard deviation of the time of a step."""
    reward_s: float = 0.0
    """Mean time of the scoring of a group."""
    reward_varies: bool = True
    """The time of scoring is distributed exponentially; otherwise it is constant."""
    scorers: int = 0
    """Groups that are scored at a time, in the order in which they were drawn; 0: all."""
    hang_share: float = 0.0
    """Share of groups whose scoring takes 50 times as long."""
    failures_per_step: float = 0.0
    """Probability that an engine fails in a step of the trainer, or in a second if that is longer."""
    repair_steps: float = 4.0
    """Steps until it serves again."""
    steps: int = 80
    seed: int = 0


@dataclass(eq=False, slots=True)
class Row:
    """A sample."""

    group: "Group"
    tokens: float
    """Tokens that are still to be drawn."""
    end: float = 0.0
    """Pass of its engine that draws its last token."""
    began: float | None = None


@dataclass(eq=False, slots=True)
class Group:
    trainer: "Trainer"
    num_open: int
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)


class Clock:
    """Calls functions at simulated times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), call))

    def run(self, is_done: Callable[[], bool]) -> None:
        """Call the functions in order until done. Raises RuntimeError if nothing is left to happen: a deadlock."""
        while not is_done():
            if not self._events:
                raise RuntimeError(f"nothing happens after {self.now:.3f} s")
            self.now, _, call = heapq.heappop(self._events)
            call()


class Pool:
    """The engines of a simulation."""

    def __init__(self, clock: Clock, world: World, generator: "type[Generator]"):
        self.engines = [generator(clock, world, self) for _ in range(world.num_engines)]
        self.serving = list(self.engines)
        self.load = 0
        """Unfinished rows of all engines."""

    def least_loaded(self, random: Random) -> "Generator":
        """Return the least loaded of all engines, or of eight if there are many."""
        few = self.serving if len(self.serving) <= 64 else random.sample(self.serving, 8)
        return min(few, key=lambda engine: engine.load)

    def fail(self, engine: "Generator", random: Random) -> None:
        """End an engine. Others continue its rows, from the tokens that were drawn."""
        self.serving.remove(engine)
        for row in engine.fail():
            self.least_loaded(random).add([row])


class Generator:
    """An engine whose rows share each pass."""

    def __init__(self, clock: Clock, world: World, pool: Pool):
        self._clock, self._world, self._pool = clock, world, pool
        self._queue: deque[Row] = deque()
        self._running: list[tuple[float, int, Row]] = []
        self._passes, self._since, self._epoch = 0.0, 0.0, 0
        self._numbers = count()
        self.num_tokens = 0.0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._queue)

    def add(self, rows: list[Row]) -> None:
        self._advance()
        self._pool.load += len(rows)
        self._queue.extend(rows)
        self._admit()

    def fail(self) -> list[Row]:
        """Stop, and return the unfinished rows with the tokens that they still need."""
        self._advance()
        self._pool.load -= self.load
        rows = [row for _, _, row in self._running]
        for row in rows:
            row.tokens = max(1.0, row.end - self._passes)
        rows += self._queue
        self._running, self._queue = [], deque()
        self._epoch += 1
        return rows

    def _pass_s(self) -> float:
        return self._world.base_s + self._world.row_s * len(self._running)

    def _advance(self) -> None:
        if self._running:
            passes = (self._clock.now - self._since) / self._pass_s()
            self._passes += passes
            self.num_tokens += passes * len(self._running)
        self._since = self._clock.now

    def _admit(self) -> None:
        while (row := self.next_row()) is not None:
            row.end = self._passes + row.tokens
            if row.began is None:
                row.began = self._clock.now
            heapq.heappush(self._running, (row.end, next(self._numbers), row))
        self._epoch += 1
        if self._running:
            left_s = (self._running[0][0] - self._passes) * self._pass_s()
            epoch = self._epoch
            self._clock.at(self._clock.now + left_s, lambda: self._finish(epoch))

    def next_row(self) -> Row | None:
        """Take the next sample from the queue, if it can start."""
        return self._queue.popleft() if self._queue and len(self._running) < self._world.rows else None

    def _finish(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._advance()
        ended = []
        while self._running and self._running[0][0] <= self._passes + 1e-6:
            ended.append(heapq.heappop(self._running)[2])
        self._pool.load -= len(ended)
        self._admit()
        for row in ended:
            row.group.trainer.ended(row)


class Trainer:
    """Takes groups, trains on them, and starts others when the controller allows it."""

    def __init__(self, clock: Clock, world: World, pool: Pool, ahead: int | str, seed: int):
        self._clock, self.world, self._pool = clock, world, pool
        self._random = Random(seed)
        self.lead = LeadController(world.groups_per_step, ahead=ahead, spare_groups=self._spare_groups)
        self._unscored: deque[Group] = deque()
        self._num_scored = 0
        """Groups that are scored now."""
        self._ready: deque[Group] = deque()
        self._taken: list[Group] = []
        self._asked: float | None = None
        self._wakes_at = float("inf")
        self.waits: list[float] = []
        self.ages: list[tuple[float, float]] = []
        """Per group: the sum over its tokens of their ages, and the number of tokens."""
        self.bounds: list[float] = []
        """Per group: the smallest sum of ages, with which it would have ended exactly when the trainer began."""
        self.times: list[float] = []
        """When each step ended."""
        self.leads: list[float] = []
        self.before_step: Callable[[Trainer], None] = lambda trainer: None
        """Called before the trainer asks for a step; tests change the world here."""

    def _spare_groups(self) -> float:
        """With a constant time per pass every row is free; otherwise as `Concurrency` finds them."""
        world, rows = self.world, self.world.rows
        if world.row_s:
            speed = world.rows / (world.base_s + world.row_s * world.rows)
            rows = min(n for n in range(1, world.rows + 1) if n / (world.base_s + world.row_s * n) >= 0.98 * speed)
        queue = world.groups_per_step if rows == world.rows else 0
        return (rows * len(self._pool.serving) - self._pool.load) / world.samples + queue

    def ask(self) -> None:
        self.before_step(self)
        self._asked = self._clock.now
        self.lead.ask(self._clock.now)
        self._take()
        self.start_allowed()

    def ended(self, row: Row) -> None:
        group, now = row.group, self._clock.now
        assert row.began is not None
        group.began.append(row.began)
        group.ended.append(now)
        group.num_open -= 1
        if not group.num_open:
            self._unscored.append(group)
            self._score()

    def _score(self) -> None:
        world = self.world
        while self._unscored and (not world.scorers or self._num_scored < world.scorers):
            self._num_scored += 1
            reward_s = world.reward_s
            if reward_s and world.reward_varies:
                reward_s = self._random.expovariate(1 / reward_s)
            if world.hang_share and self._random.random() < world.hang_share:
                reward_s = 50 * world.reward_s
            self._clock.at(self._clock.now + reward_s, partial(self._scored, self._unscored.popleft()))

    def start_allowed(self) -> None:
        now = self._clock.now
        if count := self.lead.allowed(now):
            self.lead.start(count, now)
            for _ in range(count):
                self._submit()
        wakes_at = self.lead.next_start(now)
        if wakes_at < self._wakes_at and wakes_at != float("inf"):
            self._wakes_at = wakes_at
            self._clock.at(wakes_at, self._wake)

    def _wake(self) -> None:
        self._wakes_at = float("inf")
        self.start_allowed()

    def _submit(self) -> None:
        world = self.world
        sigma = _SIGMA if world.is_long_tailed else 0.0
        draw = self._random.gauss
        factors = [min(MOST_OVER_MEDIAN, exp(draw(0.0, sigma))) for _ in range(world.samples)]
        lengths = [max(1.0, world.median_tokens * factor) for factor in factors]
        group = Group(self, world.samples, lengths=lengths)
        self._pool.least_loaded(self._random).add([Row(group, length) for length in lengths])

    def _scored(self, group: Group) -> None:
        self._num_scored -= 1
        self._score()
        self._ready.append(group)
        self.lead.ready(self._clock.now)
        self._take()
        self.start_allowed()

    def _take(self) -> None:
        if self._asked is None:
            return
        while self._ready and len(self._taken) < self.world.groups_per_step:
            self._taken.append(self._ready.popleft())
            self.lead.take(self.world.groups_per_step - len(self._taken))
        if len(self._taken) == self.world.groups_per_step:
            now, taken = self._clock.now, self._taken
            self.lead.begin(now)
            self.leads.append(self.lead.state.seconds)
            self.waits.append(now - self._asked)
            self._asked, self._taken = None, []
            train_s = self.world.train_s * max(0.1, self._random.gauss(1.0, self.world.jitter))
            self._clock.at(now + train_s, lambda: self._trained(taken, now))

    def _trained(self, groups: list[Group], began: float) -> None:
        now = self._clock.now
        for group in groups:
            end, tokens = max(group.ended), sum(group.lengths)
            spans = zip(group.began, group.ended, sorted(group.lengths), strict=True)
            mean_drawn = sum((b + e) / 2 * length for b, e, length in spans) / tokens
            self.ages.append(((now - mean_drawn) * tokens, tokens))
            self.bounds.append((now - began + end - mean_drawn) * tokens)
        self.times.append(now)
        self.ask()


class Simulation:
    """Trainers that share engines."""

    def __init__(self, *worlds: World, ahead: int | str = "auto", generator: type[Generator] = Generator):
        """worlds: one per trainer; the first describes the engines."""
        self.clock, self.world = Clock(), worlds[0]
        self.pool = Pool(self.clock, self.world, generator)
        self._random = Random(worlds[0].seed)
        self.trainers = [
            Trainer(self.clock, world, self.pool, ahead, world.seed + 1 + index) for index, world in enumerate(worlds)
        ]
        self.num_failures = 0

    def run(self) -> "Simulation":
        for trainer in self.trainers:
            self.clock.at(0.0, trainer.ask)
        if self.world.failures_per_step:
            self.clock.at(max(1.0, self.world.train_s), self._fail_some)
        self.clock.run(lambda: all(len(trainer.times) >= trainer.world.steps for trainer in self.trainers))
        return self

    def _fail_some(self) -> None:
        for engine in list(self.pool.serving):
            if len(self.pool.serving) > 1 and self._random.random() < self.world.failures_per_step:
                self.num_failures += 1
                self.pool.fail(engine, self._random)
                repaired = self.clock.now + self.world.repair_steps * self.world.train_s
                self.clock.at(repaired, partial(self.pool.serving.append, engine))
        self.clock.at(self.clock.now + max(1.0, self.world.train_s), self._fail_some)

    def result(self, skip: int = 20) -> dict[str, Any]:
        """Figures of all trainers without the first steps."""
        per_trainer = []
        for trainer in self.trainers:
            size = trainer.world.groups_per_step
            ages, bounds = trainer.ages[skip * size :], trainer.bounds[skip * size :]
            seconds, tokens = trainer.times[-1] - trainer.times[skip - 1], sum(n for _, n in ages)
            per_trainer.append(
                {
                    "steps_per_s": (len(trainer.times) - skip) / seconds,
                    "trainer_wait_share": sum(trainer.waits[skip:]) / seconds,
                    "token_age_s": sum(age for age, _ in ages) / tokens,
                    "age_over_bound": sum(age for age, _ in ages) / sum(bounds),
                }
            )
        drawn = sum(engine.num_tokens for engine in self.pool.engines)
        trained = sum(tokens for trainer in self.trainers for _, tokens in trainer.ages)
        means = {name: fmean(one[name] for one in per_trainer) for name in per_trainer[0]}
        return means | {"wasted_share": 1 - trained / drawn, "num_failures": self.num_failures}


def scenarios() -> Iterator[tuple[str, tuple[World, ...]]]:
    slow, fast = 5.0, 1.0  # seconds of a step: slower and faster than its generators
    for num_engines in (1, 8, 64, 1024):
        rows = 64 if num_engines < 1024 else 8  # The batch is as large as all rows.
        world = World(
            num_engines=num_engines, rows=rows, groups_per_step=rows // 4 * num_engines, steps=60 if rows == 64 else 40
        )
        name = "1 engine" if num_engines == 1 else f"{num_engines:,} engines"
        yield f"{name}, the trainer is slower", (replace(world, train_s=slow),)
        yield f"{name}, the generator is slower", (replace(world, train_s=fast),)
    world = World(num_engines=8, groups_per_step=128, train_s=slow)
    yield "rewards that take as long as a step", (replace(world, reward_s=slow),)
    judged = replace(world, reward_s=0.4, reward_varies=False, scorers=8, train_s=2.0)
    yield "a judge that is slower, 8 groups at a time", (judged,)
    yield "the same, times vary, one in 100 hangs", (replace(judged, reward_varies=True, hang_share=0.01),)
    yield "an engine in ten fails at each step", (replace(world, failures_per_step=0.1),)
    compute_bound = replace(world, base_s=0.002, row_s=0.0005, rows=256)
    yield "compute-bound engines, the trainer is slower", (replace(compute_bound, train_s=9.0),)
    yield "compute-bound engines, the generator is slower", (replace(compute_bound, train_s=2.0),)
    two = replace(world, groups_per_step=48, train_s=4.0)
    yield "two policies on the same engines", (two, replace(two, train_s=7.0, median_tokens=200.0, seed=9))


def main() -> None:
    result: dict[str, Any] = {"p90_over_median": P90_OVER_MEDIAN, "most_over_median": MOST_OVER_MEDIAN, "scenarios": {}}
    for name, worlds in scenarios():
        runs = {str(ahead): Simulation(*worlds, ahead=ahead).run().result() for ahead in ("auto", *FIXED)}
        result["scenarios"][name] = runs
        print(name)
        for ahead, figures in runs.items():
            print(f"  {ahead:>5}", {key: round(value, 3) for key, value in figures.items()}, flush=True)
    finish("lead-simulation", result)


if __name__ == "__main__":
    main()
