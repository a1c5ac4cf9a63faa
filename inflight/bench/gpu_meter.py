"""A meter of how busy a GPU is, as its driver tells it."""

import logging
import threading
from statistics import fmean

import torch

logger = logging.getLogger("inflight.observability")

SAMPLE_S = 0.1


class BusyMeter:
    """Samples a GPU's utilisation while the block runs: the share of time in which any process had a kernel on it.

    `share` is the mean, 0 … 1. It stays None on a CPU, and where the driver cannot be asked (NVML, by the package
    nvidia-ml-py).
    """

    def __init__(self, device: torch.device):
        self.share: float | None = None
        self._device = device
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "BusyMeter":
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._sample, name="inflight-gpu-meter", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self.share = fmean(self._samples) / 100 if self._samples else None

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                self._samples.append(torch.cuda.utilization(self._device))
            except (ModuleNotFoundError, RuntimeError) as error:
                logger.warning("the GPU's utilisation is not measured: %s", error)
                return
