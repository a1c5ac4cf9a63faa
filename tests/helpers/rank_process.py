"""A rank in a process of its own: python rank_process.py CARD RANK [BATCHES]

It attaches, takes so many batches (one, if it is not said), prints a line for each, and then waits to be killed.
"""

import sys
import time

import msgspec

from inflight.ranks.attached import AttachedEngine
from inflight.ranks.meeting import RankAddress

address = msgspec.json.decode(sys.argv[1].encode(), type=RankAddress)
engine = AttachedEngine(address, int(sys.argv[2]))
print("attached", flush=True)
batches = engine.stream.batches()
for _ in range(int(sys.argv[3])):
    next(batches)
    print("took a share", flush=True)
time.sleep(600)
