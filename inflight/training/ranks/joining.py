"""The beginning of `grpo` on several ranks: finds the ranks, and refuses what does not work on several."""

import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from inflight.core.errors import InflightError
from inflight.training.config import GRPOConfig
from inflight.training.critic import Critic
from inflight.training.objective.objective import resolve
from inflight.training.ranks.group import RankGroup, naming_lost_ranks
from inflight.weights.trainer.sources import classify


def join_ranks(engine: Any) -> RankGroup | None:
    """Return the ranks that share this engine; None if this process trains alone. A collective call. Raises
    InflightError on a rank whose engine is not shared, and RankLostError if a rank has ended or does not call this
    within `rank_timeout_s` seconds."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if dist.is_available() and dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
    if not size.isdigit() or int(size) < 2:
        return None
    stream = engine.stream
    is_shared = hasattr(stream, "receive") or getattr(stream, "sharing", None) is not None
    if not is_shared or not dist.is_initialized():
        raise InflightError(
            f"this is rank {rank} of {size}, and its engine is not shared by the ranks: call "
            "torch.distributed.init_process_group(), and then inflight.launch on every rank "
            "(docs/training.md, Several ranks)"
        )
    # A process group waits long for a rank that does not call this. The stream names the rank sooner. Only a rank that
    # runs grpo takes the second message.
    if hasattr(stream, "receive"):
        for _ in range(2):
            what, _ = stream.receive() or ("the end of its batches", b"")
            if what != "join":
                raise InflightError(
                    f"rank 0 sends {what}, and rank {rank} runs grpo: every rank runs the same training loop"
                )
        check = stream.check
    else:
        for _ in range(2):
            stream.sharing.send("join", b"")
        stream.sharing.settle()
        check = stream.sharing.check
    with naming_lost_ranks(check):
        return RankGroup(check)


def check_supported(model: nn.Module, config: GRPOConfig) -> None:
    """Raise InflightError for a model, or for options, that do not work on several ranks."""
    kind = classify(model).kind
    if kind == "zero" or any(type(module).__name__ == "DeepSpeedEngine" for module in model.modules()):
        raise InflightError(
            "DeepSpeed's engine keeps gradients to itself until its own step(), and grpo adds up, clips and checks "
            "them: write the loop over engine.stream.batches (examples/deepspeed_zero3.py), or shard the model by FSDP2"
        )
    if not _is_only_data_parallel(model):
        raise InflightError(
            "every rank trains on other groups, and parameters of this model are spread by FullyShardedDataParallel or "
            "tensor parallelism: shard the model by FSDP2 (torch.distributed.fsdp.fully_shard) over all ranks"
        )
    if kind == "fsdp" and config.probe_every:
        raise InflightError(
            f"probe_every={config.probe_every} computes earlier versions of the whole model on rank 0, and no rank has "
            "a whole model that FSDP2 shards: set probe_every=0"
        )
    if resolve(config.objective).ranks_tokens:
        raise InflightError(
            "the objective has a part that ranks the tokens of a batch, and each rank has only its share: "
            "take another objective, or train on one rank"
        )
    critic = config.advantages
    if isinstance(critic, Critic) and (
        any(isinstance(module, DistributedDataParallel) for module in critic.module.modules())
        or any(isinstance(parameter, DTensor) for parameter in critic.module.parameters())
    ):
        raise InflightError(
            "the critic's module is spread over ranks by DistributedDataParallel or FSDP2, and rank 0 computes and "
            "trains the critic alone: give a plain module"
        )


def _is_only_data_parallel(model: nn.Module) -> bool:
    """Return whether each rank holds the parameters whole, or FSDP2 shards them over all ranks in one dimension."""
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        return False
    spread = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return not spread or (
        any(isinstance(module, FSDPModule) for module in modules)
        and all(p.device_mesh.size() == dist.get_world_size() for p in spread)
        and all(sum(not place.is_replicate() for place in p.placements) < 2 for p in spread)
    )
