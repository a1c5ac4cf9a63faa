"""A meter of how busy a GPU is, as its driver tells it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger("inflight.observability")

SAMPLE_S = 0.1


@contextmanager
def gpu_busy(device: torch.device) -> Iterator[list[int]]:
    """Sample a GPU's utilisation while the block runs: the percentage of time in which any process had a kernel on it.

    The list stays empty on a CPU, and where the driver cannot be asked (NVML, by the package nvidia-ml-py).
    """
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            try:
                samples.append(torch.cuda.utilization(device))
            except (ModuleNotFoundError, RuntimeError) as error:
                logger.warning("the GPU's utilisation is not measured: %s", error)
                return

    if device.type != "cuda":
        yield samples
        return
    thread = threading.Thread(target=sample, name="inflight-gpu-meter", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
