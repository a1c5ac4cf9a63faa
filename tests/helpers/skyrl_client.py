"""SkyRL's own client of inference servers, in an environment of its own: URL MODEL ADAPTER. Draws with the model and
with an adapter that it loads, and steers as SkyRL does around an update. Writes what it understood as lines of JSON."""

import asyncio
import json
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # which pydantic wants before Python 3.12, and SkyRL does not import
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402

PROMPTS = [[5, 6, 7], [8, 9], [10] * 20]
ASKED = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 3, "logprobs": 1}


async def main(url: str, model: str, adapter: str) -> None:
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=model)

    async def draw(name: str) -> None:
        batch = {
            "prompt_token_ids": PROMPTS,
            "sampling_params": ASKED,
            "session_ids": ["a", "b", "c"],
            "cache_salt": "1",
        }
        told = await client.generate(batch, model=name)
        for index, prompt in enumerate(PROMPTS):
            answer = {
                "model": name,
                "prompt_ids": prompt,
                "token_ids": told["response_ids"][index],
                "logprobs": told["response_logprobs"][index],
                "stop_reason": told["stop_reasons"][index],
                "text": told["responses"][index],
            }
            print(json.dumps(answer), flush=True)

    await draw(model)
    await client.pause()
    await client.load_lora_adapter("policy", adapter)
    await client.load_lora_adapter("policy", adapter)
    await client.reset_prefix_cache()
    await client.resume()
    await draw("policy")
    tinker = {
        "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "seed": 1},
        "include_prompt_logprobs": True,
    }
    print(json.dumps({"sample": await client.sample({"json": tinker})}), flush=True)
    print(json.dumps({"world_size": await client.get_world_size()}), flush=True)
    await client.unload_lora_adapter("policy")
    await client.sleep(level=1)
    await client.wake_up()
    try:
        await client.start_weight_update()
    except Exception as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    await client.teardown()


asyncio.run(main(*sys.argv[1:]))
