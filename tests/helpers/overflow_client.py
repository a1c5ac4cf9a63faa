"""Check that verifiers and prime-rl recognise a server's limits. Arguments: URL MODEL. It runs in `.venv-clients`.

Sends several requests that are too long, and one that is invalid for another reason. Prints a line of JSON for each."""

import asyncio
import json
import sys
from types import ModuleType

from httpx import AsyncClient
from openai import APIStatusError, AsyncOpenAI
from renderers.client import _resolve_max_prompt_len
from verifiers.v1.errors import model_error
from verifiers.v1.harnesses.utils.compaction import discover_threshold, is_context_overflow

LONG = "word " * 400


async def main(url: str, model: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    said = [{"role": "user", "content": LONG}]
    asked = {
        "chat": client.chat.completions.create(model=model, messages=said),
        "stream": client.chat.completions.create(model=model, messages=said, stream=True),
        "completion": client.completions.create(model=model, prompt=LONG),
        "token ids": client.completions.create(model=model, prompt=[5] * 5000),
        "body": client.completions.create(model=model, prompt="word " * 200_000),
        "not too long": client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], temperature=-1
        ),
    }
    for name, answer in asked.items():
        try:
            print(json.dumps({"asked": name, "overflow": None, "answer": str(await answer)}))
        except APIStatusError as error:
            status = model_error(error).status_code
            print(json.dumps({"asked": name, "overflow": is_context_overflow(error), "status": status}))
    print(
        json.dumps(
            {
                "asked": "limits",
                "threshold": await discover_threshold(client, model),
                "max_prompt_len": await _resolve_max_prompt_len(client, model),
                "max_model_len": await prime_rl_limit(url),
            }
        )
    )
    await client.close()


async def prime_rl_limit(url: str) -> int | None:
    sys.modules["wandb"] = ModuleType("wandb")  # prime-rl's metrics import it; nothing is logged here
    from prime_rl.orchestrator.inference_metrics import InferenceMetricsCollector

    async with AsyncClient(base_url=url) as admin:
        collector = InferenceMetricsCollector([admin], log_to_wandb=False)
        [endpoint] = collector.endpoints
        await collector.fetch_max_model_len(endpoint)
        return collector.max_model_len_by_endpoint.get(endpoint.key)


asyncio.run(main(*sys.argv[1:]))
