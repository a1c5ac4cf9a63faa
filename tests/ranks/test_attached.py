"""A rank attaches to a real engine, submits to it and takes its shares of batches."""

import os
import signal
import threading

import pytest
from waiting import wait_until

import inflight
from inflight.core.errors import RankLostError
from inflight.ranks.attached import AttachedEngine

PARAMS = inflight.SamplingParams(n=4, max_tokens=8, ignore_eos=True)


@pytest.mark.slow
def test_prompts_of_a_rank_are_in_the_batches_that_all_share():
    with inflight.launch("tiny", device="cpu", threads=1, restarts=1) as engine:
        attached = AttachedEngine(engine._share(2).own_address, 1)
        assert attached.status().version == 0
        [theirs] = attached.submit(["from elsewhere"], PARAMS, metadata=[{"who": "attached"}])
        [ours] = engine.submit(["from here"], PARAMS)
        seen = []
        looking = threading.Thread(target=lambda: seen.extend(attached.stream.batches()), daemon=True)
        looking.start()
        wait_until(lambda: engine._rank_server._asking)
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
        attached.wait_for_version(0)
        with pytest.raises(TimeoutError, match="version 1 did not go live"):
            attached.wait_for_version(1, timeout_s=0.1)
    with pytest.raises(RankLostError, match="rank 0 has closed its engine"):
        attached.status()
    attached.close()
