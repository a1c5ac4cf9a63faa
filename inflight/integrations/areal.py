"""AReaL with `inflight serve` (written against areal 1.0.4). In AReaL's environment this module needs nothing else of
inflight.

    from inflight.integrations.areal import InflightEngine

    rollout = InflightEngine(config.rollout)          # where an AReaL script has RemotevLLMEngine(config.rollout)
    rollout.initialize(addr=["10.0.0.7:8000"], train_data_parallel_size=1)

AReaL's own engine for vLLM works too, but makes the server drop every response before an update. Here nothing stops for
an update, and `output_versions` contains the version of the weights that drew each token.
"""

# AReaL needs a separate environment.
# pyright: reportMissingImports=false
import os
import subprocess
from contextvars import ContextVar
from typing import Any, NoReturn

from areal.api import ModelRequest, ModelResponse, WeightUpdateMeta
from areal.api.cli_args import InferenceEngineConfig
from areal.api.io_struct import HttpGenerationResult, HttpRequest, WeightUpdateRequests
from areal.engine.vllm_remote import RemotevLLMEngine, VLLMBackend
from areal.infra import RemoteInfEngine

_NO_NCCL = (
    "inflight serve receives no tensors over NCCL in AReaL's way: take weights from a directory that trainer and "
    'server both see, with weight_update_mode="disk"'
)
_versions: ContextVar[list[int]] = ContextVar("inflight_versions")
"""Weight version of each token of the request that this task waits for."""


class InflightBackend(VLLMBackend):
    """AReaL's requests to `inflight serve`. Requests that are not defined here are the same as for vLLM."""

    def build_generation_request(self, req: ModelRequest, with_lora: bool, version: int) -> HttpRequest:
        """Build the request as for vLLM, but with one adapter name, under which versions replace each other in flight.
        Before the first update the adapter has no effect."""
        if req.vision_msg_vllm:
            raise NotImplementedError("inflight serve takes no images")
        request = super().build_generation_request(req, with_lora, version)
        request.payload["return_weight_versions"] = True
        if with_lora and version:
            request.payload["model"] = req.gconfig.lora_name
        else:
            request.payload.pop("model", None)
        return request

    def parse_generation_response(self, response: dict[str, Any]) -> HttpGenerationResult:
        """Parse the response and note the versions. Raises ValueError for a version name that is not a number from
        AReaL."""
        result = super().parse_generation_response(response)
        for span in response["choices"][0]["weight_versions"]:
            _versions.get([]).extend([int(span["version"])] * (span["end"] - span["start"]))
        return result

    def build_disk_weight_update_requests(self, meta: WeightUpdateMeta) -> WeightUpdateRequests:
        """Publish the directory under AReaL's version number. The response arrives when it is live."""
        path, label = os.path.abspath(str(meta.path)), None if meta.version is None else str(meta.version)
        if meta.use_lora:
            payload = {"lora_name": meta.lora_name, "lora_path": path, "load_inplace": True, "weight_version": label}
            return WeightUpdateRequests([HttpRequest("/v1/load_lora_adapter", payload)])
        return WeightUpdateRequests([HttpRequest("/update_weights", {"weight_dir": path, "weight_version": label})])

    def _refuse_nccl(self, *_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(_NO_NCCL)

    build_distributed_weight_update_requests = build_init_weights_group_request = _refuse_nccl

    def get_pause_request(self) -> HttpRequest:
        """Return the request for AReaL's pause around an update. Nothing has to stop for it."""
        return HttpRequest("/pause?mode=keep", {})

    def get_resume_request(self) -> HttpRequest:
        """Return the request that ends such a pause."""
        return HttpRequest("/resume", {})

    def launch_server(self, server_args: dict[str, Any]) -> subprocess.Popen:
        """Raise NotImplementedError: inflight needs another torch than AReaL."""
        raise NotImplementedError(
            "start `inflight serve` in an environment of its own, and give initialize its address"
        )


class _VersionedEngine(RemoteInfEngine):
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        token = _versions.set([])
        try:
            response = await super().agenerate(req)
            response.output_versions = _versions.get()
        finally:
            _versions.reset(token)
        return response


class InflightEngine(RemotevLLMEngine):
    """AReaL's engine for a remote server, with `inflight serve`."""

    def __init__(self, config: InferenceEngineConfig):
        super().__init__(config)
        self._engine = _VersionedEngine(config, InflightBackend())
