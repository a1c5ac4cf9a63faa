"""The engine's process: it answers the control socket between two passes, and sends frames to the stream."""

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import get_args

import zmq
from inflight_kernels import _cpu

from inflight.core.by_name import load_by_name
from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.garbage import without_full_collections
from inflight.core.messages import (
    PROTOCOL,
    Call,
    Failed,
    FromEngine,
    Hello,
    Status,
    ToEngine,
    Welcome,
    check_same_version,
)
from inflight.core.options import EngineOptions, Startup
from inflight.core.version import PACKAGE, __version__
from inflight.engine.backend import Backend
from inflight.engine.loop.admission import may_begin
from inflight.engine.loop.clocks import GENERATING, StateClock
from inflight.engine.process.control_socket import ControlSocket, Handlers
from inflight.engine.process.directory import alive_lock
from inflight.engine.process.publishing import FromPublisher, PublisherService
from inflight.engine.process.tcp_listener import opened
from inflight.engine.process.threads import PassThreads
from inflight.engine.process.verbs import Verbs, verb
from inflight.observability.trace import Recorder
from inflight.stream.writer import StreamWriter
from inflight.weights.cuda_ipc import uuid_of
from inflight.weights.transports import AcceptedTransports

logger = logging.getLogger("inflight.engine")

_IDLE_POLL_MS = 50
_CHECK_TRACER_EVERY_NS = 1_000_000_000
_SHARE_OF_STEP = 0.1
"""Maximum share of a pass for messages that bring no work, beyond the first message."""


class EngineProcess:
    """An engine, its control socket and its stream. Clients can call the engine's verbs and the verbs of this class."""

    def __init__(
        self,
        engine: Backend,
        control: ControlSocket,
        stream: StreamWriter,
        directory: Path,
        transports: AcceptedTransports,
        tcp: tuple[str, int] = ("", 0),
    ):
        """directory: for the locks of engine and publisher, and for traces. tcp: the control socket's endpoint for
        other machines and the port of the stream, if the engine has them."""
        self._engine = engine
        self._control = control
        self._stream = stream
        stream.engine_id = engine.headers.engine_id
        self._tcp_endpoint, self._tcp_stream_port = tcp
        self._alive_lock = alive_lock(directory)
        self._publisher_lock = directory / "publisher.lock"
        self._publishing = PublisherService(engine, control, self._publisher_lock, transports)
        self._recorder = Recorder("inflight engine", directory)
        self._caller, self._tracer = b"", b""
        """Addresses of the client whose verb is being called, and of the client that started the trace, or empty."""
        self._tracer_checked_ns = 0
        self._verbs = Verbs(engine, engine.requests, self)
        self._handlers: Handlers = {
            **dict.fromkeys(get_args(FromPublisher), self._publishing.handle),
            Call: self._call,
            Hello: self._hello,
        }
        self._step_ns = 0
        self._threads = PassThreads.of_process(engine.device)
        self._states = StateClock(state_of(engine))
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            engine, idle = self._engine, self._engine.idle
            self._states.enter(state_of(engine) if idle else GENERATING)
            self._answer(wait=idle)
            self._drop_left_trace()
            self._publishing.take_results()
            engine.scheduler.admits = may_begin(engine, self._stream)
            if not engine.idle:
                self._states.enter(GENERATING)
            threads = self._threads
            began_ns, began_cpu_s = now_ns(), 0.0 if threads is None else process_time()
            frame = engine.step()
            self._stream.state = state_of(engine)
            self._step_ns = now_ns() - began_ns
            if frame is not None:
                if threads is not None and frame.header.num_tokens and not frame.header.starts:
                    threads.passed(frame.header.num_tokens, self._step_ns / 1e9, process_time() - began_cpu_s)
                self._stream.send(frame, at_once=engine.idle or frame.header.swap is not None)
            else:
                self._stream.flush()
            self._publishing.lend_slots()

    def close(self) -> None:
        self._engine.close()
        self._stream.close()

    @verb()
    def shutdown(self) -> None:
        """End the loop after the pass in progress. Can be called from any thread."""
        self.stopping = True

    @verb()
    def pause(self) -> None:
        """Stop forward passes at the next boundary, until `resume()`. Weights still arrive."""
        self._engine.paused = True

    @verb()
    def resume(self) -> None:
        """Run forward passes again."""
        self._engine.paused = False

    @verb()
    def status(self) -> Status:
        engine = self._engine
        return Status(
            version=engine.version,
            step=engine.step_count,
            num_tokens=engine.num_tokens,
            num_swaps=engine.headers.num_swaps,
            num_swaps_in_flight=engine.headers.num_swaps_in_flight,
            bad_messages=self._control.num_refused,
            paused=engine.paused,
            asleep=engine.asleep,
            versions=engine.slot_table.versions,
            num_unacknowledged_bytes=self._stream.kept.bytes_in_memory,
            num_spilled_bytes=self._stream.kept.bytes_in_files,
            seconds_by_state=self._states.seconds(),
            **asdict(engine.load()),
        )

    @verb()
    def start_trace(self, details: bool = False) -> None:
        """Record the activity of this process until `stop_trace`, or until the client that called this disconnects.
        Generation continues.

        details: record every operator and everything else that the profiler can record, not only spans, kernels and
        copies.
        """
        self._recorder.start(details=details)
        self._tracer = self._caller

    @verb()
    def stop_trace(self) -> str:
        """Return the path of the engine's part of the trace. The file belongs to the caller from then on."""
        self._tracer = b""
        return str(self._recorder.stop())

    def _drop_left_trace(self) -> None:
        """End the trace if the client that started it has disconnected. Nobody would end it, and memory would grow."""
        if not self._tracer or now_ns() - self._tracer_checked_ns < _CHECK_TRACER_EVERY_NS:
            return
        self._tracer_checked_ns = now_ns()
        if not self._control.reaches(self._tracer):
            self._tracer = b""
            self._recorder.drop()
            logger.warning("a trace was dropped, because the client that started it has disconnected")

    def _call(self, sender: bytes, call: Call) -> FromEngine:
        self._caller = sender
        return self._verbs.answer(call)

    def _answer(self, *, wait: bool) -> None:
        """Answer waiting messages; with `wait`, wait a while for the first one."""
        limit_ns, wait_ms = self._step_ns * _SHARE_OF_STEP, _IDLE_POLL_MS if wait else 0
        self._control.serve(self._handlers, self._brings_work, limit_ns=limit_ns, wait_ms=wait_ms)

    def _brings_work(self, message: ToEngine) -> bool:
        return self._verbs.brings_work(message) if isinstance(message, Call) else not isinstance(message, Hello)

    def _hello(self, sender: bytes, message: Hello) -> FromEngine:
        check_same_version(message.version, message.protocol, message.package, who="who says Hello")
        engine = self._engine
        return Welcome(
            ticket=message.ticket,
            engine_id=engine.headers.engine_id,
            stream_endpoint=self._stream.endpoint,
            tcp_endpoint=self._tcp_endpoint,
            tcp_stream_port=self._tcp_stream_port,
            layout=engine.slot_table.layout,
            adapter_layout=engine.adapter_slots.layout if engine.adapter_slots is not None else None,
            device=str(engine.device),
            device_uuid=uuid_of(engine.slot_table.slots[0].buffer.device),
            num_slots=len(engine.slot_table.slots),
            max_sequences=engine.options.max_sequences,
            max_context=engine.options.max_context,
            vocab_size=engine.vocab_size,
            next_ids=engine.requests.next_ids,
            publisher_lock=str(self._publisher_lock),
            alive_lock=str(self._alive_lock),
            version=__version__,
            protocol=PROTOCOL,
            package=PACKAGE,
            no_kernels=_cpu.problem() if engine.device.type == "cpu" and _cpu.library() is None else "",
            **asdict(engine.execution),
        )


