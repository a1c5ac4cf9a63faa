"""A trainer that is no Ray program: python ray_trainer.py ADDRESS MODEL

It has an engine placed, prints a list of its process id, and trains until it is killed.
"""

import json
import sys

from truth_load import Load

import inflight
from inflight.core.options import EngineOptions
from inflight.fleet.process.ray import RayPlacement

address, model = sys.argv[1:]
options = EngineOptions(model, device="cpu", dtype="float32", threads=1, max_sequences=6, max_context=256)
placement = RayPlacement(resources={"left": 1}, address=address, allow_unencrypted=True)
engine = inflight.Engine(options, placement)
load = Load(engine, seed=1, groups=6, publish_every_s=0.1)
while load.judge.verdict.rollouts < 10:
    load.check()
print(json.dumps([member.pid for member in engine.members]), flush=True)
while True:
    load.check()
