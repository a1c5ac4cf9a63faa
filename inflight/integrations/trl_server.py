"""TRL's clients of a vLLM server, against `inflight serve` (written against trl 1.16).

They ask for completions over HTTP, and send weights by NCCL, which wants vLLM beside the trainer, and a GPU for it and
another one for the server. Here weights go through a directory that trainer and server both see: written whole, named
to the server, live between two forward passes.

    transfer = DirectoryTransfer("http://localhost:8000", "/shared/weights")
    with inflight_server():                                   # vLLM need not be installed beside the trainer
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
    """What is made inside takes `inflight serve` for its vLLM server: TRL's trainers and clients.

    They do not ask for vLLM to be installed, which they need for NCCL alone. directory: where GRPOTrainer's server mode
    (RLOOTrainer's and others' too) writes weights, see DirectoryTransfer; None for trainers that have a way of their
    own: AsyncGRPOTrainer with a `weight_transfer`, or with adapters. dtype: what they are written in.
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
