"""verl's own servers' manager, client and weight synchronization over `inflight serve`, in an environment of its own:
URL DIRECTORY CHECKPOINT…. Draws answers while the checkpoints are sent one after another as steps 1, 2, …, and writes
each answer as a line of JSON. DIRECTORY is for weights on their way."""

import asyncio
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Awaitable
from types import SimpleNamespace

import ray
import torch
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutMode


class Trainer(Worker):
    """What verl's actor worker does for an update, without a model: on rank 0 the weights are those of a file."""

    def __init__(self, engine_kwargs: dict, checkpoints: list[str]):
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        master = torch.distributed.get_rank() == 0
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "inflight", is_master=master, bucket_size=1 << 20, **engine_kwargs
        )
        self._checkpoints = checkpoints

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int = 0, mode: str = "auto") -> dict:
        weights = load_file(f"{self._checkpoints[global_steps - 1]}/model.safetensors")
        metrics = await self.checkpoint_engine.send_weights(iter(weights.items()), global_steps=global_steps)
        return metrics or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


async def main(url: str, directory: str, *checkpoints: str) -> None:
    records = tempfile.mkdtemp(prefix="verl-", dir="/tmp")  # short enough for names of sockets, and of no other cluster
    ray.init(address="local", num_cpus=8, include_dashboard=False, _temp_dir=records)
    engine_kwargs = {"urls": [url], "directory": directory}
    synchronization = CheckpointEngineConfig(backend="inflight", engine_kwargs={"inflight": engine_kwargs})
    rollout = RolloutConfig(
        name="inflight",
        mode="async",
        tensor_model_parallel_size=1,
        nnodes=1,
        n_gpus_per_node=1,
        prompt_length=8,
        response_length=400,
        checkpoint_engine=synchronization,
    )
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, model=None))
    manager = await LLMServerManager.create(config=config)
    trainers = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Trainer), engine_kwargs, list(checkpoints)),
        bin_pack=False,
        device_name="cpu",
    )
    updates = CheckpointEngineManager(synchronization, trainers, manager.get_replicas())

    async def draw(index: int, client) -> None:
        sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
        answer = await client.generate(f"request-{index}", prompt_ids=[5, 6], sampling_params=sampling)
        print(json.dumps(answer.model_dump() | {"client": type(client).__name__}), flush=True)

    clients = [manager.get_client(), manager.get_client(FullyAsyncLLMServerClient)]
    await asyncio.gather(*(draw(index, clients[index % 2]) for index in range(2)))
    updated = asyncio.Event()

    async def keep_drawing(index: int) -> None:
        while not updated.is_set():
            await draw(index, clients[index % 2])

    drawing = [asyncio.create_task(keep_drawing(index)) for index in range(16)]
    for step in range(1, len(checkpoints) + 1):
        await asyncio.to_thread(asyncio.run, _update(updates, step))
    updated.set()
    await asyncio.gather(*drawing)
    await asyncio.gather(*(draw(index, clients[index % 2]) for index in range(2)))
    asked = {"sampling_params": {}, "prompt_ids": [5, 6]}
    await tell_refusal(clients[0].generate("with an image", **asked, image_data=["image"]))
    await tell_refusal(clients[0].generate("too long", **asked | {"prompt_ids": [5] * 600}))
    replica = type(manager.get_replicas()[0])(
        0, dataclasses.replace(rollout, checkpoint_engine=CheckpointEngineConfig()), None
    )
    await tell_refusal(replica.init_hybrid(trainers))
    replica.rollout_mode = RolloutMode.STANDALONE
    await tell_refusal(replica.launch_servers())
    ray.shutdown()
    shutil.rmtree(records, ignore_errors=True)


async def tell_refusal(work: Awaitable) -> None:
    try:
        await work
    except Exception as error:
        print(json.dumps({"refused": f"{type(error).__name__}: {error}"}), flush=True)


async def _update(updates: CheckpointEngineManager, step: int) -> None:
    await updates.update_weights(global_steps=step)


asyncio.run(main(*sys.argv[1:]))
