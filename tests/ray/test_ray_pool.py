"""Engines on two nodes of a Ray cluster: a node may be lost, a trainer killed, and nothing else is."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import ray
from peers_python import PEERS_PYTHON
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from waiting import PATIENCE_S, wait_until

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from truth_load import Load, save_model

import inflight
from inflight.core.errors import EngineDiedError, InflightError, ModelLoadError, PlacementError
from inflight.core.options import EngineOptions
from inflight.fleet.process.ray import RayPlacement

PROGRAMS = Path(__file__).parents[1] / "helpers"
LEFT = RayPlacement(resources={"left": 1}, allow_unencrypted=True)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def slots_of(pid: int) -> set[str]:
    """The files in shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[5] for line in lines if "inflight-slot-" in line}


def versions_told(load: Load) -> int:
    """End the load, of which nothing may be wrong or refused. Returns how many versions drew its tokens."""
    load.finish()
    load.check()
    verdict = load.judge.verdict
    assert not any(verdict.faults.values()), verdict
    assert not verdict.refused
    return verdict.distinct_versions


def program(name: str, *arguments: str) -> subprocess.Popen:
    """One of the helpers, as a separate program."""
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, PROGRAMS / name, *arguments], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """A cluster of three raylets: that of this process, which runs no engine, and two that do."""
    before = os.environ.get("PYTHONPATH")
    # Workers take it over. An engine in another interpreter uses the packages of that interpreter.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and "site-packages" not in path)
    system = {"health_check_period_ms": 1000, "worker_niceness": 0}  # its default of 15 starves beside other work
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": system}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=4, resources={"left": 4})
        cluster.right = cluster.add_node(num_cpus=2, resources={"right": 1})
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> EngineOptions:
    """Those of an engine whose tokens proclaim the version of its weights."""
    directory = str(tmp_path_factory.mktemp("truth"))
    save_model(directory)
    return EngineOptions(
        directory, device="cpu", dtype="float32", threads=1, max_sequences=6, max_context=256, restarts=1
    )


def held() -> dict[str, float]:
    """CPUs and the like of the cluster that something holds."""
    free = ray.available_resources()
    return {name: total - free.get(name, 0) for name, total in ray.cluster_resources().items() if name != "memory"}


@pytest.mark.slow
def test_engines_join_leave_and_lose_their_node_while_training_goes_on(cluster, options, caplog):
    right = next(node["NodeID"] for node in ray.nodes() if "right" in node["Resources"])
    anywhere = RayPlacement(
        scheduling_strategy=NodeAffinitySchedulingStrategy(right, soft=True), allow_unencrypted=True
    )
    with inflight.launch([options] * 2, placement=[anywhere, LEFT]) as pool:
        load = Load(pool, seed=1, groups=10, publish_every_s=0.1)
        lost, joined = pool.members[0].process, pool.add(placement=LEFT)
        wait_until(lambda: joined.status().num_tokens > 0)
        assert all(status.num_swaps and status.num_tokens for status in pool.statuses().values())

        cluster.remove_node(cluster.right, allow_graceful=False)  # kills its raylet
        wait_until(lambda: "leaves the fleet" in caplog.text)
        tokens = pool.stream.num_tokens
        wait_until(lambda: pool.stream.num_tokens > tokens + 500)
        wait_until(lambda: len(pool.statuses()) == 3, seconds=400)  # another one was placed where there was room
        assert pool.members[0].process is not lost
        assert not runs(lost.pid)

        pool.remove(joined)
        assert not runs(joined.pid)
        wait_until(lambda: pool.stream.num_tokens > tokens + 2000)
        assert versions_told(load) > 10
        pids = [member.pid for member in pool.members]
    assert len(pids) == 2
    wait_until(lambda: not any(held().values()))
    assert not any(map(runs, pids))


@pytest.mark.peers
def test_engines_of_both_backends_draw_for_one_trainer(cluster, options):
    on_vllm = msgspec.structs.replace(
        options, backend="vllm", backend_python=PEERS_PYTHON, cuda_graphs=False, answer_timeout_s=120.0
    )
    with inflight.launch([options, on_vllm], placement=LEFT) as pool:
        load = Load(pool, seed=1, groups=10, publish_every_s=0.1)
        wait_until(lambda: all(status.num_swaps > 3 and status.num_tokens > 500 for status in pool.statuses().values()))
        assert versions_told(load) > 3


