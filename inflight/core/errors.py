"""Every error that inflight raises on purpose, and their names on the wire.

A message says what was wrong, what was expected and what to do. An error that happens in the engine process
crosses the control socket as (class name, message) and is raised again in the caller's process.
"""


class InflightError(Exception):
    """Base of all errors that inflight raises on purpose."""


class InvalidRequestError(InflightError, ValueError):
    """A prompt or sampling parameter that the engine cannot serve."""


class PromptTooLongError(InvalidRequestError):
    """A prompt fills the engine's context; the message gives both lengths."""


class QueueFullError(InflightError):
    """The engine's bound on unfinished samples is reached; the message gives the bound and its option."""


class TooManyClientsError(InflightError):
    """The engine's bound on clients is reached; the message gives the bound and its option."""


class KeysError(InflightError, ValueError):
    """Keys are missing or invalid, or other users can read or change them; the message names the file."""


class ListenError(InflightError, OSError):
    """The engine cannot listen on an address; the message names it."""


class ModelLoadError(InflightError):
    """The model could not be found, read or built."""


class MissingPackageError(InflightError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


class RemoteCodeError(ModelLoadError):
    """The model needs code from its repository. It runs only with trust_remote_code=True."""


class UnsupportedModelError(ModelLoadError):
    """The model has layers that the engine cannot run; the message names them."""


class TokenColumnError(InflightError, ValueError):
    """A custom column cannot be imported or does not return one number per token, or tokens lack a requested column."""


class LayoutMismatchError(InflightError, ValueError):
    """Trainer and engine hold different tensors; the message names the first that differ."""


class SharedMemoryError(InflightError, OSError):
    """The slots do not fit into shared memory; the message gives the size needed and the size left."""


class DeviceMemoryError(InflightError):
    """The KV cache or a slot does not fit; the message gives the sizes."""


class BackendError(InflightError, ValueError):
    """A backend is not installed, or does not support the request; the message names an alternative."""


class PublisherConflictError(InflightError):
    """Another live publisher is attached to this engine."""


class NonFiniteWeightsError(InflightError, ValueError):
    """A version with NaN or infinite weights was not published; the message names the tensors."""


class NonFiniteLossError(InflightError, ValueError):
    """A policy loss is NaN or infinite; the message names the token if a single one caused it."""


class ChecksumError(InflightError):
    """A slot does not hold the bytes that were published; it was not announced."""


class FileWriteError(InflightError, OSError):
    """A file of results, or of a checkpoint, could not be written; the message names it and says why."""


class WeightFileError(InflightError, OSError):
    """A file of weights could not be written or read, or is malformed; the message names it."""


class JournalError(InflightError, OSError):
    """The journal of a token stream could not be written or read, or is damaged; the message names the place."""


class RunFileError(InflightError, OSError):
    """The file of a saved run could not be written or read, or is malformed; the message names it."""


class LoggerError(InflightError, OSError):
    """A logger's library is not installed, or the logger cannot write; the message gives the remedy."""


class ScoreError(InflightError):
    """No rollout of a batch has a reward, because the score function has failed. Or the exception of a score function
    in a process; the message has its traceback."""


class TeacherError(InflightError):
    """A teacher did not give log-probabilities of the drawn tokens; the message names the teacher and the reason."""


class VocabularyError(InflightError, ValueError):
    """A teacher has another vocabulary than the policy; the message names a token."""


class RoutedExpertsError(InflightError, ValueError):
    """Recorded experts cannot be replayed: they belong to another model or pass, or the routers do not accept them."""


class BroadcastError(InflightError):
    """A broadcast of weights was interrupted."""


class ProtocolError(InflightError):
    """A message or frame that breaks the protocol."""


class FrameError(ProtocolError):
    """A token frame whose parts, dtypes or sizes do not fit its header."""


class StreamGapError(ProtocolError):
    """Frames are missing between two sequence numbers."""


class EngineDiedError(InflightError):
    """The engine process ended unexpectedly."""


class PlacementError(InflightError, TimeoutError):
    """Ray found no node for an engine within a bound; the message compares the request with the nodes' resources."""


class EngineHungError(InflightError, TimeoutError):
    """The engine process runs but did not answer within a bound; the message gives the bound and its option."""


class EngineBusyError(InflightError, TimeoutError):
    """The engine answers but did not complete a request within a bound; the message gives the bound and its option."""


class RankLostError(InflightError):
    """A rank of the trainer has ended or did not respond within a bound; the message names it."""


class VersionMismatchError(ProtocolError):
    """Two processes run different versions of inflight; the message gives both versions and their paths."""


_BY_NAME = {name: cls for name, cls in globals().items() if isinstance(cls, type) and issubclass(cls, InflightError)}


def from_wire(kind: str, message: str) -> InflightError:
    """Return the error that a remote process reported, as an exception of the same class."""
    return _BY_NAME.get(kind, InflightError)(message)
