"""Tiny models in a real vLLM."""

from pathlib import Path
from typing import Any

from family_configs import Family
from family_weights import make_model
from peers_python import PEERS_PYTHON
from tiny_models import WIDE_HEADS

import inflight


def save(family: str, directory: Path, overrides: dict[str, Any] = WIDE_HEADS) -> str:
    make_model(Family(family, family, overrides), large=True).save_pretrained(directory)
    return str(directory)


def launch(model: str, dtype: str = "float32", **options: Any) -> inflight.Engine:
    return inflight.launch(
        model,
        backend="vllm",
        backend_python=PEERS_PYTHON,
        cuda_graphs=False,
        max_sequences=4,
        max_context=128,
        threads=1,
        dtype=dtype,
        **options,
    )
