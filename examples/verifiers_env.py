"""GRPO over an environment of verifiers whose answers should be digits.

    python examples/verifiers_env.py [--seed 0]

The file is also the package of the environment. The program needs the extra `verifiers`, and takes
three to four minutes.
"""

import argparse
import itertools
import tempfile
from statistics import fmean

import httpx  # pyright: ignore[reportMissingImports]
import openai
import torch
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config
from inflight.episodes.verifiers import verifiers_rollout

__all__ = ["Chat", "Digits"]
HTTP = httpx.AsyncClient(timeout=600)


class DigitTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def digits(self, trace) -> float:
        return sum(letter.isdigit() for letter in trace.last_reply) / max(1, len(trace.last_reply))


class Digits(vf.Taskset[DigitTask, vf.TasksetConfig]):
    def load(self):
        data = [vf.TaskData(prompt=f"Digits, {number}") for number in range(64)]  # pyright: ignore[reportCallIssue]
        return [DigitTask(each, self.config.task) for each in data]


class Chat(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=HTTP)
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": data.prompt}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    fields = {"taskset": {"id": "verifiers_env"}, "agent": {"runtime": {"type": "subprocess"}}}
    env = vf.load_environment(vf.resolve_env_config(fields))
    rows = itertools.cycle([task.data.model_dump(mode="json") for task in env.taskset])
    model, tokenizer = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32), byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = inflight.GRPOConfig(steps=25, groups_per_step=8, sampling=inflight.SamplingParams(n=8, max_tokens=16))
    rewards = []
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        with inflight.launch(path) as engine, inflight.Episodes(engine, verifiers_rollout(env)) as episodes:
            for report in inflight.grpo(episodes, engine.publisher(model), model, optimizer, rows, None, config):
                rewards.append(report.reward)
                print(f"step {report.step}  reward {report.reward:.3f}  {dict(report.failures)}")
    print(f"reward before {rewards[0]:.3f}, after {fmean(rewards[-5:]):.3f}")
