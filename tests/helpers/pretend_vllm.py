"""An engine core that pretends to be vLLM's: it draws known tokens, and says what was asked of it."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from inflight.core.layout import WeightLayout
from inflight.core.options import EngineOptions
from inflight.integrations.vllm_backend.build import Started
from inflight.integrations.vllm_backend.engine import VllmEngine
from inflight.integrations.vllm_backend.staged_slots import StagedSlots
from inflight.weights.shared_memory import SharedMemorySlot

VOCABULARY = 100
END = 99
MEDIA = 98
"""The token in place of an image."""


class PretendCore:
    """Draws 10, 11, 12, … for every request that it runs; a step takes in at most `per_step` that wait."""

    def __init__(self, workers: int = 2, per_step: int = 8):
        self.engine_core = SimpleNamespace(scheduler=self)
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 20))
        self.requests: dict[str, Any] = {}
        self.waiting: deque[Any] = deque()
        self.calls: list[tuple[str, tuple]] = []
        self.prepared = [True] * workers
        self.commit_ns = [0] * workers
        self.logprob = -1.5
        self.failure: Exception | None = None
        self.columns: tuple[list[str], dict[str, torch.Tensor]] | None = None
        self.missing = ""
        self.records_columns = True
        self.aborted: list[str] = []
        self._per_step = per_step

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            request = self.requests.pop(name)
            if request in self.waiting:
                self.waiting.remove(request)

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = ()) -> list[Any]:
        self.calls.append((method, args))
        answers = {"inflight_prepared": self.prepared, "inflight_columns": [None, self.columns]}
        answers |= {"inflight_allocate": ["", self.missing], "inflight_commit_ns": self.commit_ns}
        return answers.get(method, [None] * len(self.prepared))

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def get_output(self) -> Any:
        if self.failure is not None:
            raise self.failure
        for _ in range(min(self._per_step, len(self.waiting))):
            self.waiting.popleft()
        outputs = []
        for request in [r for r in self.requests.values() if r not in self.waiting]:
            token = 10 + request.num_output_tokens
            request.num_output_tokens += 1
            top = np.array([[token, 5, 6, 7]]), np.array([[self.logprob, -0.5, -1.0, -2.0]], np.float32)
            ended = request.num_output_tokens >= request.sampling["max_tokens"]
            outputs.append(
                SimpleNamespace(
                    request_id=request.request_id,
                    new_token_ids=[token],
                    new_logprobs=SimpleNamespace(logprob_token_ids=top[0], logprobs=top[1]),
                    finish_reason="length" if ended else None,
                    prefill_stats=SimpleNamespace(num_cached_tokens=2) if token == 10 else None,
                )
            )
            if ended:
                del self.requests[request.request_id]
        return SimpleNamespace(outputs=outputs)

    def shutdown(self) -> None:
        self.calls.append(("shutdown", ()))


class PretendStarted(Started):
    def request(self, name, sequence, salt, sampling):
        return SimpleNamespace(
            request_id=name,
            token_ids=sequence.token_ids(),
            salt=salt,
            sampling=sampling,
            adapter=sequence.adapter,
            num_computed_tokens=0,
            num_output_tokens=0,
            num_preemptions=0,
        )


def make_pretender(core: PretendCore, **options: Any) -> VllmEngine:
    chosen = EngineOptions("tiny", backend="vllm", max_sequences=4, max_context=32, **options)
    layout = WeightLayout.build([("weight", (8,), "float32")])
    adapter_layout = WeightLayout.build([("default.q_proj.lora_A", (8,), "float32")])
    cache = SimpleNamespace(num_gpu_blocks=33, block_size=16)
    started = PretendStarted(
        core=core,
        config=SimpleNamespace(cache_config=cache),
        name="vLLM as it seems",
        options=chosen,
        device=torch.device("cpu"),
        slot_table=make_slots(layout),
        adapter_slots=make_slots(adapter_layout) if chosen.lora_rank else None,
        aliases=[],
        media_ids=frozenset({MEDIA}),
        records_columns=core.records_columns,
        reload_reason="",
        vocab_size=VOCABULARY,
        tokenizer=None,
        eos_ids=frozenset({END}),
        kv_cache_bytes=1 << 20,
    )
    return VllmEngine(chosen, started)


def make_slots(layout: WeightLayout) -> StagedSlots:
    return StagedSlots(layout, [SharedMemorySlot.create(layout.total_bytes) for _ in range(2)])
