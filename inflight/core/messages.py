"""Messages on the control socket: MessagePack, tagged by type, never pickle.

Client → engine: Hello, Call; publisher → engine: Attach, SlotRequest, Prepare, Fill, SlotReady, Detach.
Engine → client: Welcome, Result, Failed; engine → publisher: Attached, SlotFree, Done, Failed.

What a client may ask of an engine is a verb, which a Call names (`inflight/engine/verbs.py`). A request carries a
`ticket` that its answer repeats; 0 asks for no answer. A slot has one owner at a time, and ownership moves only by
SlotFree (engine → publisher) and SlotReady (publisher → engine). Where the publisher cannot write to the slot itself,
it has the engine fill it (Fill, Done) before it announces it as it would announce any other.
"""

from typing import Any, TypeVar

import msgspec

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InvalidRequestError, ProtocolError, VersionMismatchError
from inflight.core.frames import Count, TokenId
from inflight.core.layout import Alias, WeightLayout
from inflight.core.sampling import SamplingParams
from inflight.core.version import PACKAGE, __version__

LIVE_VERSION = -1
PROTOCOL = 8
"""Version of these messages and of frames. Raise it with every change after which two versions do not understand each
other."""
MAX_MESSAGE_BYTES = 32 << 20
MAX_TEXT = 2000
"""Most characters of an error message on the wire and in a log."""


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    ticket: int = 0


# ---- slots as they are described to another process -------------------------------------------------------------


class SharedMemoryDescriptor(msgspec.Struct, frozen=True, tag=True):
    """A slot of `nbytes` bytes in a memory-mapped file."""

    path: str
    nbytes: int
    offset: int
    file_bytes: int


class CudaIpcDescriptor(msgspec.Struct, frozen=True, tag=True):
    """A slot in device memory: the parts of one CUDA IPC export (see `torch.multiprocessing.reductions`)."""

    device_uuid: str
    nbytes: int
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


SlotDescriptor = SharedMemoryDescriptor | CudaIpcDescriptor


# ---- client → engine --------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """Asks for Welcome, or for Failed if the model could not be loaded or the asker is of another version."""

    version: str = __version__
    protocol: int = PROTOCOL
    package: str = PACKAGE
    """Where the asker's inflight lies."""


class Prompt(msgspec.Struct, frozen=True):
    token_ids: list[int]
    params: SamplingParams
    metadata: dict[str, Any] = {}
    version: int | None = None
    """The weight version that draws all of its tokens (LIVE_VERSION: the one live when it is accepted). A slot keeps
    that version until the request ends. None: whichever version is live at each token."""
    adapter: str | None = None
    """Name of the adapter that draws its tokens; None: the weights alone."""


class Ids(msgspec.Struct, frozen=True, array_like=True):
    """What a group is called; its requests have the ids first_request_id, first_request_id + 1, …"""

    group_id: Count
    first_request_id: Count


class Unfinished(msgspec.Struct, frozen=True):
    """A group that another engine began, and how far its samples are."""

    group_id: Count
    prompt: Prompt
    """What was submitted; its params have the seed of the group."""
    first_request_id: Count | None = None
    """None: nothing is known but that it was accepted."""
    drawn: dict[Count, list[TokenId]] = {}
    """Maps the ids of unfinished requests to their tokens so far; the others have ended."""
    forked_from: tuple[int, int] | None = None


class Call(_Message, frozen=True):
    """Asks for the Result of a verb."""

    verb: str
    arguments: msgspec.Raw
    """A map from parameter names to values, which the verb reads as the types of its parameters."""


class Attach(_Message, frozen=True):
    """A publisher asks to publish tensors of this layout (its own dtypes; it casts)."""

    layout: WeightLayout
    transport: str
    """Name of the transport, one of those that the engine accepts."""
    adapters: bool = False
    """It publishes adapters, and not weights."""
    aliases: bool = False
    """It asks for the other names of the tensors."""
    lock_token: str = ""
    """What the publisher wrote into `Welcome.publisher_lock` when it had locked it; "" if it is on another machine."""


class SlotRequest(_Message, frozen=True):
    """The publisher has a version to write and no slot to write it to; with one slot, the engine hands over its own."""


class Prepare(_Message, frozen=True):
    """Get the engine's side of the transport ready for versions."""

    setup: msgspec.Raw
    """A struct of the transport's."""


class Fill(_Message, frozen=True):
    """Write a version to a slot that is lent to the publisher."""

    slot: int
    version: Count
    fingerprint: str
    origin: msgspec.Raw
    """A struct of the transport's, which says where the version comes from."""
    base: int | None
    """What comes is the difference to this version; None: it is whole."""
    checksum: int
    """The checksum of the slot once it is filled."""


class SlotReady(_Message, frozen=True):
    """The slot holds a whole version now, its copy done on the device, and belongs to the engine again."""

    slot: int
    version: Count
    fingerprint: str
    published_ns: Count
    checksum: int | None = None
    """The checksum of the slot, which is compared before anything is drawn with it."""


class Detach(_Message, frozen=True):
    """The publisher goes, and gives back what it has."""

    written: list[int] = []
    """Slots that it may have written to, and does not announce."""


