"""verifiers' own training client at a server, in an environment of its own: URL MODEL DIRECTORY. Writes what it
understood of each answer as a line of JSON. DIRECTORY has the model's tokenizer."""

import asyncio
import json
import sys

from renderers import DefaultRendererConfig
from verifiers.v1.clients import TrainClient, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

QUESTIONS = ("Say hello.", "Und nun?", "🙂")


async def main(url: str, model: str, directory: str) -> None:
    config = TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="INFLIGHT_TOKEN",
        renderer=DefaultRendererConfig(),
        renderer_model_name=directory,
    )
    client = TrainClient(config)

    async def ask(seed: int) -> dict:
        body = {"model": model, "messages": [{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}]}
        temperature = 1.0 if seed % 2 else 400.0
        asked = {"max_tokens": 24, "temperature": temperature, "seed": seed, "top_k": 400}
        sampling = SamplingConfig.model_validate(asked)
        response = await client.get_response(ChatDialect(), body, sampling, session_id=f"session-{seed}")
        return {
            "asked": asked,
            "prompt_ids": response.tokens.prompt_ids,
            "completion_ids": response.tokens.completion_ids,
            "logprobs": response.tokens.completion_logprobs,
            "finish_reason": response.finish_reason,
            "content": response.message.content,
        }

    for answer in await asyncio.gather(*map(ask, range(12))):
        print(json.dumps(answer))
    await client.close()


asyncio.run(main(*sys.argv[1:]))
