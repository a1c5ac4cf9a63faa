"""Every token is stamped with the version that drew it, whatever publishers do."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from truth_teller import make_truth_teller

import inflight
from inflight.core.rollout import Rollout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""The slots lie in shared memory, or in device memory shared by CUDA IPC."""
SLOTS = [pytest.param(1, marks=pytest.mark.slow), 2]
NUM_VERSIONS = {"cpu": 150, "cuda": 3000}
NUM_KILLS = {"cpu": 12, "cuda": 6}  # each creates a CUDA context
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@pytest.fixture(scope="module")
def truth_teller_dir(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("truth-teller")
    make_truth_teller().save_pretrained(directory)
    return str(directory)


def generate_until_done(engine: inflight.Engine, publisher: subprocess.Popen) -> Iterator[Rollout]:
    """Keep the engine under load, requests joining and leaving all the time, until the publisher ends."""
    rng = random.Random(0)

    def submit(count: int) -> None:
        for _ in range(count):
            params = inflight.SamplingParams(max_tokens=rng.randint(1, 60), temperature=0, n=rng.randint(1, 3))
            engine.submit([[rng.randrange(1000)] * rng.randint(1, 20)], params)

    submit(24)
    for group in engine.stream.groups():
        yield from group
        if publisher.poll() is None:
            submit(1)


def start_publisher(engines: list[inflight.Engine], *command: str) -> subprocess.Popen:
    endpoints = ",".join(engine.address.endpoint for engine in engines)
    program = Path(__file__).parents[1] / "helpers" / "truth_teller.py"
    return subprocess.Popen([sys.executable, program, endpoints, *command], stdout=subprocess.PIPE, text=True)


@pytest.mark.medium
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", SLOTS)
def test_truth_teller(truth_teller_dir, slots, device):
    num_versions = NUM_VERSIONS[device]
    seen, num_tokens, spanning = set(), 0, 0
    with inflight.launch(
        truth_teller_dir,
        slots=slots,
        max_sequences=32,
        max_context=128,
        threads=1,
        device=device,
        dtype=DTYPES[device],
    ) as engine:
        if engine.info.attention == "flashinfer":
            assert engine.info.num_graphs > 0
        publisher = start_publisher([engine], "publish", str(num_versions), "1", device, "slots")
        for rollout in generate_until_done(engine, publisher):
            assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()
            seen.update(rollout.weight_versions.tolist())
            num_tokens += len(rollout.token_ids)
            spanning += rollout.weight_versions[0] != rollout.weight_versions[-1]
        status = engine.status()
    assert publisher.wait() == 0
    assert status.version == num_versions
    assert status.num_swaps_in_flight > num_versions // 3
    assert len(seen) > num_versions // 3
    assert spanning > 50
    print(
        f"slots={slots}: {num_tokens} tokens, {status.num_swaps} swaps, {status.num_swaps_in_flight} in flight, "
        f"attention {engine.info.attention}, {engine.info.num_graphs} CUDA graphs"
    )


@pytest.mark.medium
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", SLOTS)
def test_torn_write(truth_teller_dir, slots, device):
    """Publishers die in the middle of a publish, again and again; no token comes from what they left, and life goes
    on."""
    num_kills = NUM_KILLS[device]
    with inflight.launch(
        truth_teller_dir,
        slots=slots,
        max_sequences=16,
        max_context=128,
        threads=1,
        device=device,
        dtype=DTYPES[device],
    ) as engine:
        publisher = start_publisher([engine], "kill", str(num_kills), "2", device, "slots")
        versions = set()
        for rollout in generate_until_done(engine, publisher):
            assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()
            versions.update(rollout.weight_versions.tolist())
        out, _ = publisher.communicate()
        assert publisher.returncode == 0
        report = json.loads(out)
        assert engine.status().version == report["version"]
        [[after]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=4, temperature=0))
        assert set(after.token_ids.tolist()) == {report["version"] + 1}
    assert report["torn"] >= 2, "the kills did not hit a publish in its middle"
    assert len(versions) > num_kills // 2, "few versions were drawn with, although each kill is followed by one"
    print(f"slots={slots}: {report}")


@pytest.mark.parametrize(
    ("transport", "device"),
    [
        pytest.param("slots", "cpu", marks=pytest.mark.slow),
        pytest.param("broadcast", "cpu", marks=pytest.mark.long),
        pytest.param("broadcast+delta", "cpu", marks=pytest.mark.slow),
        pytest.param("files={}+delta", "cpu", marks=pytest.mark.slow),
        pytest.param("broadcast+delta", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_truth_teller_over_every_transport(truth_teller_dir, tmp_path, transport, device):
    """One publisher, two engines, versions that may overtake each other; in each engine every token tells the truth."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                inflight.launch(
                    truth_teller_dir, slots=slots, max_sequences=8, max_context=128, threads=1, device="cpu"
                )
            )
            for slots in (2, 3)
        ]
        publisher = start_publisher(engines, "publish", "80", "1", device, transport.format(tmp_path))
        seen = [set(), set()]
        for versions, engine in zip(seen, engines, strict=True):
            for rollout in generate_until_done(engine, publisher):
                assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()
                versions.update(rollout.weight_versions.tolist())
        assert publisher.wait() == 0
        for engine in engines:
            engine.wait_for_version(80)
            assert engine.status().bad_messages == 0
        assert len(seen[0]) > 15
        print(f"{transport}: {len(seen[0])} versions seen")


@pytest.mark.long
@pytest.mark.parametrize("transport", ["broadcast+delta", "files={}+delta"])
def test_torn_transfer(truth_teller_dir, tmp_path, transport):
    """Publishers die in the middle of a transfer, 8 times; no token comes from what they left, and life goes on."""
    with inflight.launch(truth_teller_dir, max_sequences=8, max_context=128, threads=1, device="cpu") as engine:
        publisher = start_publisher([engine], "kill", "8", "2", "cpu", transport.format(tmp_path))
        for rollout in generate_until_done(engine, publisher):
            assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()
        out, _ = publisher.communicate()
        assert publisher.returncode == 0
        engine.wait_for_version(json.loads(out)["version"])
        status = engine.status()
        print(f"{transport}: {json.loads(out)}, {status.bad_messages} transfers broke off, {status.num_swaps} swaps")
        if transport.startswith("broadcast"):
            assert status.bad_messages == 8, "a kill did not hit a transfer"
