"""Garbage collection that does not pause a process for long."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Keep the collector from objects that exist already. A full collection walks all objects of torch and
    Transformers, and takes up to a quarter of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # some libraries report uncollected objects as leaks at the end of the process
