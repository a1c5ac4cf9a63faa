"""Streams of the threads that move weights."""

import torch


def use_own_stream(device: torch.device) -> None:
    """On a GPU, give the calling thread a stream of its own: else all threads share the default one, and whoever waits
    for a result waits for all that the trainer, or the engine, has put there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
