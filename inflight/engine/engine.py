"""The generation loop: admit → swap → forward → draw → emit."""

import secrets
import uuid
from collections.abc import Sequence as Seq

import msgspec
import numpy as np
import torch

from inflight.core.clock import now_ns
from inflight.core.errors import InvalidRequestError, ModelLoadError
from inflight.core.frames import Finish, FrameHeader, GroupStart, Switch, TokenFrame
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.engine.kv_cache import KVCache
from inflight.engine.loading import context_limit, eos_token_ids, load_model, modules_over_slots
from inflight.engine.model_runner import ModelRunner, probe_layers
from inflight.engine.sampler import draw, sample_seed
from inflight.engine.scheduler import Scheduler, Sequence
from inflight.engine.shapes import SHAPES
from inflight.weights.cuda_ipc import CudaSlot
from inflight.weights.receiver import Receiver, Slot
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views

MAX_REQUESTS_PER_SUBMIT = 1_000_000


class Engine:
    """Generates tokens in this process. `step()` runs one forward pass and returns its frame.

    Prompts join and leave between any two steps. New weights become visible between two steps, whole or not at all;
    `receiver` is where they arrive. Raises ModelLoadError, UnsupportedModelError, SharedMemoryError or
    DeviceMemoryError when it is built, InvalidRequestError from `submit`.
    """

    def __init__(self, options: EngineOptions):
        if options.threads:
            torch.set_num_threads(options.threads)
        self.engine_id = uuid.uuid4().hex[:12]
        self.device = _resolve_device(options.device)
        model = load_model(
            options.model, dtype=_resolve_dtype(options, self.device), device=self.device, seed=options.seed
        )
        layers = probe_layers(model)
        text_config = model.config.get_text_config()
        self.max_context = context_limit(text_config, options.max_context)
        self.vocab_size = int(text_config.vocab_size)
        self._eos_ids = eos_token_ids(model)

        layout = layout_of(model)
        slots = [self._make_slot(layout.total_bytes) for _ in range(options.slots)]
        fill(slot_views(slots[0].buffer, layout), published_tensors(model))
        self.receiver = Receiver(layout, slots)
        self.cache = KVCache(layers, rows=options.max_sequences, max_context=self.max_context, device=self.device)
        self._runner = ModelRunner(modules_over_slots(model, layout, slots), self.cache, self.device)
        self.scheduler = Scheduler(self.cache, max_prefill_tokens=options.max_prefill_tokens)

        self._sequences: dict[int, Sequence] = {}
        self._groups: dict[int, set[int]] = {}
        self._next_request_id = 0
        self._next_group_id = 0
        self._stalled_since_ns: int | None = None
        self._new_groups: list[GroupStart] = []
        self._finishes: list[Finish] = []
        self._num_frames = 0
        self.step_count = 0
        self.num_tokens = 0
        self.num_swaps = 0
        self.num_swaps_in_flight = 0

    def close(self) -> None:
        """Give the slots' names back; their memory goes with the last process that maps it. Safe to call twice."""
        for slot in self.receiver.slots:
            slot.unlink()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests -----------------------------------------------------------------------------------------------

    def submit(self, prompts: Seq[Prompt]) -> list[int]:
        """Queue prompts and return a group id for each; all are accepted or none. Raises InvalidRequestError."""
        total = sum(prompt.params.n for prompt in prompts)
        if total > MAX_REQUESTS_PER_SUBMIT:
            raise InvalidRequestError(
                f"{total} samples in one call; submit at most {MAX_REQUESTS_PER_SUBMIT} at a time"
            )
        for index, prompt in enumerate(prompts):
            self._check(index, prompt)
        return [self._accept(prompt) for prompt in prompts]

    def cancel(self, group_ids: Seq[int]) -> None:
        """End every unfinished request of these groups; groups that ended already are left alone."""
        for group_id in group_ids:
            for request_id in sorted(self._groups.get(group_id, ())):
                self._finish(self._sequences[request_id], "cancelled")

    @property
    def has_work(self) -> bool:
        """Whether `step()` has something to do: sequences to advance, or news to send."""
        return self.scheduler.has_work or bool(self._new_groups or self._finishes)

    @property
    def blocked(self) -> bool:
        """Whether the only slot is lent to the publisher, so that no forward pass can run."""
        return self.receiver.live is None

    # ---- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> TokenFrame | None:
        """One forward pass over all running sequences and the prompts that join them.

        Returns its frame, or None if there was nothing to do or the only slot is lent. Of all the frames that are
        not None none may be dropped: their sequence numbers have no gaps.
        """
        switch = self._swap()
        if self.blocked:  # no forward pass, but cancellations are still news
            return self._frame([], [], np.empty(0), None) if self._new_groups or self._finishes else None
        schedule = self.scheduler.schedule()
        if not schedule.sequences:
            return self._frame([], [], np.empty(0), switch) if self.has_work or switch else None
        logits = self._runner.forward(schedule, self._live_slot)
        tokens, logprobs = self._draw(logits, schedule.sequences)
        self._advance(schedule.sequences, tokens, logprobs)
        self.step_count += 1
        self.num_tokens += len(tokens)
        return self._frame(schedule.sequences, tokens, logprobs, switch, starts=schedule.joining)

    def _swap(self) -> Switch | None:
        """At a forward boundary: let the newest whole version go live."""
        began_ns = now_ns()
        ready = self.receiver.take()
        if ready is None:
            if not (self.blocked and self.scheduler.has_work):
                self._stalled_since_ns = None
            elif self._stalled_since_ns is None:
                self._stalled_since_ns = began_ns
            return None
        num_in_flight = sum(bool(s.tokens) for s in self.scheduler.running.values())
        self.num_swaps += 1
        self.num_swaps_in_flight += num_in_flight > 0
        since_ns, self._stalled_since_ns = self._stalled_since_ns or began_ns, None
        handling_ns, self.receiver.handling_ns = self.receiver.handling_ns, 0
        stall_ns = now_ns() - since_ns + handling_ns if self.scheduler.has_work else 0
        return Switch(ready.version, ready.published_ns, stall_ns, num_in_flight)

    @property
    def _live_slot(self) -> int:
        assert self.receiver.live is not None
        return self.receiver.live

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], np.ndarray]:
        seeds = np.array([s.seed for s in sequences], np.uint64)
        positions = np.array([s.next_position for s in sequences])
        tokens, logprobs = draw(logits, [s.params for s in sequences], seeds, positions)
        return tokens.tolist(), logprobs.cpu().numpy()

    def _advance(self, sequences: list[Sequence], tokens: list[int], logprobs: np.ndarray) -> None:
        """Append each token to its sequence and end those that are done."""
        finite = np.isfinite(logprobs)
        for sequence, token, is_finite in zip(sequences, tokens, finite, strict=True):
            sequence.tokens.append(token)
            if not is_finite:
                self.cache.clear_row(sequence.row)
                self._finish(sequence, "error")
            elif token in sequence.params.stop_token_ids or (token in self._eos_ids and not sequence.params.ignore_eos):
                self._finish(sequence, "stop")
            elif len(sequence.tokens) >= sequence.max_tokens:
                self._finish(sequence, "length")

    def _frame(
        self,
        sequences: list[Sequence],
        tokens: list[int],
        logprobs: np.ndarray,
        switch: Switch | None,
        starts: Seq[Sequence] = (),
    ) -> TokenFrame:
        header = FrameHeader(
            engine_id=self.engine_id,
            sequence=self._num_frames,
            version=self.receiver.version,
            time_ns=now_ns(),
            step=self.step_count,
            num_tokens=len(tokens),
            groups=self._new_groups,
            starts=[s.request_id for s in starts],
            finishes=self._finishes,
            switch=switch,
            next_group_id=self._next_group_id,
        )
        self._new_groups, self._finishes = [], []
        self._num_frames += 1
        return TokenFrame(
            header,
            np.array([s.request_id for s in sequences], np.uint64),
            np.array(tokens, np.int32),
            np.asarray(logprobs, np.float32),
        )

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _check(self, index: int, prompt: Prompt) -> None:
        ids = prompt.token_ids
        if not ids:
            raise InvalidRequestError(f"prompt {index} is empty; the engine needs at least one token")
        if len(ids) >= self.max_context:
            raise InvalidRequestError(
                f"prompt {index} has {len(ids)} tokens and the context holds {self.max_context}, of which the answer "
                "needs at least one; shorten the prompt or launch with a larger max_context"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(f"prompt {index} has token id {bad}; the vocabulary is 0 … {self.vocab_size - 1}")

    def _accept(self, prompt: Prompt) -> int:
        params = prompt.params
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        group_id, first = self._next_group_id, self._next_request_id
        self._next_group_id += 1
        self._next_request_id += params.n
        max_tokens = min(params.max_tokens, self.max_context - len(prompt.token_ids))
        self._groups[group_id] = set(range(first, first + params.n))
        for sample in range(params.n):
            sequence = Sequence(
                first + sample, group_id, sample_seed(seed, sample), prompt.token_ids, params, max_tokens
            )
            self._sequences[sequence.request_id] = sequence
            self.scheduler.add(sequence)
        seeded = msgspec.structs.replace(params, seed=seed)
        self._new_groups.append(GroupStart(group_id, first, prompt.token_ids, seeded, prompt.metadata))
        return group_id

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        members = self._groups[sequence.group_id]
        members.remove(sequence.request_id)
        if not members:
            del self._groups[sequence.group_id]
        self._finishes.append(Finish(sequence.request_id, reason, len(sequence.tokens)))

    def _make_slot(self, nbytes: int) -> Slot:
        return CudaSlot.create(nbytes, self.device) if self.device.type == "cuda" else SharedMemorySlot.create(nbytes)


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelLoadError(f"device {name!r} was asked for, but torch sees no GPU; use device='cpu'")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ModelLoadError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def _resolve_dtype(options: EngineOptions, device: torch.device) -> torch.dtype | None:
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    if options.model in SHAPES:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return None
