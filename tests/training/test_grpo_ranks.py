"""`grpo` on three ranks takes the steps of one rank, and reports the same on each."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bigram_run import Bigram, score_tokens
from rank_cases import CASES, WRAPPED, run_case
from waiting import PATIENCE_S

import inflight
from inflight.core.errors import InflightError
from inflight.training.ranks import joining

PROGRAM = Path(__file__).parents[1] / "helpers" / "grpo_ranks.py"
SIZES = (3,)
RUNS = [(size, name, "plain") for size in SIZES for name in CASES]
RUNS += [(3, name, wrapper) for wrapper in ("ddp", "fsdp2") for name in WRAPPED]
pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """The results of all cases by the number of ranks: of each rank, by case and wrapper."""
    out = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, PROGRAM, out, *map(str, SIZES)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {size: [torch.load(out / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)] for size in SIZES}


@pytest.fixture
def alone(monkeypatch):
    """Runs a case on one rank."""
    for place in ("reference", "step", "objective.probe"):
        monkeypatch.setattr(f"inflight.training.{place}.token_logprobs", lambda *call: score_tokens(*call).logprobs)
    monkeypatch.setattr("inflight.training.teacher.score_tokens", score_tokens)
    return run_case


def without_times(numbers):
    return {name: value for name, value in numbers.items() if not name.startswith(("lead/", "staleness/"))}


def assert_same_steps(run, whole):
    assert len(run["gradients"]) == len(whole["gradients"]) > 0
    torch.testing.assert_close(run["gradients"], whole["gradients"], rtol=0, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(run["table"], whole["table"], rtol=0, atol=1e-12)
    for numbers, expected in zip(run["numbers"], whole["numbers"], strict=True):
        assert without_times(numbers) == pytest.approx(without_times(expected), rel=1e-9, abs=1e-12)
    assert run["groups"] == whole["groups"]
    assert run["lags"] == whole["lags"]


@pytest.mark.parametrize(("size", "name", "wrapper"), RUNS)
def test_the_steps_and_reports_are_those_of_one_rank_and_the_same_on_all(of_ranks, alone, size, name, wrapper):
    ranks = [rank[name, wrapper] for rank in of_ranks[size]]
    assert_same_steps(ranks[0], alone(name))
    for rank in ranks[1:]:
        assert rank["numbers"] == ranks[0]["numbers"]
        assert rank["groups"] == ranks[0]["groups"]
        assert rank["lags"] == ranks[0]["lags"]
        assert torch.equal(rank["table"], ranks[0]["table"])


def test_a_planted_mistake_is_noticed(of_ranks, alone):
    """The gradient of one rank's share, in place of the average."""
    run, whole = of_ranks[3][0]["by token", "plain"], alone("by group")
    with pytest.raises(AssertionError):
        assert_same_steps(run, whole)


def test_only_rank_0_logs(of_ranks):
    for ranks in of_ranks.values():
        logged = [rank["by token", "plain"]["logged"] for rank in ranks]
        assert logged == [[1, 2, 3], *[[]] * (len(ranks) - 1)]


def test_the_cases_are_what_they_claim(of_ranks):
    """Steps are skipped, groups are replaced, ranks have no group, and so on."""
    results = of_ranks[3][0]

    def last(name: str) -> dict[str, float]:
        return results[name, "plain"]["numbers"][-1]

    weights = [numbers["entropy_weight"] for numbers in results["adaptive entropy", "plain"]["numbers"]]
    assert 0 in weights
    assert len(set(weights)) == 3
    assert last("masked")["dropped/num_truncated_rollouts"] > 0
    assert last("rules")["dropped/num_stale_rollouts"] > 0
    assert last("rules")["dropped/num_masked_tokens"] > 0
    assert last("replaced")["dropped/num_replaced_groups"] > 0
    assert last("a KL in the reward")["reward_kl"] != 0
    assert last("a loss that is not finite")["num_skipped"] == 1
    assert last("a gradient that is not finite")["num_skipped"] == 1
    assert len(results["sync", "plain"]["groups"][-1]) == 3
    assert len(results["nothing to learn", "plain"]["gradients"]) == 2
    assert len(results["nothing to learn", "plain"]["numbers"]) == 3
    assert any("probe/total/kl" in numbers for numbers in results["probed", "plain"]["numbers"])
    assert all(len(groups) == 1 for groups in results["one group", "plain"]["groups"])


@pytest.mark.parametrize("size", SIZES)
def test_errors_are_raised_by_all_ranks_and_later_runs_work(of_ranks, size):
    """Each is raised after the one before, by the same processes."""
    errors = [rank["errors"] for rank in of_ranks[size]]
    bad = size - 1
    for rank, of_rank in enumerate(errors):
        where = "" if rank == bad else f"rank {bad}: "
        assert of_rank["weights"].startswith(f"NonFiniteWeightsError: {where}table of 1 parameters hold NaN")
        assert of_rank["other weights"].startswith(f"InflightError: table of rank {bad} differs from rank 0")
        assert f"rank {bad} has micro_batch_tokens=35, and rank 0 has 30" in of_rank["other options"]
        assert "ranks the tokens of a batch" in of_rank["ranked tokens"]
        assert "by FullyShardedDataParallel or tensor parallelism: shard" in of_rank["spread"]
        assert "probe_every=1 computes earlier versions of the whole model" in of_rank["sharded probe"]
    for name, start in [
        ("score", "ScoreError: the judge is ill"),
        ("demonstrations", "InflightError: the demonstrations have ended before the run"),
    ]:
        assert errors[0][name].startswith(start)
        kind = start.split(":")[0]
        for each in errors[1:]:
            assert each[name].startswith(f"{kind}: rank 0 could not finish a step of grpo: {start}")


def test_deepspeed_is_refused():
    class DeepSpeedEngine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Bigram()

    with pytest.raises(InflightError, match=r"DeepSpeed's engine keeps gradients .*examples/deepspeed_zero3.py"):
        joining.check_supported(DeepSpeedEngine(), inflight.GRPOConfig())


def test_the_cases_name_all_options():
    """An option of GRPOConfig without a case is named here with a reason."""
    fields = set(inflight.GRPOConfig.__dataclass_fields__)
    tried = {name for case in CASES.values() for name in case()}
    elsewhere = {
        "steps", "sampling",  # in every case
        "autocast",  # changes nothing on a CPU
        "ahead", "groups_in_flight",  # about the prompts of rank 0 alone
    }  # fmt: skip
    assert fields - tried - elsewhere == set()
