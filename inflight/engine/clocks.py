"""For how long an engine did what, and how long swaps keep it from computing."""

from collections import Counter

from inflight.core.clock import now_ns
from inflight.weights.engine.slot_table import SlotTable

GENERATING = "generating"


class StateClock:
    """Adds up the time in each state, of which one is entered after the other."""

    def __init__(self, state: str) -> None:
        self._state, self._since_ns = state, now_ns()
        self._spent_ns: Counter[str] = Counter()

    def enter(self, state: str) -> None:
        """From now on it is in this state; it may be the same as before."""
        if state != self._state:
            now = now_ns()
            self._spent_ns[self._state] += now - self._since_ns
            self._state, self._since_ns = state, now

    def seconds(self) -> dict[str, float]:
        """Seconds by state, until now."""
        spent = self._spent_ns + Counter({self._state: now_ns() - self._since_ns})
        return {state: ns / 1e9 for state, ns in spent.items()}


class StallClock:
    """Measures, in ns, what each swap costs the generator: the messages about slots since the swap before it, the time
    for which sequences waited while the only slot was lent, and the swap itself."""

    def __init__(self) -> None:
        self._handling_ns: Counter[SlotTable] = Counter()
        """Time spent on messages about the slots of a table since its last swap."""
        self._waiting_since_ns: int | None = None

    def handled(self, slot_table: SlotTable, since_ns: int) -> None:
        """A message about these slots was handled from `since_ns` until now."""
        self._handling_ns[slot_table] += now_ns() - since_ns

    def wait(self, since_ns: int | None) -> None:
        """Sequences wait for weights, at the latest since `since_ns`; None: they do not wait."""
        self._waiting_since_ns = None if since_ns is None else self._waiting_since_ns or since_ns

    def swapped(self, slot_table: SlotTable, began_ns: int) -> int:
        """The swap that began at `began_ns` is done. Returns what it cost, and begins anew."""
        since_ns, self._waiting_since_ns = self._waiting_since_ns or began_ns, None
        return now_ns() - since_ns + self._handling_ns.pop(slot_table, 0)
