"""Bounds of calls to an engine that is busy with a longer call, without an engine."""

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from waiting import wait_until

from inflight.core.errors import EngineHungError
from inflight.core.messages import Result, to_raw
from inflight.engine.process import client as client_module
from inflight.engine.process.client import EngineClient


class Clock:
    """Stands in for Wait. A tick takes a second."""

    num_ticks = 0
    waited_s = 0.0

    def tick(self) -> float:
        Clock.num_ticks += 1
        self.waited_s += 1.0
        return 1.0

    def tell(self, what: str) -> None:
        """Log nothing."""


def test_time_during_a_long_call_does_not_count_for_other_calls(monkeypatch, tmp_path):
    asked: dict[str, Future[Any]] = {}
    raised: dict[str, Exception] = {}
    client = EngineClient(f"ipc://{tmp_path}/none", answer_timeout_s=5)

    def send(call: Any) -> Future[Any]:
        return asked.setdefault(call.verb, Future())

    def ask(verb: str, timeout_s: float | None) -> None:
        try:
            client.call(verb, timeout_s=timeout_s)
        except EngineHungError as error:
            raised[verb] = error

    def answer(verb: str) -> None:
        asked[verb].set_result(Result(ticket=1, value=to_raw(None, verb)))

    monkeypatch.setattr(Clock, "num_ticks", 0)
    monkeypatch.setattr(client_module, "Wait", Clock)
    monkeypatch.setattr(client_module, "_CHECK_S", 0.001)
    monkeypatch.setattr(client._connection, "send", send)
    bounds = {"wake": 1e9, "status": None, "digests": None, "hello": 3.0}
    threads = {verb: threading.Thread(target=ask, args=(verb, bound), daemon=True) for verb, bound in bounds.items()}
    try:
        threads["wake"].start()
        wait_until(lambda: Clock.num_ticks > 0)
        for verb in ("status", "digests", "hello"):
            threads[verb].start()
        threads["hello"].join(60)
        assert set(raised) == {"hello"}, "a call with a bound of its own keeps it"
        before = Clock.num_ticks
        wait_until(lambda: Clock.num_ticks > before + 200)
        assert set(raised) == {"hello"}
        answer("status")
        threads["status"].join(60)
        answer("wake")
        for thread in threads.values():
            thread.join(60)
            assert not thread.is_alive()
        assert set(raised) == {"hello", "digests"}, "after the long call time counts again"
    finally:
        for each in asked.values():
            with suppress(Exception):
                each.set_exception(EngineHungError("the test is over"))
        client.close()
