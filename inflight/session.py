"""What a user holds: an engine in its own process, its stream, and publishers to it."""

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from time import sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from inflight.core.clock import now_ns
from inflight.core.errors import InvalidRequestError
from inflight.core.messages import Prompt, Status
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.launcher import EngineLauncher
from inflight.observability.staleness import StalenessMeter

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from inflight.core.rollout import Rollout
    from inflight.training.rollouts import RolloutStream
    from inflight.weights.publisher import Publisher


def launch(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    slots: int = 2,
    max_sequences: int = 64,
    max_context: int = 0,
    max_prefill_tokens: int = 8192,
    seed: int = 0,
    threads: int = 0,
    timeout_s: float = 600.0,
) -> "LaunchedEngine":
    """Start a generator in its own process and wait until it has loaded its model.

    model: a directory, a Hugging Face hub id, or a built-in shape with random weights (`inflight doctor` lists them).
    The other parameters are described in `inflight.EngineOptions`. Use it as a context manager, or `close()` it.
    Raises ModelLoadError, UnsupportedModelError, SharedMemoryError, DeviceMemoryError or EngineDiedError.
    """
    options = EngineOptions(
        model=model,
        device=device,
        dtype=dtype,
        slots=slots,
        max_sequences=max_sequences,
        max_context=max_context,
        max_prefill_tokens=max_prefill_tokens,
        seed=seed,
        threads=threads,
    )
    return LaunchedEngine(options, timeout_s=timeout_s)


class LaunchedEngine:
    """A running generator. Not for use from several threads at once."""

    def __init__(self, options: EngineOptions, *, timeout_s: float = 600.0):
        self.options = options
        self._launcher = EngineLauncher(options, timeout_s=timeout_s)
        self.info = self._launcher.welcome
        """What the engine said of itself: layout, device, limits, vocabulary."""
        self.staleness = StalenessMeter()
        self._stream: RolloutStream | None = None
        self._publishers: WeakSet[Publisher] = WeakSet()

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, or None if it has none; prompts are token ids then."""
        from inflight.engine.loading import load_tokenizer

        return load_tokenizer(self.options.model)

    @property
    def stream(self) -> "RolloutStream":
        """Finished rollouts, in groups and batches."""
        if self._stream is None:
            from inflight.training.rollouts import RolloutStream

            self._stream = RolloutStream(
                self.info.stream_endpoint,
                tokenizer=self.tokenizer,
                meter=self.staleness,
                check_engine=self._launcher.check,
            )
        return self._stream

    def submit(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Queue prompts, as text or token ids; each becomes a group of `params.n` samples. Returns the group ids.

        metadata: one JSON-like mapping per prompt, which its rollouts bring back (an expected answer, for example).
        Raises InvalidRequestError, naming the prompt; then none was accepted.
        """
        if isinstance(prompts, str):
            raise InvalidRequestError("submit takes a list of prompts, got one string; wrap it in a list")
        if metadata is not None and len(metadata) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts need as many metadata, got {len(metadata)}")
        params = params or SamplingParams()
        messages = [
            Prompt(self._token_ids(index, prompt), params, dict(metadata[index]) if metadata else {})
            for index, prompt in enumerate(prompts)
        ]
        group_ids = self._launcher.client.submit(messages)
        self.stream.expect(group_ids)
        return group_ids

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> "list[list[Rollout]]":
        """Submit prompts and wait for their groups; what else is in flight goes on and waits in the stream."""
        return self.stream.collect(self.submit(prompts, params, metadata=metadata))

    def cancel(self, group_ids: Sequence[int] | None = None) -> None:
        """End the unfinished samples of these groups (None: of all); they arrive with finish_reason "cancelled"."""
        self._launcher.client.cancel(self.stream.outstanding if group_ids is None else group_ids)

    def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> None:
        """Return when the engine draws with this version or a newer one: the pause of a synchronous loop."""
        deadline = now_ns() + int(timeout_s * 1e9)
        while self.status().version < version:
            for publisher in self._publishers:
                publisher.check()
            if now_ns() > deadline:
                raise TimeoutError(f"version {version} did not go live within {timeout_s:.0f} s")
            sleep(0.001)

    def publisher(self, model: "nn.Module") -> "Publisher":
        """A publisher of this model's parameters to the engine. At most one lives at a time.

        Raises LayoutMismatchError, naming the tensors that differ, or PublisherConflictError.
        """
        from inflight.weights.publisher import Publisher

        publisher = Publisher(
            self._launcher.client.endpoint,
            model,
            check_engine=self._launcher.check,
            on_publish=self.staleness.published,
        )
        self._publishers.add(publisher)
        return publisher

    def status(self) -> Status:
        """Counters of the engine: version, steps, tokens, swaps, requests waiting and running."""
        return self._launcher.client.status()

    @property
    def pid(self) -> int:
        """Process id of the generator."""
        return self._launcher.pid

    def close(self) -> None:
        """End the generator and everything attached to it. Safe to call twice."""
        for publisher in list(self._publishers):
            publisher.close()
        self._publishers.clear()
        if self._stream is not None:
            self._stream.close()
        self._launcher.close()

    def __enter__(self) -> "LaunchedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_ids(self, index: int, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [operator.index(token) for token in prompt]
            except TypeError as error:
                raise InvalidRequestError(f"prompt {index} is {_short(prompt)}, expected text or token ids") from error
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{self.options.model!r} has no tokenizer; submit token ids, or add its tokenizer files to it"
            )
        return list(self.tokenizer(prompt)["input_ids"])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
