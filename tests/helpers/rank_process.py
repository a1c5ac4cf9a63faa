"""A rank in a separate process: python rank_process.py STORE RANK SIZE BATCHES

Rank 0 shares batches and makes none. Another rank attaches, takes this many batches, and prints a line for each. Then
it waits to be killed.
"""

import sys
import time

import torch.distributed as dist

from inflight.core.options import EngineOptions
from inflight.fleet.ranks.attached import AttachedEngine
from inflight.fleet.ranks.sharing import RankSharing
from inflight.fleet.ranks.store import RankStore

rank, size, count = map(int, sys.argv[2:])
store, options = RankStore(rank, size, dist.FileStore(sys.argv[1], size), 1), EngineOptions("tiny")
engine = AttachedEngine(store, options) if rank else RankSharing(store, options, lambda prompts: [])
print("attached", flush=True)
for _ in range(count):
    assert isinstance(engine, AttachedEngine)
    next(engine.stream.batches())
    print("took a share", flush=True)
time.sleep(600)
