"""A warning that names the line of a rollout function that holds the event loop of all episodes."""

import asyncio
import inspect
import logging
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

_BEAT_S = 0.25
_SAMPLE_S = 0.02
_HELD_S = 1.0
_PACKAGE = str(Path(__file__).parents[1]) + "/"


class HeldLoop:
    """Samples the stack of a late event loop. Warns after 1, 10 and 100 s if rollout functions are in most samples.

    A loop that is late for another reason is not reported: the machine is busy, or other threads hold the interpreter.

    Call `watch` in the thread of the loop, and `close` when the loop has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._closed = loop, threading.Event()
        self._due_s = 0.0

    def watch(self) -> None:
        """Start the beat in this thread, and the sampling in another one."""
        ident = threading.get_ident()
        self._beat()
        threading.Thread(target=self._sample, args=(ident,), name="inflight-held-loop", daemon=True).start()

    def close(self) -> None:
        """End the sampling."""
        self._closed.set()

    def _beat(self) -> None:
        self._due_s = self._loop.time() + _BEAT_S
        self._loop.call_later(_BEAT_S, self._beat)

    def _sample(self, ident: int) -> None:
        due_s, warn_s, places = 0.0, _HELD_S, Counter[str | None]()
        while not self._closed.wait(_SAMPLE_S if places else _BEAT_S):
            if due_s != self._due_s:
                due_s, warn_s = self._due_s, _HELD_S
                places.clear()
            if (late_s := self._loop.time() - due_s) > 0:
                places[_place(sys._current_frames().get(ident))] += 1
            if late_s > warn_s:
                _warn(places, late_s)
                warn_s = 10 * late_s


def _place(frame: FrameType | None) -> str | None:
    """Return file, line and name of the coroutine that inflight awaits, and that runs or calls the frame. None if
    inflight or the loop itself runs.
    """
    outer = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return outer
        if frame.f_code.co_flags & inspect.CO_COROUTINE:
            outer = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


def _warn(places: Counter[str | None], late_s: float) -> None:
    of_rollouts = Counter({place: count for place, count in places.items() if place})
    if 2 * of_rollouts.total() > places.total():
        place, count = of_rollouts.most_common(1)[0]
        logger.warning(
            "rollout functions have held the event loop of all episodes for %.1f s, for %.0f %% of that time at %s; "
            "call functions that compute or wait with `await session.call(function, …)`",
            late_s,
            100 * count / places.total(),
            place,
        )
