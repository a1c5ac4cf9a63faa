"""A rank of a run that is saved or continues: python resumed_ranks.py RANK SIZE STORE DIRECTORY (begin | resume | fail)

It prints the ids of the groups that it trained on, its number of the weights' version, and a random number. A trainer
that begins ends without saying a word to anybody, as if it had been killed. One that fails prints the errors of saving
and loading.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import inflight
from inflight.core.errors import RunFileError
from inflight.core.sampling import SamplingParams
from inflight.tools.demo.trainer import load_trainer

rank, size, store, directory, verb = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
torch.manual_seed(0)
model = load_trainer("tiny", torch.device("cpu"))
fully_shard(model)
torch.manual_seed(rank if verb == "begin" else 100)
taken: list[int] = []
with inflight.launch("tiny", device="cpu", dtype="float32", threads=1, max_sequences=4) as engine:
    publisher = engine.publisher(model)
    run = inflight.Run(engine, publisher)
    if verb == "resume":
        run.load(directory)
    elif verb == "fail":
        errors = []
        for call in (run.save, run.load):
            try:
                call(directory)
            except RunFileError as error:
                errors.append(str(error))
        print(json.dumps(errors), flush=True)
    else:
        engine.submit([[rank, i + 1] for i in range(6)], SamplingParams(n=2, max_tokens=20, ignore_eos=True))
        dist.barrier()
    batches = engine.stream.batches(rollouts=8, score=lambda rollout: float(rollout.sample))
    for batch in () if verb == "fail" else batches:
        taken += sorted({rollout.group_id for rollout in batch.rollouts})
        publisher.publish()
        if verb == "begin":
            run.progress["taken"] = taken
            run.save(directory)
            break
    if verb != "fail":
        print(json.dumps([run.progress["taken"], taken, publisher.version, float(torch.rand(()))]), flush=True)
    dist.barrier()
    if verb == "begin":
        os._exit(0)
    publisher.close()
dist.destroy_process_group()
