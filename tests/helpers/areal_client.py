"""AReaL's engine for a remote server over `inflight serve`, in an environment of its own: ADDRESS DIRECTORY
CHECKPOINT…. Draws answers through AReaL's executor while the checkpoints are loaded one after another as versions 1, 2,
…, and writes each answer as a line of JSON. DIRECTORY is for AReaL's own records."""

import json
import sys
import time
from datetime import datetime

import torch
from areal.api import ModelRequest, RolloutWorkflow, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.utils import name_resolve, names

from inflight.integrations.areal import InflightBackend, InflightEngine


class Draw(RolloutWorkflow):
    """One answer to a prompt."""

    async def arun_episode(self, engine, data):
        sampling = GenerationHyperparameters(max_new_tokens=400, max_tokens=512, greedy=True, ignore_eos=True)
        answer = await engine.agenerate(ModelRequest(input_ids=data["prompt"], gconfig=sampling))
        told = {"token_ids": answer.output_tokens, "versions": answer.output_versions}
        print(json.dumps(told | {"logprobs": answer.output_logprobs, "stop_reason": answer.stop_reason}), flush=True)
        ids = torch.tensor([answer.input_tokens + answer.output_tokens])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def main(address: str, directory: str, *checkpoints: str) -> None:
    name_resolve.reconfigure(NameResolveConfig(nfs_record_root=directory))
    config = InferenceEngineConfig(
        experiment_name="inflight",
        trial_name="test",
        fileroot=directory,
        backend="vllm:d1",
        max_concurrent_rollouts=64,
        consumer_batch_size=8,
        max_head_offpolicyness=64,
        pause_grace_period=0.0,
        request_timeout=60.0,
    )
    engine = InflightEngine(config)
    engine.initialize(addr=[address], train_data_parallel_size=1)
    for _ in range(64):
        engine.submit({"prompt": [5, 6]}, workflow=Draw())
    for version, path in enumerate(checkpoints, 1):
        update(engine, config, version, path)
    engine.wait(64, timeout=120)
    engine.submit({"prompt": [5, 6]}, workflow=Draw())
    engine.wait(1, timeout=120)
    engine.destroy()
    tell_of_adapters(InflightBackend())
    backend, meta = InflightBackend(), WeightUpdateMeta(type="xccl")
    for refused in (
        lambda: backend.build_distributed_weight_update_requests(meta, []),
        lambda: backend.build_init_weights_group_request(address, 0, meta),
        lambda: backend.build_generation_request(ModelRequest(vision_msg_vllm=[[]]), False, 0),
        lambda: engine.launch_server({}),
    ):
        try:
            refused()
        except NotImplementedError as error:
            print(json.dumps({"refused": str(error)}), flush=True)


def tell_of_adapters(backend: InflightBackend) -> None:
    """The requests with LoRA: the model that draws before and after the first update, and that update."""
    request = ModelRequest(input_ids=[5], gconfig=GenerationHyperparameters(lora_name="lora"))
    models = [backend.build_generation_request(request, True, version).payload.get("model") for version in (0, 1, 2)]
    meta = WeightUpdateMeta(type="disk", path="/weights", use_lora=True, lora_name="lora", version=2)
    [loading] = backend.build_disk_weight_update_requests(meta).requests
    print(json.dumps({"models": models, "endpoint": loading.endpoint, "payload": loading.payload}), flush=True)


def update(engine: InflightEngine, config: InferenceEngineConfig, version: int, path: str) -> None:
    """What AReaL's trainers do for an update from a directory."""
    meta = WeightUpdateMeta(type="disk", path=path, clear_checkpoint_after_load=False, version=version)
    engine.pause()
    engine.pause_generation()
    loading = engine.update_weights_from_disk(meta)
    record = names.update_weights_from_disk(config.experiment_name, config.trial_name, engine.get_version())
    name_resolve.add(record, str(datetime.now().timestamp()), keepalive_ttl=120)
    loading.result(timeout=120)
    engine.continue_generation()
    engine.set_version(version)
    engine.resume()
    time.sleep(0.05)


if __name__ == "__main__":  # AReaL's pool of processes imports this file
    main(*sys.argv[1:])
