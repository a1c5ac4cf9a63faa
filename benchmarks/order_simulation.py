"""Simulates orders in which an engine starts the samples of groups, with the controller of `grpo`.

    python benchmarks/order_simulation.py [FILE]

Per scenario of lead_simulation.py in which samples wait for rows, and per order: steps per second and token age divided
by their values in order of arrival, the mean of five seeds.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from harness import finish
from lead_simulation import Generator, Row, Simulation, World

SEEDS = range(5)


class WholeGroups(Generator):
    """Starts a group when there are rows for all of its samples."""

    def next_row(self) -> Row | None:
        if not self._queue:
            return None
        group, samples = self._queue[0].group, self._world.samples
        together = sum(1 for row in list(self._queue)[:samples] if row.group is group)
        free = self._world.rows - len(self._running)
        return self._queue.popleft() if free >= min(together, self._world.rows) else None


class _ByGroup(Generator):
    """Starts the sample that `key` puts first. Samples with the same key start in the order of arrival."""

    key: Callable[[Row], float]

    def next_row(self) -> Row | None:
        if not self._queue or len(self._running) >= self._world.rows:
            return None
        row = min(self._queue, key=type(self).key)
        self._queue.remove(row)
        return row


class NearlyComplete(_ByGroup):
    """Starts a sample of the group with the fewest unfinished samples."""

    key = staticmethod(lambda row: row.group.num_open)


class Shortest(_ByGroup):
    """Starts the group that ends soonest. Only an oracle of the lengths could do this: a bound of any order."""

    key = staticmethod(lambda row: max(row.group.lengths))


ORDERS: dict[str, type[Generator]] = {
    "whole groups": WholeGroups, "nearly complete groups": NearlyComplete, "groups that end soonest": Shortest,
}  # fmt: skip


def scenarios() -> dict[str, tuple[World, int | str]]:
    base = World(num_engines=4, rows=64, groups_per_step=64, steps=60)
    return {
        "the generator is slower": (replace(base, train_s=1.0), "auto"),
        "the trainer is slower": (replace(base, train_s=5.0), "auto"),
        "groups of 16": (replace(base, samples=16, groups_per_step=16, train_s=1.0), "auto"),
        "twice as many samples per step as rows": (replace(base, groups_per_step=128, train_s=1.0), "auto"),
        "four batches ahead": (replace(base, train_s=5.0), 4),
    }


def main() -> None:
    result: dict[str, Any] = {}
    for name, (world, ahead) in scenarios().items():
        result[name] = {}
        for order, generator in ORDERS.items():
            ratios = []
            for seed in SEEDS:
                seeded = replace(world, seed=seed)
                before, after = (
                    Simulation(seeded, ahead=ahead, generator=kind).run().result() for kind in (Generator, generator)
                )
                ratios.append({key: after[key] / before[key] for key in ("steps_per_s", "token_age_s")})
            result[name][order] = {key: fmean(ratio[key] for ratio in ratios) for key in ratios[0]}
            print(name, order, {key: round(value, 3) for key, value in result[name][order].items()}, flush=True)
    finish("order-simulation", {"seeds": len(SEEDS), "ratios": result})


if __name__ == "__main__":
    main()
