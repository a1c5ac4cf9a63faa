"""A rank attaches to a real engine, submits to it and takes its shares of batches."""

import os
import signal
import threading

import pytest
import torch.distributed as dist
from waiting import wait_until

import inflight
from inflight.core.errors import RankLostError
from inflight.core.options import EngineOptions
from inflight.fleet.ranks.attached import AttachedEngine
from inflight.fleet.ranks.store import RankStore

PARAMS = inflight.SamplingParams(n=4, max_tokens=8, ignore_eos=True)


@pytest.mark.slow
def test_prompts_of_a_rank_are_in_the_batches_that_all_share():
    with inflight.launch("tiny", device="cpu", threads=1, restarts=1) as engine:
        store = dist.HashStore()
        engine._share(RankStore(0, 2, store, 1))
        attached = AttachedEngine(RankStore(1, 2, store, 1), EngineOptions("tiny"))
        [theirs] = attached.submit(["from elsewhere"], PARAMS, metadata=[{"who": "attached"}])
        [ours] = engine.submit(["from here"], PARAMS)
        seen = []
        looking = threading.Thread(target=lambda: seen.extend(attached.stream.batches()), daemon=True)
        looking.start()
        batches = engine.stream.batches(rollouts=8, score=lambda rollout: float(len(rollout.text)))
        own = [next(batches)]
        wait_until(lambda: seen)
        assert next(batches, None) is None
        looking.join(60)
        assert len(own) == len(seen) == 1
        rollouts = [*own[0].rollouts, *seen[0].rollouts]
        assert sorted(rollout.group_id for rollout in rollouts) == sorted([ours] * 4 + [theirs] * 4)
        assert {r.metadata.get("who") for r in rollouts if r.group_id == theirs} == {"attached"}
        assert attached.stream.last_reward == engine.stream.last_reward

        os.kill(engine.pid, signal.SIGKILL)  # its successor serves those who attached
        [again] = attached.submit(["once more"], PARAMS)
        assert [group[0].group_id for group in engine.stream.groups()] == [again]
    with pytest.raises(RankLostError, match="rank 0 has closed its engine"):
        attached.submit(["too late"], PARAMS)
    attached.close()
