"""Digests of every tensor of the live weights, computed in a thread while the engine generates."""

import hashlib
import logging
import threading

import torch

from inflight.core.errors import ProtocolError
from inflight.core.messages import Digests
from inflight.weights.comparison import ChecksumRequest
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.engine.slot_table import SlotTable
from inflight.weights.tensors import slot_views

logger = logging.getLogger("inflight.engine")

_PIECE_BYTES = 64 << 20
"""Bytes copied from a GPU at a time."""


class Digester:
    """Computes digests of the live version of a slot table, one version at a time. Meanwhile the version keeps its
    slot, like a version with pinned requests: a publisher might have to wait for a slot; the generator does not."""

    def __init__(self, slot_table: SlotTable):
        self._slot_table = slot_table
        self._thread: threading.Thread | None = None
        self._version = 0
        """The version that the thread reads."""
        self._found: Digests | ProtocolError | None = None
        """The last result of the thread, or its error."""
        self._asked: ChecksumRequest | None = None
        """Request that the thread computes or has computed last; None: SHA-256."""

    def ask(self, least: int, asked: ChecksumRequest | None = None) -> list[Digests]:
        """Return digests of a version from `least` on, or nothing while they are computed or no such version is live.
        asked: request for checksums instead of SHA-256. Raises ProtocolError if they could not be computed. Only the
        thread that owns the slot table calls this."""
        self.settle()
        if isinstance(self._found, ProtocolError):
            error, self._found = self._found, None
            raise error
        if self._found is not None and self._found.version >= least and self._asked == asked:
            return [self._found]
        table = self._slot_table
        if self._thread is None and table.live is not None and table.version >= least:
            self._version, buffer = table.version, table.slots[table.live].buffer
            self._found, self._asked = None, asked
            table.readable.pin(self._version)
            self._thread = threading.Thread(target=self._compute, args=(buffer,), name="inflight-digests", daemon=True)
            self._thread.start()
        return []

    def settle(self) -> None:
        """Unpin the version once its digests are computed."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._slot_table.readable.unpin(self._version)

    def _compute(self, buffer: torch.Tensor) -> None:
        layout, asked = self._slot_table.layout, self._asked
        try:
            use_own_stream(buffer.device)  # No pass waits for it.
            if asked is None:
                tensors = {name: sha256(view) for name, view in slot_views(buffer, layout).items()}
            else:
                tensors = asked.of(slot_views(buffer, layout))
            self._found = Digests(self._version, tensors)
        except Exception as error:
            logger.exception("no digests of version %d", self._version)
            reason = f"{type(error).__name__}: {error}"
            self._found = ProtocolError(f"the digests of version {self._version} could not be computed: {reason}")


def sha256(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(_PIECE_BYTES):
        digest.update(piece.cpu().numpy().data)
    return digest.hexdigest()
