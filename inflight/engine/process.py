"""What the engine process does: it answers the control socket between forward passes, and sends every frame to the
stream, until it is told to end."""

import contextlib
import gc
import logging
import os
from pathlib import Path
from queue import SimpleQueue

import zmq

import inflight
from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, LayoutMismatchError, ProtocolError, PublisherConflictError
from inflight.core.messages import (
    MAX_MESSAGE_BYTES,
    PACKAGE,
    PROTOCOL,
    Attach,
    Attached,
    Cancel,
    Detach,
    Done,
    Failed,
    Fill,
    Filled,
    Fork,
    FromEngine,
    GetStatus,
    Hello,
    Pause,
    Prepare,
    Prepared,
    Resume,
    Shutdown,
    Sleep,
    SlotFree,
    SlotReady,
    SlotRequest,
    StartTrace,
    Status,
    StopTrace,
    Submit,
    Submitted,
    ToEngine,
    TraceWritten,
    Wake,
    Welcome,
    check_same_version,
    decode_to_engine,
    encode,
    shorten,
)
from inflight.core.options import Startup
from inflight.engine.directory import alive_lock
from inflight.engine.engine import Engine
from inflight.engine.parent import ParentWatch
from inflight.engine.seat import PublisherSeat
from inflight.observability.trace import Recorder
from inflight.stream.writer import StreamWriter
from inflight.weights.cuda_ipc import uuid_of
from inflight.weights.slot_filler import Result, SlotFiller
from inflight.weights.slot_table import SlotTable
from inflight.weights.transports.accepted import AcceptedTransports

logger = logging.getLogger("inflight.engine")

_IDLE_POLL_MS = 50
_MESSAGES_PER_STEP = 16
_SHARE_OF_STEP = 0.1
"""Of the time of a forward pass, that questions may take between two of them, beyond the first."""
_WORK = (Submit, Fork, Attach, SlotRequest, Prepare, Fill, SlotReady, Detach)
"""Messages that are no mere questions."""
_MAX_WIRE_BYTES = 2 * MAX_MESSAGE_BYTES
"""Of what is larger nothing is received: its sender is disconnected. Up to here it is told why it is refused."""
_MAX_UNREAD = 16
"""Messages of one client that wait here to be read; more wait in the client."""
_MAX_UNSENT = 10_000
"""Answers that a client may leave unread; more are dropped."""


