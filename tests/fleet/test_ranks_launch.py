"""Ranks find each other by their process group, and average to the gradient of one."""

import json
import logging
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from inflight.core.errors import InvalidRequestError, ModelLoadError, RankLostError
from inflight.core.options import EngineOptions
from inflight.fleet.ranks.attached import AttachedEngine
from inflight.fleet.ranks.sharing import RankSharing, announce
from inflight.fleet.ranks.store import RankStore, store_of_trainer


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.long)])
def test_the_average_gradient_of_the_ranks_is_that_of_one(tmp_path, size):
    outputs = run_ranks("shared_gradient.py", size, tmp_path / "store")
    assert outputs == ["the gradients are those of one rank\n"] * size


class Engine:
    """Stands in for one that was launched."""

    closed = False

    def close(self) -> None:
        self.closed = True


OPTIONS = EngineOptions("tiny", timeout_s=0.2, rank_timeout_s=0.2)


def fail():
    raise ModelLoadError("there is no such model")


def test_what_keeps_rank_0_from_launching_is_raised_by_all():
    store = dist.HashStore()
    with pytest.raises(ModelLoadError):
        announce(RankStore(0, 2, store, 1), fail, id)
    with pytest.raises(ModelLoadError, match="there is no such model"):
        AttachedEngine(RankStore(1, 2, store, 1), OPTIONS)


def test_an_engine_that_cannot_be_announced_does_not_go_on():
    engine, store = Engine(), dist.HashStore()

    def share(_: Engine) -> None:
        raise RankLostError("broken pipe")

    with pytest.raises(RankLostError, match="broken pipe"):
        announce(RankStore(0, 2, store, 1), lambda: engine, share)
    assert engine.closed
    with pytest.raises(RankLostError, match="broken pipe"):
        AttachedEngine(RankStore(1, 2, store, 1), OPTIONS)


def test_another_launch_than_rank_0s_is_refused():
    store = dist.HashStore()
    sharing = RankSharing(RankStore(0, 2, store, 1), EngineOptions("small"), lambda prompts: [])
    with pytest.raises(InvalidRequestError, match="rank 1 launches 'tiny' where rank 0 launched 'small'"):
        AttachedEngine(RankStore(1, 2, store, 1), OPTIONS)
    sharing.close()


def test_a_launch_that_rank_0_never_makes_is_waited_for_within_a_bound():
    with pytest.raises(RankLostError, match=r"rank 0 has launched no engine within 0\.4 s"):
        AttachedEngine(RankStore(1, 2, dist.HashStore(), 1), OPTIONS)


def test_torchrun_without_a_process_group_is_told(monkeypatch, caplog):
    assert store_of_trainer(1.0) is None
    assert not caplog.records
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING):
        assert store_of_trainer(1.0) is None
    assert "before torch.distributed.init_process_group()" in caplog.text


@pytest.mark.slow
def test_ranks_that_were_killed_go_on(tmp_path):
    """Every group comes once, ranks agree on the version, and each has its own random numbers again."""
    began, resumed = (run_or_resume(verb, tmp_path) for verb in ("begin", "resume"))
    for (before, again, version, number), (known, rest, later_version, other_number) in zip(
        began, resumed, strict=True
    ):
        assert (before, version) == (again, 1)
        assert known == before
        assert later_version == 1 + 2  # two more batches
        assert set(before).isdisjoint(rest)
        assert number == other_number
    assert began[0][3] != began[1][3]
    trained_on = [group for before, *_ in began for group in before] + [
        group for _, rest, *_ in resumed for group in rest
    ]
    assert sorted(trained_on) == [*range(12)]
    assert sorted(path.name for path in (tmp_path / "run").glob("*.inflight")) == ["run-rank1.inflight", "run.inflight"]


@pytest.mark.slow
def test_a_rank_that_cannot_save_or_load_its_part_fails_on_all_ranks(tmp_path):
    (tmp_path / "run" / "run-rank1.inflight").mkdir(parents=True)  # no file can replace a directory
    of_first, of_second = run_or_resume("fail", tmp_path)
    assert len(of_second) == 2
    assert of_first == [f"rank 1: {error}" for error in of_second]


def run_or_resume(verb: str, directory: Path) -> list:
    """What each of two ranks printed."""
    (directory / "run").mkdir(exist_ok=True)
    outputs = run_ranks("resumed_ranks.py", 2, directory / f"store-{verb}", directory / "run", verb)
    return [json.loads(output.splitlines()[-1]) for output in outputs]
