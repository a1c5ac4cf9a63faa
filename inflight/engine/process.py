"""The engine process: `python -m inflight.engine.process OPTIONS-AS-JSON`.

It answers the control socket between forward passes, sends every frame to the stream, and ends when it is told to or
when the process that launched it is gone (its standard input closes).
"""

import contextlib
import gc
import logging
import os
import select
import shutil
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import msgspec
import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, LayoutMismatchError, ProtocolError
from inflight.core.messages import (
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
    Join,
    Joined,
    Pause,
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
    decode_to_engine,
    encode,
)
from inflight.core.options import Startup
from inflight.engine.engine import Engine
from inflight.observability.trace import Recorder
from inflight.stream.writer import StreamWriter
from inflight.weights.cuda_ipc import uuid_of
from inflight.weights.loader import Loader, Result
from inflight.weights.receiver import Receiver

logger = logging.getLogger("inflight.engine")

_IDLE_POLL_MS = 50
_MESSAGES_PER_STEP = 16
_MAX_MESSAGE_BYTES = 32 << 20


class EngineProcess:
    """An engine, its control socket and its stream."""

    def __init__(self, engine: Engine, control: zmq.Socket, stream: StreamWriter, publisher_lock: Path):
        self._engine = engine
        self._control = control
        self._stream = stream
        self._publisher_lock = publisher_lock
        self._publisher: bytes | None = None
        self._receiver = engine.receiver
        """Of what the publisher publishes: weights or adapters."""
        self._loading: set[tuple[Receiver, int]] = set()
        """Slots that loaders work on."""
        self._woken, self._waking = os.pipe()
        """The loader writes to it when it has done something, which ends a wait for messages."""
        os.set_blocking(self._waking, False)
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._loader = Loader(engine.receiver, self._loaded)
        self._poller = zmq.Poller()
        self._poller.register(control, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._recorder = Recorder("inflight engine", publisher_lock.parent)
        self._bad_messages = 0
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            self._answer(wait=self._engine.idle)
            self._take_results()
            frame = self._engine.step()
            if frame is not None:
                self._stream.send(frame)
            else:
                self._stream.flush()
            self._lend_slots()

    # ---- control ------------------------------------------------------------------------------------------------

    def _answer(self, *, wait: bool) -> None:
        """Answer the messages that wait; with `wait`, give the first one a while to come."""
        if wait and self._woken in dict(self._poller.poll(_IDLE_POLL_MS)):
            os.read(self._woken, 4096)
        for _ in range(_MESSAGES_PER_STEP):  # a flood of messages slows the generator down, but cannot stop it
            if not self._control.poll(0):
                break
            sender, *parts = self._control.recv_multipart()
            self._answer_one(sender, parts)

    def _answer_one(self, sender: bytes, parts: list[bytes]) -> None:
        ticket, began_ns = 0, now_ns()
        try:
            if len(parts) != 1:
                raise ProtocolError(f"a control message has one part, got {len(parts)}")
            if len(parts[0]) > _MAX_MESSAGE_BYTES:
                raise ProtocolError(
                    f"a control message has at most {_MAX_MESSAGE_BYTES >> 20} MiB, "
                    f"got {len(parts[0]) / 2**20:.1f} MiB; submit fewer prompts at a time"
                )
            message = decode_to_engine(parts[0])
            ticket = message.ticket
            reply = self._handle(sender, message)
            if isinstance(message, (SlotReady, SlotRequest)):
                self._receiver.handling_ns += now_ns() - began_ns
        except InflightError as error:
            reply = self._refusal(ticket, error)
        if reply is not None:
            self._send(sender, reply)

    def _refusal(self, ticket: int, error: InflightError) -> Failed:
        self._bad_messages += 1
        logger.warning("refused a message: %s", error)
        return Failed(ticket=ticket, kind=type(error).__name__, message=str(error))

    def _handle(self, sender: bytes, message: ToEngine) -> FromEngine | None:
        engine, receiver = self._engine, self._receiver
        match message:
            case Hello():
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
                self._check_publisher(sender)
                receiver.request()
            case Join():
                self._check_publisher(sender)
                self._loader.submit(sender, message)
            case Fill():
                self._check_publisher(sender)
                receiver.check_lent(message.slot, message.fingerprint)
                self._load(sender, message)
            case SlotReady():
                self._check_publisher(sender)
                if message.checksum is None:
                    receiver.ready(message)
                else:
                    receiver.check(message)
                    self._load(sender, message)
            case Detach():
                if sender == self._publisher:
                    self._publisher = None
        return None

    def _welcome(self, ticket: int) -> Welcome:
        engine = self._engine
        return Welcome(
            ticket=ticket,
            engine_id=engine.engine_id,
            stream_endpoint=self._stream.endpoint,
            layout=engine.receiver.layout,
            adapter_layout=engine.adapters.layout if engine.adapters is not None else None,
            device=str(engine.device),
            device_uuid=uuid_of(engine.device),
            num_slots=len(engine.receiver.slots),
            max_sequences=engine.max_sequences,
            max_context=engine.max_context,
            vocab_size=engine.vocab_size,
            kv_cache_bytes=engine.cache.nbytes,
            kv_cache_tokens=engine.cache.capacity_tokens,
            attention=engine.attention,
            fused=engine.runner.unfused_reason is None,
            num_graphs=engine.runner.num_graphs,
            publisher_lock=str(self._publisher_lock),
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
            versions=engine.receiver.versions,
            num_preemptions=engine.scheduler.num_preemptions,
            kv_blocks_used=engine.cache.num_used_blocks,
            kv_blocks=engine.cache.num_blocks,
            num_reused_tokens=engine.cache.num_reused_tokens,
        )

    # ---- weights ------------------------------------------------------------------------------------------------

    def _attach(self, sender: bytes, message: Attach) -> Attached:
        """A publisher holds the lock, so any earlier one is gone: it gets all slots that are not in use."""
        engine = self._engine
        if message.adapters and engine.adapters is None:
            raise LayoutMismatchError("the engine has no adapters; launch it with lora_rank")
        receiver = engine.adapters.receiver if message.adapters and engine.adapters is not None else engine.receiver
        difference = receiver.layout.difference(message.layout, ours="the engine", theirs="the publisher")
        if difference is not None:
            raise LayoutMismatchError(f"the publisher's model is not the engine's: {difference}")
        self._publisher = sender
        self._receiver = receiver
        self._loader.retire()
        self._loader = Loader(receiver, self._loaded)
        free = receiver.attach(in_use=engine.slot_in_use(receiver))
        return Attached(
            ticket=message.ticket,
            layout=receiver.layout,
            slots=[slot.descriptor() for slot in receiver.slots] if message.map_slots else [],
            free=[slot for slot in free if (receiver, slot) not in self._loading],
            version=engine.newest_version,
            aliases=engine.aliases if message.aliases and receiver is engine.receiver else [],
        )

    def _load(self, sender: bytes, job: Fill | SlotReady) -> None:
        if (self._receiver, job.slot) in self._loading:
            raise ProtocolError(f"slot {job.slot} is being filled")
        self._loading.add((self._receiver, job.slot))
        self._loader.submit(sender, job)

    def _take_results(self) -> None:
        """What loaders have done since the last pass."""
        while not self._results.empty():
            self._take_result(self._results.get())

    def _loaded(self, result: Result) -> None:
        """Called by a loader's thread."""
        self._results.put(result)
        with contextlib.suppress(BlockingIOError):  # it is full, so that nobody sleeps
            os.write(self._waking, b"1")

    def _take_result(self, result: Result) -> None:
        job, error = result.job, result.error
        if isinstance(job, SlotReady) and error is None and result.sender == self._publisher:
            try:
                self._receiver.ready(job)
                self._loading.remove((result.receiver, job.slot))
                return
            except ProtocolError as overtaken:  # a newer version was announced while this one was compared
                error = overtaken
        if isinstance(job, Join):
            answer = Joined(ticket=job.ticket)
        else:
            self._loading.remove((result.receiver, job.slot))
            answer = Filled(ticket=job.ticket)
        if error is not None:
            answer = self._refusal(job.ticket, error)
        if result.sender != self._publisher:  # it is gone, and the next one may have the slot
            if self._publisher is not None and result.receiver is self._receiver and not isinstance(job, Join):
                self._send(self._publisher, SlotFree(slot=job.slot))
        else:
            self._send(result.sender, answer)
            if isinstance(job, SlotReady):
                self._send(result.sender, SlotFree(slot=job.slot))

    def _check_publisher(self, sender: bytes) -> None:
        if sender != self._publisher:
            raise ProtocolError("this publisher is not attached to the engine, or another took its place")

    def _lend_slots(self) -> None:
        """No forward pass reads an idle slot any more, unless it is the one that is under way."""
        receiver = self._receiver
        if self._publisher is not None:
            for slot in receiver.lend(in_use=self._engine.slot_in_use(receiver)):
                began_ns = now_ns()
                self._send(self._publisher, SlotFree(slot=slot))
                receiver.handling_ns += now_ns() - began_ns

    def _send(self, to: bytes, message: FromEngine) -> None:
        self._control.send_multipart([to, encode(message)])

    def close(self) -> None:
        self._engine.close()
        self._stream.close()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    startup = msgspec.json.decode(sys.argv[1], type=Startup)
    directory = Path(startup.directory)
    control = zmq.Context.instance().socket(zmq.ROUTER)
    control.sndhwm = 0
    control.linger = 2000
    control.bind(f"ipc://{directory}/control")
    try:
        engine = Engine(startup.options)
    except InflightError as error:
        _refuse(control, error)
        return 1
    lock = directory / "publisher.lock"
    lock.touch()
    process = EngineProcess(engine, control, StreamWriter(f"ipc://{directory}/stream"), lock)
    orphaned = _stop_with_parent(process, startup.parent_pid)
    gc.collect()
    gc.freeze()  # what importing and loading made lives to the end; walking it stops the generator for a quarter second
    logger.info("engine %s serves %s: %s", engine.engine_id, startup.options.model, engine.describe())
    try:
        process.run()
    finally:
        process.close()
        control.close()
        zmq.Context.instance().term()
        if orphaned.is_set():  # nobody else will
            shutil.rmtree(directory, ignore_errors=True)
    return 0


def _refuse(control: zmq.Socket, error: InflightError) -> None:
    """Tell the launcher, who says Hello until it is answered, why there is no engine."""
    logger.error("the engine did not start: %s", error)
    if control.poll(10_000):
        sender = control.recv_multipart()[0]
        control.send_multipart([sender, encode(Failed(kind=type(error).__name__, message=str(error)))])
    control.close()
    zmq.Context.instance().term()


def _stop_with_parent(process: EngineProcess, parent_pid: int) -> threading.Event:
    """End the loop when the launcher is gone, and set the event. Its end of our standard input closes then, unless a
    process that it forked holds it open; so its process id is watched too."""
    orphaned = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            readable, _, _ = select.select([0], [], [], 0.5)
            if readable and not os.read(0, 4096):
                break
        orphaned.set()
        process.stopping = True

    threading.Thread(target=watch, name="inflight-parent-watch", daemon=True).start()
    return orphaned


if __name__ == "__main__":
    sys.exit(main())
