"""On-policy distillation: a student learns from a teacher's probabilities at the tokens that the student draws itself.

    python examples/distillation.py [TOP_K]

The teacher is a tiny model that has seen answers of random digits. The student begins with random weights. TOP_K
(default 16) of the teacher's likeliest tokens are compared; 0: only the drawn token. The reward is only measured.
"""

import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import inflight
from inflight.engine.model.shapes import shape_config


def reward(rollout: inflight.Rollout) -> float:
    return sum(char.isdigit() for char in rollout.text) / max(1, len(rollout.text))


def nothing(groups: Sequence[Sequence[inflight.Rollout]]) -> list[float]:
    """Advantages of 0. Leave `advantages` out to train on rewards and teacher together."""
    return [0.0 for group in groups for _ in group]


def make_teacher(steps: int = 60) -> PreTrainedModel:
    teacher = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for _ in range(steps):
        prompts = torch.tensor([list(f"Number {i}: ".encode()) for i in torch.randint(100, 400, (32,)).tolist()])
        ids = torch.cat([prompts, torch.randint(ord("0"), ord("9") + 1, (32, 16))], 1)
        teacher(input_ids=ids, labels=ids).loss.backward()
        inflight.clip_and_step(optimizer)
    return teacher


def main(top_k: int = 16) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the generator uses the other half of the cores
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    objective = inflight.Objective(teacher_weight=1.0, teacher_top_k=top_k)
    sampling = inflight.SamplingParams(n=2, max_tokens=16)
    config = inflight.GRPOConfig(steps=40, sampling=sampling, objective=objective, advantages=nothing)
    prompts = (f"Number {i % 300 + 100}: " for i in range(4000))
    with inflight.launch("tiny", threads=torch.get_num_threads()) as engine, engine.publisher(student) as publisher:
        teacher = make_teacher()  # or an engine, or "http://host:8000" of a vLLM server
        found = []
        for report in inflight.grpo(engine, publisher, student, optimizer, prompts, reward, config, teacher=teacher):
            found.append((report.reward, report.as_dict()["teacher_kl"]))
            if report.step % 10 == 0:
                print(f"step {report.step}  reward {found[-1][0]:.3f}  KL from the teacher {found[-1][1]:.3f}")
    print(f"KL from the teacher before {found[0][1]:.3f}, after {found[-1][1]:.3f}")
    print(f"reward before {found[0][0]:.3f}, after {found[-1][0]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
