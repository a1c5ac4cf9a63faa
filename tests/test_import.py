"""`import inflight` is light."""

import subprocess
import sys

PROGRAM = """
import sys
import inflight
heavy = sorted(name for name in ("torch", "transformers", "zmq", "triton", "trl") if name in sys.modules)
assert not heavy, heavy
assert set(inflight.__all__) <= set(dir(inflight)) | set(inflight._HOME)
import torch
assert all(getattr(inflight, name) is not None for name in inflight.__all__)
"""


def test_import_loads_neither_torch_nor_transformers_nor_zmq():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_every_public_name_is_declared_once():
    import inflight

    assert sorted(inflight._HOME) == sorted(inflight.__all__) == inflight.__all__
