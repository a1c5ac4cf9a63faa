"""Two policies that train each other: a proposer and a solver, LoRA adapters in one engine.

    python examples/two_policies.py [--steps 80] [--seed 0]

In each episode the proposer writes a text, and the solver continues it four times. The solver is rewarded for
lower-case letters, and the proposer for upper-case letters and for the rewards of the solver after its text. Each
policy has its own token sequences, rewards and clock: the solver takes a step on each batch, the proposer on every two,
and each is published after its own steps. The program takes two minutes on two CPU cores.
"""

import argparse
import tempfile
from collections.abc import Iterator
from statistics import fmean

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config

BATCHES_PER_STEP = {"proposer": 2, "solver": 1}


def share(token_ids: list[int], first: str, last: str) -> float:
    """Return the share of the tokens that are bytes in a range."""
    return sum(ord(first) <= token <= ord(last) for token in token_ids) / max(1, len(token_ids))


async def rollout(session: inflight.Session, row: list[int]) -> None:
    """Play one episode: a proposal, and four solutions of it."""
    proposal = await session.complete(row, adapter="proposer")
    solved = []
    for _ in range(4):
        solution = await session.complete([*row, *proposal.token_ids, ord("=")], adapter="solver")
        solved.append(share(solution.token_ids, "a", "z"))
        session.reward(solved[-1] / 4, solution)
    session.reward(share(proposal.token_ids, "A", "Z") / 2 + fmean(solved) / 2, proposal)


def rows() -> Iterator[list[int]]:
    number = 0
    while True:
        yield list(f"Ask {number % 50}: ".encode())
        number += 1


def add_gradient(model: PeftModel, parameters: dict[str, list], policy: str, part: inflight.PackedBatch) -> float:
    """Add the gradient of a policy's own tokens. Returns the effective sample size."""
    model.set_adapter(policy)
    for name, own in parameters.items():
        for parameter in own:
            parameter.requires_grad_(name == policy)
    loss, stats = inflight.policy_loss(model, part)
    loss.backward()
    return stats.ess


def main(steps: int, seed: int) -> None:
    threads = max(1, torch.get_num_threads() // 2)  # the generator uses the other half of the cores
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    with torch.no_grad():  # With small random embeddings, adapters could hardly change the probabilities.
        base.get_input_embeddings().weight.mul_(3)
    with tempfile.TemporaryDirectory() as directory:
        base.save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)
        projections = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=8, lora_alpha=32, target_modules=projections)
        model = get_peft_model(base, config, adapter_name="proposer")
        model.add_adapter("solver", config)
        policies = tuple(BATCHES_PER_STEP)
        parameters = {
            policy: [p for name, p in model.named_parameters() if f".{policy}." in name] for policy in policies
        }
        optimizers = {policy: torch.optim.AdamW(own, lr=2e-2) for policy, own in parameters.items()}
        options = {"threads": threads, "lora_rank": 8, "adapters": policies, "max_context": 64}
        with inflight.launch(directory, **options) as engine, inflight.Episodes(engine, rollout) as episodes:
            publisher = engine.publisher(model)
            engine.wait_for_version(publisher.publish())
            batches = engine.stream.batches(
                rollouts=4 * 8 * 5,
                prompts=rows(),
                params=inflight.SamplingParams(n=8, max_tokens=8),
                episodes=episodes,
                advantages=inflight.turn_advantages("grpo", discount=0.0),
            )
            rewards: dict[str, list[float]] = {policy: [] for policy in policies}
            for step, batch in enumerate(batches, 1):
                for policy, part in batch.by_adapter().items():
                    assert policy is not None
                    own = [sum(turn.reward or 0.0 for turn in each.turns) for each in part.rollouts]
                    rewards[policy].append(sum(own) / (4 * 8))
                    ess = add_gradient(model, parameters, policy, part)
                    if step % BATCHES_PER_STEP[policy] == 0:
                        inflight.clip_and_step(optimizers[policy])
                        publisher.publish(adapter=policy)
                    if step % 5 == 0:
                        lag = part.version_lags[part.drawn].double().mean()  # in versions of this policy
                        print(f"step {step}  {policy}: reward {rewards[policy][-1]:.3f}  ESS {ess:.3f}  lag {lag:.2f}")
                if step == steps:
                    break
            for policy, values in rewards.items():
                print(f"{policy}: reward before {values[0]:.3f}, after {fmean(values[-5:]):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(chosen.steps, chosen.seed)
