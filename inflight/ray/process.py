"""The process of an engine that Ray has placed, as the trainer's side sees it."""

import contextlib
import threading
from concurrent.futures import Future
from typing import Any

import ray
import zmq
from ray.exceptions import RayError

from inflight.core.errors import EngineDiedError, EngineHungError
from inflight.core.keys import ClientKeys
from inflight.core.options import EngineOptions
from inflight.fleet.process.remote import RemoteProcess
from inflight.ray.answers import answer_of
from inflight.ray.host import Launched

_CONNECT_S = 30.0
_END_S = 20.0
"""Bound for an actor to end an engine. The engine is killed after half of that."""


class RayProcess(RemoteProcess):
    """A process on a node that Ray has chosen. An actor there launches it, reports its end, and ends with it; the actor
    ends with this process.

    The key of the client is made here and the key of the engine there, and each sends only its public part.
    Raises the errors of `inflight.launch`.
    """

    def __init__(self, options: EngineOptions, actor: Any, closing: threading.Event):
        """actor: an EngineHost."""
        self._over = threading.Lock()
        """Lock of the thread that ends the actor."""
        self._is_over = threading.Event()
        """The actor has been ended."""
        public, secret = zmq.curve_keypair()
        self._actor = actor
        try:
            launched = self._launch(options, public, closing)
            self._end: Future[str] = self._actor.wait.remote().future()
            keys = ClientKeys(public, secret, launched.key)
            super().__init__(
                launched.endpoint, keys=keys, timeout_s=_CONNECT_S, answer_timeout_s=options.answer_timeout_s
            )
        except BaseException:
            self._end_actor()
            raise
        self.pid = launched.pid
        """Process id of the engine on its node."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"process {self.pid} at {self.client.endpoint}"

    def check(self) -> None:
        """Raise EngineDiedError if Ray has reported the end of the process, its actor or its node."""
        if not self._end.done():
            return
        lost = self._end.exception()
        raise EngineDiedError(self._end.result() if lost is None else f"Ray has lost the actor of the engine: {lost}")

    def kill(self) -> None:
        """End the process at once."""
        if ray.is_initialized():  # else it has ended, and a call would make another cluster
            self._actor.end.remote("kill")

    def remove(self) -> None:
        """Free the memory and the resources that an ended process occupies on its node."""
        self._end_by("remove")

    def close(self) -> None:
        """Ask the engine to end, and kill it after a few seconds. Safe to call twice."""
        self._end_by("close")
        super().close()

    def _launch(self, options: EngineOptions, public: bytes, closing: threading.Event) -> Launched:
        try:
            asked = self._actor.launch.remote(options, public)
            return answer_of(asked, options.timeout_s + _CONNECT_S, closing, "an engine that Ray has placed starts")
        except TimeoutError as error:
            raise EngineHungError(f"an engine that Ray has placed did not start in time: {error}") from error

    def _end_by(self, method: str) -> None:
        """End the engine by a method of its launcher, within a few seconds, and then the actor; or wait until another
        thread has done so."""
        if not self._over.acquire(blocking=False):
            self._is_over.wait(_END_S + _CONNECT_S)
            return
        try:
            if ray.is_initialized():
                with contextlib.suppress(RayError):  # the actor has ended
                    ray.wait([self._actor.end.remote(method)], timeout=_END_S)
                self._end_actor()
        finally:
            self._is_over.set()

    def _end_actor(self) -> None:
        actor: Any = self._actor
        with contextlib.suppress(RayError):
            ray.kill(actor)
