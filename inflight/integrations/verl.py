"""`inflight serve` as the rollout of verl (written against verl 0.9.1).

In verl's environment this module needs nothing else of inflight but `inflight.integrations.directory`. verl finds it by
its entry point, or with VERL_USE_EXTERNAL_MODULES=inflight.integrations.verl. The servers run independently, each with
GPUs that verl does not manage:

    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.rollout.name=inflight
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=2              # number of servers
    actor_rollout_ref.rollout.checkpoint_engine.backend=inflight
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.inflight.urls=[http://a:8000,http://b:8000]
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.inflight.directory=/shared/weights

Around an update verl aborts all requests, releases the KV cache, and resumes. Here these calls do nothing: the
generators continue, and swap weights between two forward passes.
"""

# verl needs a separate environment.
# pyright: reportMissingImports=false
import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from inflight.core.waiting import LOG_EVERY_S
from inflight.integrations.directory import DirectoryTransfer, bearer

logger = logging.getLogger("inflight.client")

NAME = "inflight"
_TOKEN = "INFLIGHT_TOKEN"
"""Environment variable with the servers' token, if they have one."""
_TIMEOUT_S = 3600.0
"""Time limit for one response and all repetitions of its request, against a server that hangs."""
_LEAST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0
"""Bounds of the time before a repetition."""
_STOP_REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}


class InflightServer:
    """Ray actor that receives verl's requests for one server. Lengths are verl's configuration values, in tokens."""

    def __init__(self, url: str, prompt_length: int, response_length: int):
        self._url, self._prompt_length, self._response_length = url, prompt_length, response_length
        self._session: aiohttp.ClientSession | None = None
        self._next_log_s = 0.0

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str, **media: Any
    ) -> TokenOutput:
        """Generate one response. `extra_fields` contains the oldest and the newest trainer step whose weights drew a
        token of it; `global_steps` is the oldest. Raises ValueError for images, audio or video, and RuntimeError with
        the server's message."""
        if given := [name for name, value in media.items() if value]:
            raise ValueError(f"inflight serve takes no {', '.join(given)}")
        sampling = {name: value for name, value in sampling_params.items() if name != "max_new_tokens"}
        sampling["logprobs"] = 1 if sampling.get("logprobs") else None
        left = self._prompt_length + self._response_length - len(prompt_ids)
        asked = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        sampling["max_tokens"] = max(1, min(self._response_length, left) if asked is None else asked)
        body = {"request_id": request_id, "token_ids": list(prompt_ids), "sampling_params": sampling}
        answer = await self._post("/inference/v1/generate", body)
        [choice] = answer["choices"]
        steps = [int(span["version"]) for span in choice["weight_versions"]]
        oldest, newest = (min(steps), max(steps)) if steps else (None, None)
        told = choice["logprobs"]
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=None if told is None else [entry["logprob"] for entry in told["content"]],
            stop_reason=_STOP_REASONS.get(choice["finish_reason"]),
            extra_fields={"global_steps": oldest, "min_global_steps": oldest, "max_global_steps": newest},
        )

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the response. Sends the request again after a 503 with Retry-After. Raises RuntimeError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=bearer(os.environ.get(_TOKEN, ""))
            )
        deadline_s = monotonic() + _TIMEOUT_S
        while True:
            left = aiohttp.ClientTimeout(total=max(1.0, deadline_s - monotonic()))
            async with self._session.post(f"{self._url}{path}", json=body, timeout=left) as response:
                if response.status == 200:
                    return await response.json()
                message = f"{self._url} answered {response.status}: {(await response.text())[:1000]}"
                retry_after = response.headers.get("Retry-After", "")
            wait_s = min(max(int(retry_after), _LEAST_WAIT_S), _MOST_WAIT_S) if retry_after.isdecimal() else 0
            if response.status != 503 or not wait_s or monotonic() + wait_s > deadline_s:
                raise RuntimeError(message)
            if monotonic() > self._next_log_s:
                self._next_log_s = monotonic() + LOG_EVERY_S
                logger.warning("requests are sent again in %g s: %s", wait_s, message)
            await asyncio.sleep(wait_s)


async def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the server continues."""


class InflightReplica(RolloutReplica):
    """A server in the form that verl's trainers use. It runs already. Its worker without a GPU receives verl's calls
    around updates and does nothing then."""

    async def init_standalone(self) -> None:
        """Start that worker, and connect to the server."""
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"inflight_{self.replica_rank}{self.name_suffix}"
        self.resource_pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix=name)
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=name,
            device_name=get_device_name(),
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Connect to the server at this replica's position among the urls. Raises ValueError."""
        if self.rollout_mode is not RolloutMode.STANDALONE:
            raise ValueError("inflight serve has GPUs of its own: set actor_rollout_ref.hybrid_engine=False")
        url = _url(self.config, self.replica_rank)
        actor = ray.remote(InflightServer).options(num_cpus=0, max_concurrency=self.max_concurrency)
        self._server_handle = actor.remote(url, self.config.prompt_length, self.config.response_length)
        self.servers, self._server_address = [self._server_handle], urlsplit(url).netloc

    def rollout_worker_use_gpu(self) -> bool:
        return False

    wake_up = sleep = abort_all_requests = resume_generation = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class ServerAdapter(base.BaseRollout):
    """Target to which the worker of a replica passes weights. They have already arrived in another way."""

    replica_rank, is_leader_rank = -1, True

    def __init__(self, *args: Any, replica_rank: int = -1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.replica_rank = replica_rank

    resume = release = _nothing

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **kwargs: Any) -> None:
        """Read the iterator, which must be empty."""
        async for _ in weights:
            raise ValueError('rollout "inflight" needs checkpoint_engine.backend=inflight')


@CheckpointEngineRegistry.register(NAME)
class DirectoryEngine(CheckpointEngine):
    """Sends weights through a directory that the trainer's first rank and the servers see."""

    def __init__(
        self,
        bucket_size: int,
        *,
        urls: Sequence[str],
        directory: str,
        is_master: bool = False,
        timeout_s: float = 1800.0,
    ):
        """bucket_size: required by verl, unused here. timeout_s: for a server's responses."""
        self._transfer = None
        if is_master:
            token = os.environ.get(_TOKEN, "")
            self._transfer = DirectoryTransfer(list(urls), directory, timeout_s=timeout_s, token=token)

    def prepare(self) -> dict[str, Any]:
        """Return no address, since the ranks do not join a group."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Do nothing."""

    finalize = init_process_group

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Publish the weights of this step; return when they are live on every server. Raises InflightError with a
        server's message."""
        if self._transfer is None:
            for _ in weights:  # gathering a tensor is a collective
                pass
            return
        self._transfer.send_weights(weights, None if global_steps is None else str(global_steps))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield nothing: the servers read the directory."""
        await asyncio.sleep(0)
        for pair in ():
            yield pair


def _url(config: Any, replica_rank: int) -> str:
    """Return a server's URL. Raises ValueError if the configuration names too few servers."""
    urls = list(config.checkpoint_engine.engine_kwargs.get(NAME, {}).get("urls", ()))
    if replica_rank >= len(urls):
        raise ValueError(
            f"replica {replica_rank} has no server: rollout.checkpoint_engine.engine_kwargs.inflight.urls=[http://…] "
            f"names {len(urls)}, and there are nnodes × n_gpus_per_node replicas"
        )
    return urls[replica_rank].rstrip("/")


RolloutReplicaRegistry.register(NAME, lambda: InflightReplica)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"  # verl has no function for that
