"""TRL's clients of a vLLM server, with `inflight serve` (written against trl 1.16).

They send weights by NCCL, which requires vLLM in the trainer's environment and another GPU for the server. Here the
trainer writes whole weights to a directory that trainer and server both see, and names the directory to the server.

    transfer = DirectoryTransfer("http://localhost:8000", "/shared/weights")
    with inflight_server():                                   # vLLM need not be installed next to the trainer
        trainer = AsyncGRPOTrainer(path, …, weight_transfer=transfer)

    with inflight_server("/shared/weights"):
        trainer = GRPOTrainer(path, …, args=GRPOConfig(use_vllm=True, vllm_mode="server", …))
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from trl.experimental.async_grpo import async_rollout_worker
from trl.generation import vllm_client, vllm_generation

from inflight.core.errors import InflightError
from inflight.integrations.directory import DirectoryTransfer as DirectoryTransfer

_NO_NCCL = (
    "no weights go over NCCL inside of inflight_server(); name a directory that trainer and server see: "
    'inflight_server("/shared/weights")'
)


@contextmanager
def inflight_server(directory: str | Path | None = None, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Make TRL's trainers and clients of this block use `inflight serve` as their vLLM server.

    They do not require vLLM. directory: where GRPOTrainer's server mode (and RLOOTrainer's and others') writes weights,
    see DirectoryTransfer; None for AsyncGRPOTrainer with a `weight_transfer`, or with adapters. dtype: of the written
    weights.
    """

    class Client(vllm_client.VLLMClient):
        def init_communicator(self, device: Any = 0) -> None:
            if directory is None:
                raise InflightError(_NO_NCCL)
            self.transfer = DirectoryTransfer(self.base_url, directory, dtype=dtype)

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
            self.transfer.send_weights(named_params)

        def update_named_param(self, name: str, weights: torch.Tensor) -> None:
            raise InflightError(f"{name} alone cannot be published: a version is whole; call update_named_params")

    with ExitStack() as until_made:
        for module in (vllm_client, vllm_generation, async_rollout_worker):
            until_made.enter_context(patch.object(module, "is_vllm_available", lambda *_, **__: True))
        until_made.enter_context(patch.object(vllm_generation, "VLLMClient", Client))
        yield
