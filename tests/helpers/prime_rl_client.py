"""prime-rl's own client of an inference server, in an environment of its own: URL DIRECTORY WEIGHTS ADAPTER. Waits for
the server, draws answers with the training client that prime-rl's configuration makes, publishes WEIGHTS as step 1,
draws the same again, and then with ADAPTER. DIRECTORY is the model's name, and has its tokenizer. Writes what it
understood of each answer as a line of JSON."""

import asyncio
import json
import sys
from pathlib import Path

from prime_rl.configs.shared import ClientConfig
from prime_rl.utils.client import InferencePool, load_lora_adapter, unload_lora_adapter
from renderers import DefaultRendererConfig
from verifiers.v1.clients import TrainClient
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

QUESTIONS = ("Say hello.", "Und nun?", "🙂")


async def main(url: str, model: str, weights: str, adapter: str) -> None:
    config = ClientConfig(base_url=f"{url}/v1", admin_base_url=[url], wait_for_ready_timeout=60)
    pool = InferencePool(config, model, train_client_type="renderer", renderer_config=DefaultRendererConfig())
    await pool.wait_for_ready(model)
    client = TrainClient(pool.train_client)

    async def ask(seed: int, step: int, name: str) -> dict:
        body = {"model": name, "messages": [{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}]}
        asked = {"max_tokens": 24, "temperature": 400.0, "seed": seed, "top_k": 400}
        salted = {**asked, "extra_body": {"cache_salt": str(step)}}
        answer = await client.get_response(
            ChatDialect(), body, SamplingConfig.model_validate(salted), session_id=f"session-{seed}"
        )
        return {
            "step": step,
            "asked": asked,
            "prompt_ids": answer.tokens.prompt_ids,
            "completion_ids": answer.tokens.completion_ids,
            "logprobs": answer.tokens.completion_logprobs,
            "finish_reason": answer.finish_reason,
        }

    async def tell(step: int, name: str) -> None:
        for answer in await asyncio.gather(*(ask(seed, step, name) for seed in range(6))):
            print(json.dumps(answer), flush=True)

    await tell(0, model)
    await pool.update_weights(Path(weights), step=1)
    await tell(1, model)
    await load_lora_adapter(pool.admin_clients, "policy", Path(adapter))
    await load_lora_adapter(pool.admin_clients, "policy", Path(adapter))
    await tell(2, "policy")
    await unload_lora_adapter(pool.admin_clients, "policy")
    await client.close()
    await pool.stop()


asyncio.run(main(*sys.argv[1:]))