# ---- engine → client --------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    engine_id: str
    stream_endpoint: str
    layout: WeightLayout
    adapter_layout: WeightLayout | None
    """The layout of the slots of adapters; tensors are named ADAPTER.MODULE.lora_A and …lora_B."""
    device: str
    device_uuid: str
    """"" for a CPU."""
    num_slots: int
    max_sequences: int
    max_context: int
    vocab_size: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    attention: str
    """Name of the attention backend."""
    fused: bool
    """The decoder runs with fused kernels, and not as Transformers runs it."""
    num_graphs: int
    """CUDA graphs that were recorded."""
    publisher_lock: str
    """File that a publisher locks before it attaches; the kernel frees the lock when the publisher dies."""
    alive_lock: str
    """File that the engine holds a lock on; the kernel frees it when the engine dies."""
    tcp_endpoint: str = ""
    """Where the control socket listens for clients on other machines; "" if it does not."""
    tcp_stream_port: int = 0
    """The port of the stream for them, at the address by which they reach the control socket."""
    version: str = ""
    protocol: int = 0
    package: str = ""
    """Where the engine's inflight lies."""
    next_ids: Ids = Ids(0, 0)
    """Groups that are submitted later need these ids, or larger ones."""
    no_kernels: str = ""
    """Why an engine on the CPU runs without the C kernels; "" if it has them."""

    def execution(self) -> dict[str, Any]:
        """Says how forward passes run, for records of measurements."""
        return {"attention": self.attention, "fused": self.fused, "num_graphs": self.num_graphs}


class Result(_Message, frozen=True):
    """What a verb returned."""

    value: msgspec.Raw


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of an engine, and what it is doing now."""

    version: int
    step: int
    num_waiting: int
    num_running: int
    num_tokens: int
    num_swaps: int
    num_swaps_in_flight: int
    bad_messages: int
    paused: bool
    asleep: bool
    versions: list[int]
    """The versions that slots hold whole, live or pinned, which requests may be pinned to."""
    num_preemptions: int
    """How often a sequence gave its KV blocks back to others and was computed again."""
    kv_blocks_used: int
    kv_blocks: int
    num_reused_tokens: int
    """Prompt tokens that the prefix cache spared."""
    num_unacknowledged_bytes: int
    """Bytes of frames in the engine's memory that the trainer has not acknowledged."""
    num_spilled_bytes: int
    """Bytes of such frames beyond the bound on that memory, in files."""
    seconds_by_state: dict[str, float] = {}
    """For how long it has done what since it began: "generating", "idle", … (`RolloutStream.state` has them all)."""


class Digests(msgspec.Struct, frozen=True):
    """What a version of the weights consists of."""

    version: int
    tensors: dict[str, str]
    """Maps names, which are Hugging Face's, to the SHA-256 of the tensor's bytes, in hex:
    `hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()`."""


class Failed(_Message, frozen=True):
    """`kind` is the name of an error class in `inflight.core.errors`."""

    kind: str
    message: str


class Attached(_Message, frozen=True):
    layout: WeightLayout
    """The layout of the slots."""
    slots: list[SlotDescriptor]
    free: list[int]
    """Slots that belong to the publisher from now on."""
    version: int
    """Newest version that the engine holds; the next publish must be above it."""
    aliases: list[Alias] = []
    """The other names of the tensors, if the publisher asked for them."""


class SlotFree(_Message, frozen=True):
    slot: int


class Done(_Message, frozen=True):
    """The engine did what Prepare or Fill asked. A slot that was filled holds the version, whole, and still belongs to
    the publisher, who announces it."""


ToEngine = Hello | Call | Attach | SlotRequest | Prepare | Fill | SlotReady | Detach
FromEngine = Welcome | Result | Failed | Attached | SlotFree | Done
Answer = TypeVar("Answer", Welcome, Result, Attached)

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE = msgpack_decoder(ToEngine)
_FROM_ENGINE = msgpack_decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Raises InvalidRequestError for a message that is too large."""
    data = _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(_too_large(len(data)))
    return data


def to_raw(value: Any, what: str) -> msgspec.Raw:
    """Encode the arguments of a Call or the value of a Result. Raises InvalidRequestError, which calls it `what`, if no
    message can hold it."""
    try:
        return msgspec.Raw(_ENCODER.encode(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{what} cannot be sent: {error}") from error


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises ProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(_too_large(len(data)))
    return read(_TO_ENGINE, data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises ProtocolError."""
    return read(_FROM_ENGINE, data)


def expect(answer: FromEngine, kind: type[Answer]) -> Answer:
    """The answer, if it is of this kind. Raises ProtocolError."""
    if not isinstance(answer, kind):
        raise ProtocolError(f"expected {kind.__name__} from the engine, got {type(answer).__name__}")
    return answer


def read(decoder: msgspec.msgpack.Decoder, data: bytes | msgspec.Raw) -> Any:
    """Decode a message or a part of one. Raises ProtocolError, saying where in it something is wrong."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the control message cannot be read: {shorten(str(error))}") from error


def check_same_version(version: str, protocol: int, package: str, *, who: str) -> None:
    """Raises VersionMismatchError if another process does not run this version of inflight."""
    if (version, protocol) != (__version__, PROTOCOL):
        raise VersionMismatchError(
            f"{who} runs inflight {shorten(version, 60) or '?'} with protocol {protocol} from {shorten(package, 300)}, "
            f"this process {__version__} with protocol {PROTOCOL} from {PACKAGE}; both must be the same"
        )


def shorten(text: str, most: int = MAX_TEXT) -> str:
    """A text that somebody else had a say in, at most so long."""
    return text if len(text) <= most else f"{text[: most - 40]}… ({len(text):,} characters in all)"


def _too_large(size: int) -> str:
    return (
        f"a control message has at most {MAX_MESSAGE_BYTES >> 20} MiB, got {size / 2**20:.1f} MiB; "
        "submit fewer prompts at a time"
    )