class EngineProcess:
    """An engine, its control socket and its stream."""

    def __init__(
        self,
        engine: Engine,
        control: zmq.Socket,
        stream: StreamWriter,
        directory: Path,
        transports: AcceptedTransports,
    ):
        """directory: for the locks of engine and publisher, and for traces."""
        self._engine = engine
        self._control = control
        self._stream = stream
        self._alive_lock = alive_lock(directory)
        self._seat = PublisherSeat(directory / "publisher.lock", lambda holder: self._send(holder, Done()))
        self._receiver = engine.slot_table
        """Of what the publisher publishes: weights or adapters."""
        self._loading: set[tuple[SlotTable, int]] = set()
        """Slots that are being filled or compared."""
        self._woken, self._waking = os.pipe()
        """A slot filler writes to it when it has done something, which ends a wait for messages."""
        os.set_blocking(self._waking, False)
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._transports = transports
        self._filler: SlotFiller | None = None
        """That of the publisher's transport."""
        self._poller = zmq.Poller()
        self._poller.register(control, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._recorder = Recorder("inflight engine", directory)
        self._bad_messages = 0
        self._step_ns = 0
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            self._answer(wait=self._engine.idle)
            self._take_results()
            began_ns = now_ns()
            frame = self._engine.step()
            self._step_ns = now_ns() - began_ns
            if frame is not None:
                self._stream.send(frame)
            else:
                self._stream.flush()
            self._lend_slots()

    def stop(self) -> None:
        """End the loop after the pass that is under way. From any thread."""
        self.stopping = True

    # ---- control ------------------------------------------------------------------------------------------------

    def _answer(self, *, wait: bool) -> None:
        """Answer the messages that wait; with `wait`, give the first one a while to come. A flood of questions, or of
        messages that are refused, takes no more than a share of the generator's time."""
        if wait and self._woken in dict(self._poller.poll(_IDLE_POLL_MS)):
            os.read(self._woken, 4096)
        left_ns = self._step_ns * _SHARE_OF_STEP
        for _ in range(_MESSAGES_PER_STEP):
            if not self._control.poll(0):
                break
            began_ns = now_ns()
            sender, *parts = self._control.recv_multipart()
            if not self._answer_one(sender, parts):
                left_ns -= now_ns() - began_ns
            if left_ns < 0 and not wait:
                break

    def _answer_one(self, sender: bytes, parts: list[bytes]) -> bool:
        """Whether it brought the generator something to do."""
        ticket, began_ns, has_work = 0, now_ns(), False
        try:
            if len(parts) != 1:
                raise ProtocolError(f"a control message has one part, got {len(parts)}")
            message = decode_to_engine(parts[0])
            ticket = message.ticket
            reply = self._handle(sender, message)
            has_work = isinstance(message, _WORK)
            if isinstance(message, (SlotReady, SlotRequest)):
                self._receiver.handling_ns += now_ns() - began_ns
        except InflightError as error:
            reply = self._refusal(ticket, error)
        if reply is not None:
            self._send(sender, reply)
        return has_work

    def _refusal(self, ticket: int, error: InflightError) -> Failed:
        self._bad_messages += 1
        text = shorten(str(error))
        logger.warning("refused a message: %s", text)
        return Failed(ticket=ticket, kind=type(error).__name__, message=text)

    def _handle(self, sender: bytes, message: ToEngine) -> FromEngine | None:
        engine, slot_table = self._engine, self._receiver
        match message:
            case Hello():
                check_same_version(message.version, message.protocol, message.package, who="who says Hello")
                return self._welcome(message.ticket)
            case Submit():
                return Submitted(ticket=message.ticket, group_ids=engine.submit(message.prompts))
            case Fork():
                group_id = engine.fork(message.request_id, message.at, message.params, message.metadata)
                return Submitted(ticket=message.ticket, group_ids=[group_id])
            case Cancel():
                engine.cancel(message.group_ids, message.request_ids)
                return Done(ticket=message.ticket)
            case Pause():
                engine.pause()
                return Done(ticket=message.ticket)
            case Resume():
                engine.resume()
                return Done(ticket=message.ticket)
            case Sleep():
                engine.sleep()
                return Done(ticket=message.ticket)
            case Wake():
                engine.wake()
                return Done(ticket=message.ticket)
            case GetStatus():
                return self._status(message.ticket)
            case StartTrace():
                self._recorder.start(details=message.details)
                return Done(ticket=message.ticket)
            case StopTrace():
                return TraceWritten(ticket=message.ticket, path=str(self._recorder.stop()))
            case Shutdown():
                self.stopping = True
                return Done(ticket=message.ticket)
            case Attach():
                return self._attach(sender, message)
            case SlotRequest():
                self._seat.check(sender)
                slot_table.request()
            case Prepare():
                self._seat.check(sender)
                self._submit(sender, message)
            case Fill():
                self._seat.check(sender)
                slot_table.check_lent(message.slot, message.fingerprint)
                self._load(sender, message)
            case SlotReady():
                self._seat.check(sender)
                if message.checksum is None:
                    slot_table.ready(message)
                else:
                    slot_table.check(message)
                    self._load(sender, message)
            case Detach():
                if sender == self._seat.holder:
                    slot_table.withdraw(message.untouched)
                self._seat.leave(sender)
        return None

    def _welcome(self, ticket: int) -> Welcome:
        engine = self._engine
        return Welcome(
            ticket=ticket,
            engine_id=engine.engine_id,
            stream_endpoint=self._stream.endpoint,
            layout=engine.slot_table.layout,
            adapter_layout=engine.adapters.layout if engine.adapters is not None else None,
            device=str(engine.device),
            device_uuid=uuid_of(engine.device),
            num_slots=len(engine.slot_table.slots),
            max_sequences=engine.max_sequences,
            max_context=engine.max_context,
            vocab_size=engine.vocab_size,
            kv_cache_bytes=engine.cache.nbytes,
            kv_cache_tokens=engine.cache.capacity_tokens,
            attention=engine.attention,
            fused=engine.runner.unfused_reason is None,
            num_graphs=engine.runner.num_graphs,
            publisher_lock=str(self._seat.lock),
            alive_lock=str(self._alive_lock),
            version=inflight.__version__,
            protocol=PROTOCOL,
            package=PACKAGE,
        )

    def _status(self, ticket: int) -> Status:
        engine = self._engine
        return Status(
            ticket=ticket,
            version=engine.version,
            step=engine.step_count,
            num_waiting=engine.scheduler.num_waiting,
            num_running=len(engine.scheduler.running),
            num_tokens=engine.num_tokens,
            num_swaps=engine.num_swaps,
            num_swaps_in_flight=engine.num_swaps_in_flight,
            bad_messages=self._bad_messages,
            paused=engine.paused,
            asleep=engine.asleep,
            versions=engine.slot_table.versions,
            num_preemptions=engine.scheduler.num_preemptions,
            kv_blocks_used=engine.cache.num_used_blocks,
            kv_blocks=engine.cache.num_blocks,
            num_reused_tokens=engine.cache.num_reused_tokens,
        )

    # ---- weights ------------------------------------------------------------------------------------------------

    def _attach(self, sender: bytes, message: Attach) -> Attached:
        """A publisher comes, and any earlier one is gone: it gets all slots that are not in use."""
        engine, transport = self._engine, self._transports.find(message.transport)
        if message.adapters and engine.adapters is None:
            raise LayoutMismatchError("the engine has no adapters; launch it with lora_rank")
        slot_table = (
            engine.adapters.slot_table if message.adapters and engine.adapters is not None else engine.slot_table
        )
        difference = slot_table.layout.difference(message.layout, ours="the engine", theirs="the publisher")
        if difference is not None:
            raise LayoutMismatchError(f"the publisher's model is not the engine's: {difference}")
        before = self._seat.take(sender, message.lock_token)
        if before is not None:
            error = PublisherConflictError("another publisher took this one's place at the engine")
            self._send(before, Failed(kind=type(error).__name__, message=str(error)))
        self._receiver = slot_table
        if self._filler is not None:
            self._filler.retire()
        self._filler = SlotFiller(slot_table, transport, self._loaded)
        free = slot_table.attach(in_use=engine.slot_in_use(slot_table))
        return Attached(
            ticket=message.ticket,
            layout=slot_table.layout,
            slots=[slot.descriptor() for slot in slot_table.slots] if transport.writes_to_slots else [],
            free=[slot for slot in free if (slot_table, slot) not in self._loading],
            version=engine.newest_version,
            aliases=engine.aliases if message.aliases and slot_table is engine.slot_table else [],
        )

    def _load(self, sender: bytes, job: Fill | SlotReady) -> None:
        if (self._receiver, job.slot) in self._loading:
            raise ProtocolError(f"slot {job.slot} is being filled")
        self._loading.add((self._receiver, job.slot))
        self._submit(sender, job)

    def _submit(self, sender: bytes, job: Prepare | Fill | SlotReady) -> None:
        assert self._filler is not None  # as somebody is attached
        self._filler.submit(sender, job)

    def _take_results(self) -> None:
        """Take what slot fillers have done since the last pass."""
        while not self._results.empty():
            self._take_result(self._results.get())

    def _loaded(self, result: Result) -> None:
        """Note what became of a job. Called from a slot filler's thread."""
        self._results.put(result)
        with contextlib.suppress(BlockingIOError):  # it is full, so that nobody sleeps
            os.write(self._waking, b"1")

    def _take_result(self, result: Result) -> None:
        job, error = result.job, result.error
        if isinstance(job, SlotReady) and error is None and result.sender == self._seat.holder:
            try:
                self._receiver.ready(job)
                self._loading.remove((result.slot_table, job.slot))
                return
            except ProtocolError as overtaken:  # a newer version was announced while this one was compared
                error = overtaken
        if isinstance(job, Prepare):
            answer = Prepared(ticket=job.ticket)
        else:
            self._loading.remove((result.slot_table, job.slot))
            answer = Filled(ticket=job.ticket)
        if error is not None:
            answer = self._refusal(job.ticket, error)
        if result.sender != self._seat.holder:  # it is gone, and the next one may have the slot
            if self._seat.holder is not None and result.slot_table is self._receiver and not isinstance(job, Prepare):
                self._send(self._seat.holder, SlotFree(slot=job.slot))
        else:
            self._send(result.sender, answer)
            if isinstance(job, SlotReady):
                self._send(result.sender, SlotFree(slot=job.slot))

    def _lend_slots(self) -> None:
        """No forward pass reads an idle slot any more, unless it is the one that is under way."""
        slot_table = self._receiver
        if self._seat.holder is not None:
            for slot in slot_table.lend(in_use=self._engine.slot_in_use(slot_table)):
                began_ns = now_ns()
                if not self._send(self._seat.holder, SlotFree(slot=slot)):  # it does not know that it was lent one
                    slot_table.withdraw([slot])
                slot_table.handling_ns += now_ns() - began_ns

    def _send(self, to: bytes, message: FromEngine) -> bool:
        """Whether the slot_table is there. One that reads nothing misses what is beyond some thousands of messages."""
        try:
            self._control.send_multipart([to, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a client leaves its answers unread; %s was dropped", type(message).__name__)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._engine.close()
        self._stream.close()


def serve(startup: Startup, watch: ParentWatch) -> int:
    """Load the model and serve it until the end; the exit status."""
    directory = Path(startup.directory)
    control = _bind(f"ipc://{directory}/control")
    try:
        transports = AcceptedTransports(startup.options.transports)
        engine = Engine(startup.options)
    except InflightError as error:
        _refuse(control, error)
        return 1
    process = EngineProcess(engine, control, StreamWriter(f"ipc://{directory}/stream"), directory, transports)
    watch.stop_with(process.stop)
    gc.collect()
    gc.freeze()  # what importing and loading made lives to the end; walking it stops the generator for a quarter second
    logger.info("engine %s serves %s: %s", engine.engine_id, startup.options.model, engine.describe())
    try:
        process.run()
    finally:
        process.close()
        control.close()
        zmq.Context.instance().term()
    return 0


def _bind(endpoint: str) -> zmq.Socket:
    """A control socket that bounds what each client can make it hold."""
    control = zmq.Context.instance().socket(zmq.ROUTER)
    control.sndhwm, control.rcvhwm, control.maxmsgsize = _MAX_UNSENT, _MAX_UNREAD, _MAX_WIRE_BYTES
    control.router_mandatory = True  # a client that is gone is an error, so that a publisher's end is seen
    control.linger = 2000
    control.bind(endpoint)
    return control


def _refuse(control: zmq.Socket, error: InflightError) -> None:
    """Tell the launcher, who says Hello until it is answered, why there is no engine."""
    logger.error("the engine did not start: %s", error)
    if control.poll(10_000):
        sender = control.recv_multipart()[0]
        control.send_multipart([sender, encode(Failed(kind=type(error).__name__, message=str(error)))])
    control.close()
    zmq.Context.instance().term()
