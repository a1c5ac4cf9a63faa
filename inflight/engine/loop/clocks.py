"""Measures the time that an engine spends in each state, and the time that swaps keep it from computing."""

from collections import Counter

import msgspec
import torch

from inflight.core.clock import now_ns
from inflight.core.frames import Swap
from inflight.weights.engine.slot_table import SlotTable

GENERATING = "generating"


class StateClock:
    """Adds up the time in each state. The states follow one another."""

    def __init__(self, state: str) -> None:
        self._state, self._since_ns = state, now_ns()
        self._spent_ns: Counter[str] = Counter()

    def enter(self, state: str) -> None:
        """Enter a state. It can be the current one."""
        if state != self._state:
            now = now_ns()
            self._spent_ns[self._state] += now - self._since_ns
            self._state, self._since_ns = state, now

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each state, until now."""
        spent = self._spent_ns + Counter({self._state: now_ns() - self._since_ns})
        return {state: ns / 1e9 for state, ns in spent.items()}


class StallClock:
    """Measures, in ns, the cost of each swap for the generator: the messages about slots since the previous swap, the
    time for which sequences waited while the only slot was leased, and the swap itself."""

    def __init__(self) -> None:
        self._handling_ns: Counter[SlotTable] = Counter()
        """Time spent on messages about the slots of a table since its last swap."""
        self._waiting_since_ns: int | None = None

    def handled(self, slot_table: SlotTable, since_ns: int) -> None:
        """Record that a message about these slots was handled from `since_ns` until now."""
        self._handling_ns[slot_table] += now_ns() - since_ns

    def wait(self, since_ns: int | None) -> None:
        """Record that sequences wait for weights, at the latest since `since_ns`. None: they do not wait."""
        self._waiting_since_ns = None if since_ns is None else self._waiting_since_ns or since_ns

    def swapped(self, slot_table: SlotTable, began_ns: int) -> int:
        """Record the end of the swap that began at `began_ns`. Return its cost, and start again."""
        since_ns, self._waiting_since_ns = self._waiting_since_ns or began_ns, None
        return now_ns() - since_ns + self._handling_ns.pop(slot_table, 0)


def record_time(device: torch.device) -> torch.cuda.Event:
    """Record an event with a time on the current stream of a GPU."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_ns(began: torch.cuda.Event, ended: torch.cuda.Event) -> int:
    """Return the device time between two events that have happened, in ns."""
    return round(began.elapsed_time(ended) * 1e6)


def with_device_time(swap: Swap, on_device_ns: int) -> Swap:
    """Return a swap that costs at least its time on the device, or nothing if no sequences waited."""
    return msgspec.structs.replace(swap, stall_ns=max(swap.stall_ns, on_device_ns)) if swap.stall_ns else swap