@pytest.mark.long
def test_who_ends_an_engine_that_somebody_ends_waits_for_its_end(cluster, options):
    """As a pool does, beside the thread that sees to the engine."""
    with inflight.launch([options], placement=LEFT) as pool:
        process = pool.members[0].process
        os.kill(process.pid, signal.SIGSTOP)  # so that its end takes seconds
        first = threading.Thread(target=process.close)
        first.start()
        wait_until(process._over.locked)
        process.close()
        assert not runs(process.pid)
        first.join(PATIENCE_S)


class Other:
    """An actor of somebody else's."""

    def is_there(self) -> bool:
        return True


@pytest.mark.ray
def test_what_keeps_ray_from_placing_an_engine_is_said(cluster, options):
    with pytest.raises(PlacementError, match=r"within 1 s: no node of the cluster has 1 CPU and 9 left \(.* 4 left"):
        inflight.launch([options], placement=RayPlacement(resources={"left": 9}, timeout_s=1))
    other = ray.remote(num_cpus=0, resources={"left": 4})(Other).remote()
    assert ray.get(other.is_there.remote(), timeout=60)
    with pytest.raises(PlacementError, match=r"1 of \d nodes have 1 CPU and 1 left, and either something else holds"):
        inflight.launch([options], placement=RayPlacement(resources={"left": 1}, timeout_s=1))
    ray.kill(other)
    with pytest.raises(EngineDiedError, match="Ray has ended the actor"):
        inflight.launch(
            [options], placement=RayPlacement(scheduling_strategy=NodeAffinitySchedulingStrategy("0" * 56, soft=False))
        )
    with pytest.raises(ModelLoadError, match="/no/such/model"):
        inflight.launch([msgspec.structs.replace(options, model="/no/such/model")], placement=RayPlacement())
    wait_until(lambda: not any(held().values()))


@pytest.mark.ray
def test_what_a_pool_is_not_made_of(options):
    with pytest.raises(ValueError, match="one member at least"):
        inflight.launch([], placement=LEFT)
    with pytest.raises(ValueError, match="2 members need one placement, or 2, got 3"):
        inflight.launch([options] * 2, placement=[LEFT] * 3)
    with pytest.raises(ValueError, match="listen and keys cannot be chosen"):
        inflight.launch(msgspec.structs.replace(options, listen="tcp://127.0.0.1:*", keys="keys"), placement=LEFT)


@pytest.mark.ray
def test_a_trainer_that_is_no_ray_program_is_killed_and_leaves_nothing(cluster, options):
    with program("ray_trainer.py", cluster.address, options.model) as trainer:
        try:
            assert trainer.stdout is not None
            engines = json.loads(trainer.stdout.readline())
            slots = {path for pid in engines for path in slots_of(pid)}
            assert len(slots) >= 1
            assert held()["left"] == 1
        finally:
            trainer.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(runs, engines)))
    wait_until(lambda: not any(held().values()))
    assert not any(map(os.path.exists, slots))


@pytest.mark.ray
def test_every_rank_under_ray_train_takes_its_share(cluster, options):
    with program("ray_train_ranks.py", cluster.address, options.model) as trainer:
        output, _ = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == 0
    shares = json.loads(output.splitlines()[-1])
    assert [share["rank"] for share in shares] == [0, 1]
    groups = [set(share["groups"]) for share in shares]
    assert groups[0]
    assert groups[1]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == set(range(8))
    assert all(share["version"] == 2 for share in shares)
    wait_until(lambda: not any(held().values()))


@pytest.mark.ray
def test_ray_has_to_be_initialised_and_may_end_before_the_pool(cluster, options):
    with inflight.launch([options], placement=RayPlacement()) as pool:
        [engine] = pool.members
        ray.shutdown()
    assert not ray.is_initialized()
    wait_until(lambda: not runs(engine.pid))
    with pytest.raises(InflightError, match=r"call ray\.init\(\) first, or name the cluster"):
        inflight.launch([options], placement=RayPlacement())
