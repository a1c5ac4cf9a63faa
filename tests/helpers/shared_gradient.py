"""One rank of a trainer on the CPU: python shared_gradient.py RANK SIZE STORE

Rank 0 shares batches. DDP's average of the ranks' gradients is compared with the gradient of a plain model on the whole
batch, in float64; the last batch has fewer groups than there are ranks. Before that every rank launches a
model that does not exist.
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from made_batches import make_rollouts
from tiny_models import make_model
from torch import nn

import inflight
from inflight.core.errors import ModelLoadError
from inflight.core.options import EngineOptions
from inflight.fleet.ranks.attached import AttachedEngine
from inflight.fleet.ranks.sharing import RankSharing
from inflight.fleet.ranks.store import store_of_trainer
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped
from inflight.training.objective.loss import policy_loss


def whole_batches() -> Iterator[PackedBatch]:
    for seed, count in ((0, 10), (1, 7), (2, 2)):
        yield pack(make_rollouts(count, seed), torch.linspace(-1, 1, count).tolist())


def main(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with pytest.raises(ModelLoadError, match="/no/such/model"):
        inflight.launch("/no/such/model")
    shared_store = store_of_trainer(60.0)
    assert shared_store is not None
    if rank == 0:
        shared = RankSharing(shared_store, EngineOptions("tiny"), lambda prompts: [])
        shares = shared.shares(whole_batches(), SimpleNamespace(last_reward=0.0, dropped=Dropped()))
    else:
        shared = AttachedEngine(shared_store, EngineOptions("tiny"))
        shares = shared.stream.batches()
    model = nn.parallel.DistributedDataParallel(make_model("qwen3").double())
    for whole, share in zip(whole_batches(), shares, strict=True):
        plain = make_model("qwen3").double()
        for of_model, batch in ((plain, whole), (model, share)):
            of_model.zero_grad()
            policy_loss(of_model, batch)[0].backward()
        largest = max(float(parameter.grad.abs().max()) for parameter in plain.parameters())
        assert largest > 1e-3
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-6 * largest)
    shared.close()
    print("the gradients are those of one rank", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
