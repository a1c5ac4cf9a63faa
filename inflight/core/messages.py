"""Messages on the control socket: MessagePack, tagged by type, never pickle.

Client → engine: Hello, Call; publisher → engine: Attach, SlotRequest, SlotReturn, Prepare, Fill, SlotReady,
Detach.
Engine → client: Welcome, Result, Failed; engine → publisher: Attached, SlotFree, Done, Failed.

A Call names a verb of the engine (`inflight/engine/process/verbs.py`). A request carries a `ticket`
that its response repeats; 0 requests no response. A slot has one owner at a time, and ownership moves only by SlotFree
(engine → publisher) and SlotReady (publisher → engine). If the publisher cannot write to the slot itself, it has the
engine fill it (Fill, Done) before it announces the slot as usual.
"""

import copy
import secrets
from typing import Any, TypeVar

import msgspec

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InvalidRequestError, ProtocolError, VersionMismatchError
from inflight.core.frames import Count, TokenId
from inflight.core.layout import Alias, WeightLayout
from inflight.core.sampling import SamplingParams
from inflight.core.version import PACKAGE, __version__

LIVE_VERSION = -1
PROTOCOL = 11
"""Version of these messages and of frames. Raise it with every incompatible change."""
MAX_MESSAGE_BYTES = 32 << 20
MAX_TEXT = 2000
"""Maximum number of characters of an error message on the wire and in a log."""


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
    """Requests Welcome, or Failed if the model could not be loaded or the client has another version."""

    version: str = __version__
    protocol: int = PROTOCOL
    package: str = PACKAGE
    """Path of the client's inflight package."""


class Prompt(msgspec.Struct, frozen=True):
    token_ids: list[int]
    params: SamplingParams
    metadata: dict[str, Any] = {}
    version: int | None = None
    """The weight version that draws all of its tokens (LIVE_VERSION: the version that is live when the request is
    accepted). A slot keeps that version until the request ends. None: the live version at each token."""
    adapter: str | None = None
    """Name of the adapter that draws its tokens; None: the weights alone."""

    def seeded(self) -> "Prompt":
        """Return the prompt, with a random seed if its parameters have none."""
        if self.params.seed is not None:
            return self
        params = copy.copy(self.params)  # `msgspec.structs.replace` would check all fields again
        msgspec.structs.force_setattr(params, "seed", secrets.randbits(62))
        return msgspec.structs.replace(self, params=params)


class Ids(msgspec.Struct, frozen=True, array_like=True):
    """Ids of a group; its requests have the ids first_request_id, first_request_id + 1, …"""

    group_id: Count
    first_request_id: Count


class Unfinished(msgspec.Struct, frozen=True):
    """A group that another engine began, with the progress of its samples."""

    group_id: Count
    prompt: Prompt
    """Submitted prompt; its params contain the seed of the group."""
    first_request_id: Count | None = None
    """None: it is only known that the group was accepted."""
    drawn: dict[Count, list[TokenId]] = {}
    """Maps the ids of unfinished requests to their tokens so far; the others have ended."""
    forked_from: tuple[int, int] | None = None


class Call(_Message, frozen=True):
    """Requests the Result of a verb."""

    verb: str
    arguments: msgspec.Raw
    """A map from parameter names to values, which the verb converts to the types of its parameters."""


class Attach(_Message, frozen=True):
    """A publisher requests to publish tensors of this layout (its own dtypes; it casts)."""

    layout: WeightLayout
    transport: str
    """Name of the transport, one of the names that the engine accepts."""
    adapters: bool = False
    """True for adapters, False for weights."""
    aliases: bool = False
    """True to request the other names of the tensors."""
    lock_token: str = ""
    """Token that the publisher wrote into `Welcome.publisher_lock` when it had locked it; "" if it is on another
    machine."""


class SlotRequest(_Message, frozen=True):
    """The publisher has a version to write and no slot to write it to. An engine with one slot passes that slot."""


class SlotReturn(_Message, frozen=True):
    """The publisher has not used the slot. An engine with one slot continues with it. If the slot was written to, the
    engine passes it to the publisher again."""

    slot: int


class Prepare(_Message, frozen=True):
    """Requests the engine's side of the transport to prepare for versions."""

    setup: msgspec.Raw
    """A struct of the transport."""


class Fill(_Message, frozen=True):
    """Requests the engine to write a version to a slot that the publisher owns."""

    slot: int
    version: Count
    fingerprint: str
    origin: msgspec.Raw
    """A struct of the transport with the origin of the version."""
    base: int | None
    """Base version of a delta; None: the version is whole."""
    checksum: int
    """Checksum of the filled slot."""


class SlotReady(_Message, frozen=True):
    """The slot contains a whole version, copied on the device, and belongs to the engine again."""

    slot: int
    version: Count
    fingerprint: str
    published_ns: Count
    checksum: int | None = None
    """Checksum of the slot. The engine compares it before it draws tokens with this version."""
    changed_at: dict[str, Count] = {}
    """Maps adapters to the last version that changed them. This version changes adapters without an entry."""


class Detach(_Message, frozen=True):
    """The publisher detaches and returns its slots."""

    written: list[int] = []
    """Unannounced slots that the publisher might have written to."""


