"""TRL's clients of a vLLM server, against `inflight serve` (written against trl 1.16).

They ask for completions over HTTP, and send weights over NCCL, which `inflight serve` does not receive. Here weights go
through a directory that trainer and server both see: written whole, named to the server, live between two forward
passes.

    transfer = DirectoryTransfer("http://localhost:8000", "/shared/weights")
    with inflight_server():                                   # vLLM need not be installed beside the trainer
        trainer = AsyncGRPOTrainer(path, …, weight_transfer=transfer)

    with inflight_server("/shared/weights"):
        trainer = GRPOTrainer(path, …, args=GRPOConfig(use_vllm=True, vllm_mode="server", …))
"""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import torch
from safetensors.torch import save_file
from trl.experimental.async_grpo import async_rollout_worker
from trl.generation import vllm_client, vllm_generation

from inflight.core.errors import InflightError, WeightFileError
from inflight.core.waiting import Wait

_FILE_BYTES = 4 << 30
_ASK_EVERY_S = 0.5
_NO_NCCL = (
    "inflight serve receives no weights over NCCL; name a directory that trainer and server see: "
    'inflight_server("/shared/weights")'
)


class DirectoryTransfer:
    """A `weight_transfer` for AsyncGRPOTrainer, and what sends the weights of GRPOTrainer's server mode: writes each
    version as a checkpoint into a directory of its own, and has an `inflight serve` publish it.

    `send_weights` returns when the version is live, or raises what the server says of it; then the server draws with
    the weights that it had. The directory of a version is removed when the next one is live.
    """

    def __init__(self, url: str, directory: str | Path, *, dtype: torch.dtype | None = None, timeout_s: float = 1800.0):
        """url: of the server. directory: an absolute path, the same for both. dtype: what floating-point tensors are
        written in, for example that of the server; None leaves them as they are. timeout_s: for the server's answers.
        Raises WeightFileError."""
        self._url, self._directory, self._dtype, self._timeout_s = url.rstrip("/"), Path(directory), dtype, timeout_s
        if not self._directory.is_absolute():
            raise WeightFileError(f"{directory} is no absolute path, by which the server could find it")
        self._count = 0

    def init_weight_transfer(self) -> None:
        """Return when the server answers. Raises TimeoutError."""
        wait = Wait()
        while not self._answers():
            if wait.waited_s > self._timeout_s:
                raise TimeoutError(f"no server answers at {self._url} after {self._timeout_s:g} s")
            sleep(_ASK_EVERY_S)
            wait.tick()
            wait.tell(f"no server answers at {self._url} yet")

    def pause(self) -> None:
        """Do nothing: the server goes on drawing."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the weights, and return when the server draws with them. Raises InflightError with what the server
        says, or OSError if they cannot be written."""
        directory = self._directory / f"version-{self._count + 1:08d}"
        shutil.rmtree(directory, ignore_errors=True)  # of a run before this one
        directory.mkdir(parents=True)
        try:
            self._write(directory, iterator)
            self._publish(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        shutil.rmtree(self._directory / f"version-{self._count:08d}", ignore_errors=True)
        self._count += 1

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Leave the last version where it is; the server has read it."""

    def _write(self, directory: Path, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        num_files = num_bytes = 0
        for name, tensor in iterator:
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()  # PEFT unmerges at the end
            num_bytes += tensors[name].nbytes
            if num_bytes >= _FILE_BYTES:
                save_file(tensors, directory / f"model-{num_files:05d}.safetensors")
                tensors, num_files, num_bytes = {}, num_files + 1, 0
        if tensors:
            save_file(tensors, directory / f"model-{num_files:05d}.safetensors")

    def _publish(self, directory: Path) -> None:
        body = json.dumps({"weight_dir": str(directory)}).encode()
        request = urllib.request.Request(f"{self._url}/update_weights", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):
                pass
        except urllib.error.HTTPError as error:
            raise InflightError(f"the server at {self._url} did not take the weights: {_told(error)}") from error
        except OSError as error:
            raise InflightError(f"the server at {self._url} does not answer: {error}") from error

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=_ASK_EVERY_S):
                return True
        except OSError:
            return False


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
            until_made.enter_context(_replaced(module, "is_vllm_available", lambda *_, **__: True))
        until_made.enter_context(_replaced(vllm_generation, "VLLMClient", Client))
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _told(error: urllib.error.HTTPError) -> str:
    """The message of an error of inflight's server, or what else answered."""
    text = error.read().decode(errors="replace")
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {text[:300]}"