def state_of(engine: Backend) -> str:
    """Return the current activity of an engine, in a few words."""
    if engine.asleep or engine.paused:
        return "asleep" if engine.asleep else "paused"
    if not engine.has_work:
        return "idle"
    if engine.scheduler.held_back:
        return "waits for the trainer"
    return "waits for weights" if engine.blocked else GENERATING


def make_backend(options: EngineOptions) -> Backend:
    """Return the backend that `EngineOptions.backend` names. Its modules are imported only here, because vLLM's
    interpreter need not have the dependencies of our backend, and ours need not have vLLM."""
    if options.backend == "vllm":
        return load_by_name("inflight.integrations.vllm_backend.engine:VllmEngine")(options)
    from inflight.engine.loop.engine import Engine

    return Engine(options)


def serve(startup: Startup, stop_with: Callable[[Callable[[], None]], None]) -> int:
    """Load the model and serve it until the end. Return the exit status of the process.

    stop_with: called with a function that ends the service, for the watch over the launcher.
    """
    directory, options = Path(startup.directory), startup.options
    control = ControlSocket(f"ipc://{directory}/control", max_clients=options.max_clients)
    stream = StreamWriter(
        f"ipc://{directory}/stream",
        memory_bytes=options.stream_memory_bytes,
        spill_directory=Path(options.spill_directory or tempfile.gettempdir()),
    )
    for name in ("control", "stream"):
        os.chmod(directory / name, 0o600)
    with ExitStack() as at_end:
        for end in (zmq.Context.instance().term, control.close, stream.close):
            at_end.callback(end)
        try:
            tcp = at_end.enter_context(opened(options.listen, options.keys, control, stream))
            transports, engine = AcceptedTransports(options.transports), make_backend(options)
        except InflightError as error:
            logger.error("the engine did not start: %s", error)
            control.wait(10_000)
            while (received := control.receive()) is not None:  # the launcher repeats Hello until it gets an answer
                control.send(received[0], Failed(kind=type(error).__name__, message=str(error)))
            return 1
        process = EngineProcess(engine, control, stream, directory, transports, tcp)
        at_end.callback(process.close)
        stop_with(process.shutdown)
        logger.info("engine %s serves %s: %s", engine.headers.engine_id, options.model, engine.description)
        if options.listen:
            logger.info("clients with a key may connect to %s, and to port %d for the stream", *tcp)
        with without_full_collections():
            process.run()
    return 0
