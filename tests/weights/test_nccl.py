"""Ranks of a broadcast over a stand-in for NCCL: if one is lost or late, the others receive an error in time."""

import os
import signal
import subprocess
import sys
import time

import nccl_trainer
import pytest
import torch

from inflight.core.errors import BroadcastError
from inflight.weights import nccl
from inflight.weights.transports.broadcast import BroadcastGroup, Join, make_store

CPU = torch.device("cpu")
TIMEOUT_S = 2.0
RANK = """
import sys, time, torch
from inflight.core.errors import BroadcastError
from inflight.weights.transports.broadcast import BroadcastGroup, Join
port, rank, size, num_bytes = map(int, sys.argv[1:5])
pause_s = float(sys.argv[5])
group = BroadcastGroup(Join("g", "nccl", "127.0.0.1", port, rank, size, 120.0), torch.device("cpu"))
group._ranks._timeout_s = 2.0
whole, calls = group._ranks._library.broadcast, 0
def slow(*arguments):
    global calls
    whole(*arguments)
    calls += 1
    print("bucket", calls, flush=True)
    time.sleep(pause_s)
group._ranks._library.broadcast = slow
buffer = torch.zeros(num_bytes, dtype=torch.uint8)
try:
    group.broadcast(buffer, num_bytes // 8)
    print("got", int(buffer.long().sum()), flush=True)
except BroadcastError as error:
    print("lost", error, flush=True)
"""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """A function that starts the ranks 1 to `size` - 1 in processes, and returns them with rank 0's group."""
    monkeypatch.setenv(nccl.VARIABLE, nccl_trainer.build(tmp_path))
    started = []

    def start(size=3, num_bytes=1 << 16, pause_s=0.0):
        store = make_store("127.0.0.1", TIMEOUT_S)
        for rank in range(1, size):
            arguments = map(str, (store.port, rank, size, num_bytes, pause_s))
            started.append(
                subprocess.Popen([sys.executable, "-c", RANK, *arguments], stdout=subprocess.PIPE, text=True)
            )
        join = Join("g", "nccl", "127.0.0.1", store.port, 0, size, 120.0)
        return BroadcastGroup(join, CPU, store), started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def last_line(process):
    return process.communicate(timeout=120)[0].splitlines()[-1]


@pytest.mark.medium
def test_every_rank_gets_what_rank_0_has(ranks):
    group, others = ranks(num_bytes=1000)
    sent = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    group.broadcast(sent, 125)
    assert [last_line(process) for process in others] == [f"got {int(sent.long().sum())}"] * 2
    group.close()


@pytest.mark.medium
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_rank_that_is_lost_in_a_broadcast_ends_it_for_all(ranks, how):
    """The buckets are larger than the buffers of sockets."""
    group, (victim, other) = ranks(num_bytes=1 << 27, pause_s=0.2)
    group._ranks._timeout_s = TIMEOUT_S
    began = time.monotonic()
    half = torch.ones(1 << 26, dtype=torch.uint8)
    group.broadcast(half, 1 << 24)
    os.kill(victim.pid, how)
    with pytest.raises(BroadcastError, match="the broadcast broke off"):
        group.broadcast(half, 1 << 24)
    assert time.monotonic() - began < 60
    assert last_line(other).startswith("lost the broadcast broke off")
    with pytest.raises(BroadcastError, match="join it again"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8), 8)


@pytest.mark.medium
def test_when_rank_0_leaves_the_others_are_not_held(ranks):
    group, others = ranks(size=2, num_bytes=1 << 16)
    group.broadcast(torch.ones(1 << 15, dtype=torch.uint8), 1 << 13)
    group.close()
    assert all(last_line(process).startswith("lost the broadcast broke off") for process in others)


@pytest.mark.medium
def test_the_bound_is_of_each_bucket(ranks):
    group, others = ranks(size=2, num_bytes=1 << 26, pause_s=0.5)
    group._ranks._timeout_s = TIMEOUT_S
    began = time.monotonic()
    group.broadcast(torch.ones(1 << 26, dtype=torch.uint8), 1 << 23)
    assert time.monotonic() - began > TIMEOUT_S, "the whole broadcast takes longer than the bound"
    assert [last_line(process) for process in others] == [f"got {1 << 26}"]
    group.close()


def test_ranks_that_do_not_come_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv(nccl.VARIABLE, nccl_trainer.build(tmp_path))
    store = make_store("127.0.0.1", 1.0)
    for rank, reason in ((0, "the group was not complete within 1 s"), (1, "")):
        name = f"g{rank}"
        with pytest.raises(BroadcastError, match=f"rank {rank} of 2 found no group: .*{reason}"):
            BroadcastGroup(Join(name, "nccl", "127.0.0.1", store.port, rank, 2, 1.0), CPU, store if rank == 0 else None)


def test_without_the_library_the_reason_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(nccl.VARIABLE, str(tmp_path / "nothing.so"))
    store = make_store("127.0.0.1", 1.0)
    with pytest.raises(BroadcastError, match="found no group: NCCL cannot be loaded"):
        BroadcastGroup(Join("g", "nccl", "127.0.0.1", store.port, 0, 2, 1.0), CPU, store)
