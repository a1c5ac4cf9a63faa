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
    """The engine has as many unfinished samples as it may have; the message gives the bound and how to set it."""


class TooManyClientsError(InflightError):
    """The engine has as many clients as it may have; the message gives the bound and how to set it."""


class KeysError(InflightError, ValueError):
    """Keys are missing, are none, or can be read or changed by others; the message names the file."""


class ListenError(InflightError, OSError):
    """The engine cannot listen on an address; the message names it."""


class ModelLoadError(InflightError):
    """The model could not be found, read or built."""


class MissingPackageError(InflightError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


class RemoteCodeError(ModelLoadError):
    """The model consists of code of its repository, which is run only with trust_remote_code=True."""


class UnsupportedModelError(ModelLoadError):
    """The model has layers that the engine cannot run; the message names them."""


class TokenColumnError(InflightError, ValueError):
    """A column of a user's own cannot be imported or does not return one number per token, or tokens lack a column that
    their request asked for."""


class LayoutMismatchError(InflightError, ValueError):
    """Trainer and engine hold different tensors; the message names the first that differ."""


class SharedMemoryError(InflightError, OSError):
    """The slots do not fit into shared memory; the message gives the size needed and the size left."""


class DeviceMemoryError(InflightError):
    """The KV cache or a slot does not fit; the message gives the sizes."""


class BackendError(InflightError, ValueError):
    """A backend is not installed, or cannot do what was asked of it; the message says what to do instead."""


class PublisherConflictError(InflightError):
    """Another live publisher is attached to this engine."""


class NonFiniteWeightsError(InflightError, ValueError):
    """A version with NaN or infinite weights was not published; the message names the tensors."""


class NonFiniteLossError(InflightError, ValueError):
    """A policy loss is NaN or infinite; the message names the token that made it so, where it was one."""


class ChecksumError(InflightError):
    """A slot does not hold the bytes that were published; it was not announced."""


class FileWriteError(InflightError, OSError):
    """A file of results, or of a checkpoint, could not be written; the message names it and says why."""


class WeightFileError(InflightError, OSError):
    """A file of weights could not be written or read, or is not what it should be; the message names it."""


class JournalError(InflightError, OSError):
    """The journal of a token stream could not be written or read, or is damaged; the message names the place."""


class RunFileError(InflightError, OSError):
    """The file of a saved run could not be written or read, or is not what it should be; the message names it."""


class LoggerError(InflightError, OSError):
    """A logger cannot be made, as its library is not installed, or cannot write; the message says what to do."""


class ScoreError(InflightError):
    """A score function that runs in processes cannot be imported there, has raised, or has ended its process; the
    message has the traceback."""


class RoutedExpertsError(InflightError, ValueError):
    """Recorded experts cannot be replayed: they are not those of this model or this pass, or its routers take none."""


class BroadcastError(InflightError):
    """A broadcast of weights broke off."""


class ProtocolError(InflightError):
    """A message or frame that breaks the protocol."""


class FrameError(ProtocolError):
    """A token frame whose parts, dtypes or sizes do not fit its header."""


class StreamGapError(ProtocolError):
    """Frames are missing between two sequence numbers."""


class EngineDiedError(InflightError):
    """The engine process ended while it was still needed."""


class PlacementError(InflightError, TimeoutError):
    """Ray found no node for an engine within a bound; the message says what was asked for and what the nodes have."""


class EngineHungError(InflightError, TimeoutError):
    """The engine process lives and did not answer within a bound; the message gives the bound and how to set it."""


class EngineBusyError(InflightError, TimeoutError):
    """The engine answers, and did not do what was asked within a bound; the message gives the bound and how to set
    it."""


class RankLostError(InflightError):
    """A rank of the trainer has ended, or did not do its part within a bound; the message names it."""


class VersionMismatchError(ProtocolError):
    """Two processes run different versions of inflight; the message names both and where they lie."""


_BY_NAME = {name: cls for name, cls in globals().items() if isinstance(cls, type) and issubclass(cls, InflightError)}


def from_wire(kind: str, message: str) -> InflightError:
    """The error that a remote process reported, as an exception of the same class."""
    return _BY_NAME.get(kind, InflightError)(message)
