"""TRL's clients of a vLLM server, with `inflight serve` (written against trl 1.16).

They send weights by NCCL, which requires vLLM in the trainer's environment and another GPU for the server. Here the
trainer writes whole weights to a directory that trainer and server both see, and names the directory to the server.

    transfer = DirectoryTransfer("http://localhost:8000", "/shared/weights")
    with inflight_server():                                   # vLLM need not be installed next to the trainer
        trainer = AsyncGRPOTrainer(path, …, weight_transfer=transfer)

    with inflight_server("/shared/weights"):
        trainer = GRPOTrainer(path, …, args=GRPOConfig(use_vllm=True, vllm_mode="server", …))
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from trl.experimental.async_grpo import async_rollout_worker  # noqa: F401  # so that it is among the modules of TRL
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

    They do not require vLLM. Import the trainer's class before. directory: where the server mode of GRPOTrainer,
    RLOOTrainer, DistillationTrainer or GOLDTrainer writes weights, see DirectoryTransfer; None for AsyncGRPOTrainer
    with a `weight_transfer`, or with adapters. dtype: of the written weights.
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
        for module in [module for name, module in list(sys.modules.items()) if _asks_for_vllm(name, module)]:
            until_made.enter_context(patch.object(module, "is_vllm_available", lambda *_, **__: True))
        until_made.enter_context(patch.object(vllm_generation, "VLLMClient", Client))
        yield


def _asks_for_vllm(name: str, module: Any) -> bool:
    """Return whether a trainer's or client's module asks whether vLLM is installed. `trl.import_utils` answers that,
    also for modules that are imported later and import vLLM then."""
    return name.startswith("trl.") and name != "trl.import_utils" and "is_vllm_available" in vars(module)
