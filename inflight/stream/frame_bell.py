"""Wakes the tasks of an event loop when frames have arrived."""

import asyncio

from inflight.stream.ledger import Ledger


class FrameBell:
    """Rings after frames while `num_followers` is not 0. A subclass listens to the ledger's frames with `_frame`."""

    def __init__(self, ledger: Ledger):
        self._ledger, self._loop = ledger, asyncio.get_running_loop()
        self._is_due = False
        self.next: asyncio.Future[None] = self._loop.create_future()
        """Done after the next frame. Take it before the tokens, so that a frame in between is not missed."""
        self.num_followers = 0
        """Number of tasks that wait for frames again and again."""

    def _frame(self) -> None:
        """Called by the thread that reads the stream."""
        if self.num_followers and not self._is_due:
            self._is_due = True
            try:
                self._loop.call_soon_threadsafe(self._ring)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                self._ledger.frames.unlisten(self._frame)  # The followers ended with their loop.

    def _ring(self) -> None:
        self._is_due = False
        self.next.set_result(None)
        self.next = self._loop.create_future()
