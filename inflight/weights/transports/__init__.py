"""Ways in which versions reach engines, one file each; `base.py` says what a transport consists of."""

from inflight.weights.transports.base import Receiver, Sender, StagedVersion, Transport

__all__ = ["Receiver", "Sender", "StagedVersion", "Transport"]
