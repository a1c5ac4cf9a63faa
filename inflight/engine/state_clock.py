"""For how long an engine did what."""

from collections import Counter

from inflight.core.clock import now_ns

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
