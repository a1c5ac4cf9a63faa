"""The endpoints that describe the server: models, health, metrics, and its tokenizer."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.server.prompts import chat_prompt, completion_prompts
from inflight.server.requests import DetokenizeRequest, TokenizeRequest, read_request
from inflight.server.responses import ApiError, answer
from inflight.server.served import Served
from inflight.weights.nccl import why_not


async def health(served: Served, request: Request) -> Response:
    """Return 200 while the engine responds, paused or not."""
    state = served.engine.stream.state
    if served.ending:
        raise ApiError(503, "the server is about to end")
    if state in ("closed", "silent", "restarting"):
        raise ApiError(503, f"the engine is {state}")
    return Response()


async def metrics(served: Served, request: Request) -> Response:
    """Return the metrics for Prometheus."""
    text = await asyncio.to_thread(served.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def load(served: Served, request: Request) -> Response:
    """Return the number of clients' requests in progress, for routers."""
    return answer({"server_load": served.num_open})


async def list_models(served: Served, request: Request) -> Response:
    """List the model under its names, and the adapters."""
    return answer({"object": "list", "data": _cards(served)})


async def one_model(served: Served, request: Request) -> Response:
    """Describe one of them."""
    if not (name := request.path_params["name"]):
        return await list_models(served, request)
    served.adapter_of(name)
    return answer(next(card for card in _cards(served) if card["id"] == name))


def _cards(served: Served) -> list[dict[str, Any]]:
    models = [(name, served.engine.options.model or name, None) for name in served.names]
    models += [(adapter.name, adapter.path, served.names[0]) for adapter in served.adapters.by_name.values()]
    return [
        {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "inflight",
            "root": root,
            "parent": parent,
            "max_model_len": served.max_context,
        }
        for name, root, parent in models
    ]


async def server_info(served: Served, request: Request) -> Response:
    """Return the facts that trainers request from a vLLM server, if they have a meaning here."""
    info, options, adapters = served.engine.info, served.engine.options, served.adapters
    dtypes = {spec.dtype for spec in info.layout.tensors}
    lora = {"max_lora_rank": adapters.rank, "max_loras": len(adapters.places)} if adapters.places else None
    return answer(
        {
            "vllm_config": {
                "model_config": {
                    "model": options.model,
                    "dtype": f"torch.{min(dtypes, key=lambda name: name == 'float32')}",
                    "max_model_len": info.max_context,
                    "logprobs_mode": "processed_logprobs",
                },
                "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "world_size": 1},
                "lora_config": lora,
                "weight_transfer_config": None if why_not(info.device) else {"backend": "nccl"},
            },
        }
    )


async def tokenize(served: Served, request: Request) -> Response:
    """Return token ids of text or of a conversation."""
    fields = await read_request(request, TokenizeRequest, served.max_body_bytes)
    served.adapter_of(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "tokenize takes either prompt or messages", param="prompt")
    if fields.messages is not None:
        ids = chat_prompt(fields, served.tokenizer, served.names[0])
    else:
        special = fields.add_special_tokens is not False
        [ids] = completion_prompts(fields.prompt or "", _tokenizer(served), served.names[0], special=special)
    names = [served.decoder.token(i) for i in ids] if fields.return_token_strs else None
    return answer({"count": len(ids), "max_model_len": served.max_context, "tokens": ids, "token_strs": names})


async def detokenize(served: Served, request: Request) -> Response:
    """Return the text of token ids, special ones included."""
    fields = await read_request(request, DetokenizeRequest, served.max_body_bytes)
    served.adapter_of(fields.model)
    bad = next((i for i in fields.tokens if not 0 <= i < served.engine.info.vocab_size), None)
    if bad is not None:
        raise ApiError(400, f"token id {bad} is outside the vocabulary", param="tokens")
    _tokenizer(served)
    return answer({"prompt": served.decoder.decode(fields.tokens, skip_special_tokens=False)})


def _tokenizer(served: Served) -> Any:
    if served.tokenizer is None:
        raise ApiError(400, f"{served.names[0]!r} has no tokenizer")
    return served.tokenizer