# ---- engine → client --------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    engine_id: str
    stream_endpoint: str
    layout: WeightLayout
    adapter_layout: WeightLayout | None
    """Layout of the adapter slots; tensors are named ADAPTER.MODULE.lora_A and …lora_B."""
    device: str
    device_uuid: str
    """The GPU of the slots; "" if they are in the memory of the host."""
    num_slots: int
    max_sequences: int
    max_context: int
    vocab_size: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    attention: str
    """Name of the attention backend."""
    fused: bool
    """True if the decoder runs with fused kernels, False if it runs as in Transformers."""
    num_graphs: int
    """Number of recorded CUDA graphs."""
    publisher_lock: str
    """File that a publisher locks before it attaches; the kernel frees the lock when the publisher dies."""
    alive_lock: str
    """File that the engine locks; the kernel frees the lock when the engine dies."""
    tcp_endpoint: str = ""
    """Endpoint of the control socket for clients on other machines; "" if there is none."""
    tcp_stream_port: int = 0
    """Port of the stream for these clients, at the address by which they reach the control socket."""
    version: str = ""
    protocol: int = 0
    package: str = ""
    """Path of the engine's inflight package."""
    next_ids: Ids = Ids(0, 0)
    """Smallest ids for groups that are submitted later."""
    no_kernels: str = ""
    """Reason why an engine on the CPU runs without the C kernels; "" if it has them."""

    def execution(self) -> dict[str, Any]:
        """Describe how forward passes run, for records of measurements."""
        return {"attention": self.attention, "fused": self.fused, "num_graphs": self.num_graphs}


class Result(_Message, frozen=True):
    """The result of a verb."""

    value: msgspec.Raw


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and current state of an engine."""

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
    """Versions that are whole in slots, live or pinned. Requests can be pinned to them."""
    num_preemptions: int
    """Number of times a sequence returned its KV blocks and was computed again."""
    kv_blocks_used: int
    kv_blocks: int
    num_reused_tokens: int
    """Number of prompt tokens from the prefix cache."""
    num_unacknowledged_bytes: int
    """Bytes of frames in the engine's memory that the trainer has not acknowledged."""
    num_spilled_bytes: int
    """Bytes of such frames beyond the bound on that memory, in files."""
    seconds_by_state: dict[str, float] = {}
    """Maps states ("generating", …; `RolloutStream.state` lists all) to the seconds in each since the start."""


class Digests(msgspec.Struct, frozen=True):
    """Digests of the tensors of one weight version."""

    version: int
    tensors: dict[str, str]
    """Maps Hugging Face names to the SHA-256 of the tensor's bytes, in hex:
    `hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()`."""


class Failed(_Message, frozen=True):
    """An error. `kind` is the name of an error class in `inflight.core.errors`."""

    kind: str
    message: str


class Attached(_Message, frozen=True):
    layout: WeightLayout
    """The layout of the slots."""
    slots: list[SlotDescriptor]
    free: list[int]
    """Slots that now belong to the publisher."""
    version: int
    """Newest version of the engine; the next publish must be above it."""
    aliases: list[Alias] = []
    """The other names of the tensors, if the publisher asked for them."""


class SlotFree(_Message, frozen=True):
    slot: int


class Done(_Message, frozen=True):
    """The engine did what Prepare or Fill requested. A filled slot contains the whole version and still belongs to the
    publisher, which announces it."""


ToEngine = Hello | Call | Attach | SlotRequest | SlotReturn | Prepare | Fill | SlotReady | Detach
FromEngine = Welcome | Result | Failed | Attached | SlotFree | Done
Answer = TypeVar("Answer", Welcome, Result, Attached)

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE = msgpack_decoder(ToEngine)
_FROM_ENGINE = msgpack_decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message. Raises InvalidRequestError if it is too large."""
    data = _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(_too_large(len(data)))
    return data


def to_raw(value: Any, what: str) -> msgspec.Raw:
    """Encode the arguments of a Call or the value of a Result. Raises InvalidRequestError, with the name `what`, if no
    message can contain it."""
    try:
        return msgspec.Raw(_ENCODER.encode(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{what} cannot be sent: {error}") from error


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message to an engine. Raises ProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(_too_large(len(data)))
    return read(_TO_ENGINE, data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Decode a message from an engine. Raises ProtocolError."""
    return read(_FROM_ENGINE, data)


def expect(answer: FromEngine, kind: type[Answer]) -> Answer:
    """Return the answer if it is of this kind. Raises ProtocolError."""
    if not isinstance(answer, kind):
        raise ProtocolError(f"expected {kind.__name__} from the engine, got {type(answer).__name__}")
    return answer


def read(decoder: msgspec.msgpack.Decoder, data: bytes | msgspec.Raw, what: str = "the control message") -> Any:
    """Decode a message or a part of one. Raises ProtocolError with the location of the error."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be read: {shorten(str(error))}") from error


def check_same_version(version: str, protocol: int, package: str, *, who: str) -> None:
    """Raise VersionMismatchError if another process does not run this version of inflight."""
    if (version, protocol) != (__version__, PROTOCOL):
        raise VersionMismatchError(
            f"{who} runs inflight {shorten(version, 60) or '?'} with protocol {protocol} from {shorten(package, 300)}, "
            f"this process {__version__} with protocol {PROTOCOL} from {PACKAGE}; both must be the same"
        )


def shorten(text: str, most: int = MAX_TEXT) -> str:
    """Cut a text from another process to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 40]}… ({len(text):,} characters in all)"


def _too_large(size: int) -> str:
    return (
        f"a control message has at most {MAX_MESSAGE_BYTES >> 20} MiB, got {size / 2**20:.1f} MiB; "
        "submit fewer prompts at a time"
    )
