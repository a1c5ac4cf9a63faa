"""A model that FSDP2 spreads over two processes is published as a plain one is."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sharded_trainer.py")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (2, "bfloat16"), (3, "bfloat16")])
def test_every_version_is_bit_identical_to_the_model_put_together(tmp_path, model_dir, size, dtype):
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(size), tmp_path / "store", model_dir("qwen3"), dtype],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors[-1500:] for _, errors in outputs)
    assert outputs[0][0].splitlines() == [f"version {step} is bit-identical" for step in (1, 2, 3)]
