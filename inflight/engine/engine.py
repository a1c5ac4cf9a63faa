"""The generation loop: admit → swap → forward → draw → emit."""

import logging
import secrets
import uuid
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np
import torch

from inflight.core.clock import now_ns
from inflight.core.errors import InvalidRequestError
from inflight.core.frames import Finish, FrameHeader, GroupStart, Swap, TokenFrame
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.core.spans import note
from inflight.engine.adapters import AdapterBank
from inflight.engine.agreement import check_model
from inflight.engine.aliases import aliases_of
from inflight.engine.attention.backend import GraphBackend, choose_backend
from inflight.engine.columns import extra_columns, routed_experts_columns
from inflight.engine.kv_cache import KVCache
from inflight.engine.layers import probe_layers
from inflight.engine.limits import Limits, check_prompt
from inflight.engine.loading import (
    context_limit,
    eos_token_ids,
    load_model,
    load_tokenizer,
    modules_over_slots,
    prefill_limit,
    resolve_device,
    resolve_dtype,
)
from inflight.engine.model_runner import ModelRunner
from inflight.engine.routed_experts import RoutedExpertsRecorder
from inflight.engine.sampler import Drawn, Sampler, nothing_drawn, sample_seed
from inflight.engine.scheduler import Schedule, Scheduler, Sequence
from inflight.engine.stopping import StopCondition
from inflight.engine.verbs import verb
from inflight.weights.slot_table import SlotTable, make_slot
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views

logger = logging.getLogger("inflight.engine")

MAX_REQUESTS_PER_SUBMIT = 65536
"""As many as one prompt may ask for. Accepting them takes about a second, in which there is no forward pass."""
_PREFILL_TOKENS = {"cuda": 2048, "cpu": 256}


@dataclass(slots=True)
class _Pass:
    """A forward pass that is under way on the device, or done."""

    schedule: Schedule
    version: int
    slot: int
    adapter_slot: int | None
    swap: Swap | None
    drawn: Drawn
    """On the CPU once `done` has happened."""
    routed_experts: torch.Tensor | None
    done: torch.cuda.Event | torch.Event | None


class Engine:
    """Generates tokens in this process. `step()` returns the frame of one forward pass.

    Prompts join and leave between any two steps. New weights become visible between two steps, whole or not at all;
    `slot_table` is where they arrive. Raises ModelLoadError, UnsupportedModelError, SharedMemoryError or
    DeviceMemoryError when it is built, InvalidRequestError from `submit`.
    """

    def __init__(self, options: EngineOptions, *, overlap: bool | None = None):
        """overlap: launch a pass before the results of the one before it are read, so that the host works while the
        device does. By default on a GPU."""
        if options.threads:
            torch.set_num_threads(options.threads)
        self.engine_id = uuid.uuid4().hex[:12]
        self.device = resolve_device(options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # kernels are launched on the current one
        dtype = resolve_dtype(options.dtype, model=options.model, device=self.device)
        model = load_model(options.model, dtype=dtype, device=self.device, seed=options.seed)
        layers = probe_layers(model)
        unfused_reason = check_model(model, fused=options.fused)
        text_config = model.config.get_text_config()
        self.max_context = context_limit(text_config, options.max_context)
        self.max_sequences = options.max_sequences
        self.vocab_size = int(text_config.vocab_size)

        layout = layout_of(model)
        slots = [make_slot(layout.total_bytes, self.device) for _ in range(options.slots)]
        fill(slot_views(slots[0].buffer, layout), published_tensors(model))
        self.aliases = aliases_of(model)
        """Other names under which trainers and checkpoints hold the weights."""
        self.slot_table = SlotTable(layout, slots)
        backend = choose_backend(options.attention, layers, self.device)
        max_prefill_tokens = prefill_limit(
            text_config, options.max_prefill_tokens or _PREFILL_TOKENS[self.device.type], options.max_sequences
        )
        cuda_graphs = options.cuda_graphs and not options.record_routed_experts
        self.adapters: AdapterBank | None = None
        if options.lora_rank:
            self.adapters = AdapterBank(
                model,
                options.adapters,
                options.lora_rank,
                max_tokens=options.max_sequences + max_prefill_tokens,
                make_slot=partial(make_slot, device=self.device),
                always=cuda_graphs and isinstance(backend, GraphBackend),
            )
        modules = modules_over_slots(model, layout, slots)
        del model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the weights as they were loaded; what is free now is the KV cache's
        if self.adapters is not None:
            for module in modules:
                self.adapters.attach(module)
        self.cache = KVCache(
            layers,
            backend,
            max_sequences=options.max_sequences,
            max_context=self.max_context,
            max_prefill_tokens=max_prefill_tokens,
            device=self.device,
            fraction=options.kv_cache_fraction,
            max_tokens=options.kv_cache_tokens,
            prefix_caching=options.prefix_caching and not options.record_routed_experts,
        )
        self.attention = backend.name
        self.runner = ModelRunner(
            modules,
            self.cache,
            backend,
            max_sequences=options.max_sequences,
            max_context=self.max_context,
            device=self.device,
            unfused_reason=unfused_reason,
            cuda_graphs=cuda_graphs,
            adapters=self.adapters,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_sequences=options.max_sequences,
            max_prefill_tokens=max_prefill_tokens,
            prefix_across_versions=options.prefix_across_versions,
        )
        eos_ids = eos_token_ids(modules[0])
        self._sampler = Sampler(self.vocab_size, eos_ids, self.runner.last_tokens)
        self._stop = StopCondition(eos_ids, load_tokenizer(options.model))
        self._routed_experts = RoutedExpertsRecorder(modules, text_config) if options.record_routed_experts else None
        self._overlap = self.device.type == "cuda" if overlap is None else overlap
        self._under_way: _Pass | None = None
        self._last_served = 0
        self._recompute_on_swap = options.kv_on_swap == "recompute"
        self._policies = count(1 << 40)
        self._name_policies()
        self.paused = False
        self.asleep = False

        self._sequences: dict[int, Sequence] = {}
        self._groups: dict[int, set[int]] = {}
        self._next_request_id = 0
        self._next_group_id = 0
        self._stalled_since_ns: int | None = None
        self._untold_swap: Swap | None = None
        """A swap of which no frame has told yet."""
        self._new_groups: list[GroupStart] = []
        self._finishes: list[Finish] = []
        self._num_frames = 0
        self.step_count = 0
        self.num_tokens = 0
        self.num_swaps = 0
        self.num_swaps_in_flight = 0

    def describe(self) -> str:
        """In a line: where it runs, how, and how much fits."""
        runner, cache = self.runner, self.cache
        how = "fused" if runner.unfused_reason is None else f"unfused ({runner.unfused_reason})"
        graphs = f", {runner.num_graphs} CUDA graphs" if runner.num_graphs else ""
        return (
            f"{self.device}, {how}{graphs}, attention {self.attention}, up to {self.max_sequences} sequences of "
            f"{self.max_context:,} tokens, KV cache of {cache.nbytes / 2**20:,.0f} MiB for {cache.capacity_tokens:,} "
            "tokens"
        )

    def close(self) -> None:
        """Give the slots' names back; their memory goes with the last process that maps it. Safe to call twice."""
        for slot_table in self.slot_tables:
            for slot in slot_table.slots:
                slot.unlink()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests -----------------------------------------------------------------------------------------------

    @verb(brings_work=True)
    def submit(self, prompts: Seq[Prompt]) -> list[int]:
        """Queue prompts and return a group id for each; all are accepted or none. Raises InvalidRequestError."""
        total = sum(prompt.params.n for prompt in prompts)
        if total > MAX_REQUESTS_PER_SUBMIT:
            raise InvalidRequestError(
                f"{total} samples in one call; submit at most {MAX_REQUESTS_PER_SUBMIT} at a time"
            )
        limits = self._limits()
        for index, prompt in enumerate(prompts):
            check_prompt(f"prompt {index}", prompt, limits)
        return [self._accept(prompt) for prompt in prompts]

    @verb(brings_work=True)
    def fork(
        self,
        request_id: int,
        at: int | None = None,
        params: SamplingParams | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Start a group whose prompt is that of an unfinished request and the first `at` tokens that it drew (None:
        all so far); it shares their keys and values. Returns its group id. Raises InvalidRequestError.

        params: None takes those of the request, with another seed.
        """
        parent = self._sequences.get(request_id)
        if parent is None:
            raise InvalidRequestError(
                f"request {request_id} is not unfinished; submit its prompt and tokens as a new prompt instead"
            )
        at = len(parent.tokens) if at is None else at
        if not 0 <= at <= len(parent.tokens):
            raise InvalidRequestError(
                f"request {request_id} has drawn {len(parent.tokens)} tokens, cannot fork at {at}"
            )
        params = params or msgspec.structs.replace(parent.params, seed=None)
        prompt = Prompt(parent.prompt + parent.tokens[:at], params, dict(metadata or {}), parent.pin, parent.adapter)
        check_prompt("the fork", prompt, self._limits())
        return self._accept(prompt, forked_from=(parent, at))

    @verb()
    def cancel(self, group_ids: Seq[int], request_ids: Seq[int] = ()) -> None:
        """End every unfinished request of these groups, and these requests; what ended already is left alone."""
        wanted = {i for i in request_ids if i in self._sequences}
        for group_id in group_ids:
            wanted |= self._groups.get(group_id, set())
        for request_id in sorted(wanted, reverse=True):  # a leader after its followers, so that none takes its place
            self._finish(self._sequences[request_id], "cancelled")

    @verb()
    def pause(self) -> None:
        """No forward pass from the next boundary on, until `resume()`. Weights still arrive."""
        self.paused = True

    @verb()
    def resume(self) -> None:
        self.paused = False

    @verb()
    def sleep(self) -> None:
        """Give the memory of the KV cache back, until `wake()`. Unfinished sequences keep their tokens, and are
        computed again afterwards; slots stay, as publishers may be writing to them."""
        if not self.asleep:
            self.asleep = True
            self.scheduler.preempt_all()
            self.runner.free_memory()  # first: the cache returns all that nobody holds to the device
            self.cache.free_memory()

    @verb()
    def wake(self) -> None:
        """Take the memory of the KV cache again. Raises DeviceMemoryError if it is not there any more."""
        if self.asleep:
            self.cache.allocate()
            self.runner.capture()
            self.asleep = False

    @property
    def has_work(self) -> bool:
        """Whether there are sequences to advance, or news to send."""
        return self.scheduler.has_work or self._under_way is not None or self._has_news

    @property
    def blocked(self) -> bool:
        """Whether no forward pass can run: paused, asleep, or the only slot is lent to the publisher."""
        return self.paused or self.asleep or self.slot_table.live is None

    @property
    def idle(self) -> bool:
        """Whether `step()` would do nothing until a message comes."""
        return not self.has_work or (self.blocked and self._under_way is None and not self._has_news)

    @property
    def slot_tables(self) -> list[SlotTable]:
        """Where weights arrive, and where adapters do."""
        return [self.slot_table] if self.adapters is None else [self.slot_table, self.adapters.slot_table]

    @property
    def version(self) -> int:
        """Of all that is live: versions count publishes, of weights and of adapters."""
        return max(slot_table.version for slot_table in self.slot_tables)

    @property
    def newest_version(self) -> int:
        """The newest version that the engine holds whole, live or not."""
        return max(slot_table.newest_version for slot_table in self.slot_tables)

    def slot_in_use(self, slot_table: SlotTable) -> int | None:
        """The slot that a pass under way on the device may still read."""
        if self._under_way is None:
            return None
        return self._under_way.slot if slot_table is self.slot_table else self._under_way.adapter_slot

    @property
    def _has_news(self) -> bool:
        return bool(self._new_groups or self._finishes)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> TokenFrame | None:
        """One forward pass over running sequences and the prompts that join them.

        Returns a frame, or None if there is nothing to tell. With overlap it launches a pass and returns the frame of
        the one before. No frame that is not None may be dropped: their sequence numbers have no gaps.
        """
        for slot_table in self.slot_tables:
            self._swap_slot(slot_table)
        launched = self._launch()
        if self._overlap:
            launched, self._under_way = self._under_way, launched
        if launched is not None:
            return self._collect(launched)
        return self._frame() if self._has_news or self._untold_swap is not None else None

    def _swap_slot(self, slot_table: SlotTable) -> None:
        """At a forward boundary: let the newest whole version go live. What is to be told of it goes with the frame of
        the next pass."""
        began_ns = now_ns()
        ready = slot_table.take()
        waiting_for_weights = slot_table.live is None and self.scheduler.has_work
        if ready is None:
            if slot_table is not self.slot_table:
                return
            if not waiting_for_weights:
                self._stalled_since_ns = None
            elif self._stalled_since_ns is None:
                self._stalled_since_ns = began_ns
            return
        num_in_flight = sum(bool(s.tokens or s.num_pending) for s in self.scheduler.running.values())
        self._name_policies()
        if self._recompute_on_swap:
            self.scheduler.recompute_unpinned(adapted=slot_table is not self.slot_table)
        self.num_swaps += 1
        self.num_swaps_in_flight += num_in_flight > 0
        since_ns, self._stalled_since_ns = self._stalled_since_ns or began_ns, None
        handling_ns, slot_table.handling_ns = slot_table.handling_ns, 0
        stall_ns = now_ns() - since_ns + handling_ns if self.scheduler.has_work else 0
        self._untold_swap = Swap(ready.version, ready.published_ns, stall_ns, num_in_flight)
        note(f"swap to version {ready.version}", began_ns, in_flight=num_in_flight)

    def _launch(self) -> _Pass | None:
        """Put the next pass under way, if there is one."""
        if self.blocked or not self.scheduler.has_work:
            return None
        live = self.slot_table.version
        version = self._next_version(live)
        stamp = self.version if version == live else version
        schedule = self.scheduler.schedule(version, live=version == live, stamp=stamp)
        if not schedule.chunks:
            return None
        slot, began_ns = self.slot_table.slot_of(version), now_ns()
        logits = self.runner.forward(schedule, slot)
        forwarded_ns = now_ns()
        drawn = self._sampler.draw(logits, [s for s, _ in schedule.draws]) if schedule.draws else nothing_drawn(logits)
        routing = self._routed_experts.take() if self._routed_experts else None
        drawn = drawn.to_host()
        done = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        note("sample", forwarded_ns)
        name = "decode" if schedule.num_single == len(schedule.chunks) else "prefill"
        note(name, began_ns, version=version, sequences=len(schedule.chunks))
        swap, self._untold_swap = (self._untold_swap, None) if version == live else (None, self._untold_swap)
        self.step_count += 1
        adapter_slot = self.adapters.slot_table.live if self.adapters is not None else None
        return _Pass(schedule, stamp, slot, adapter_slot, swap, drawn, routing, done)

    def _next_version(self, live: int) -> int:
        """Versions that have sequences take turns; there is one, unless requests are pinned."""
        wanted = sorted(set(self.scheduler.versions) | ({live} if self.scheduler.has_unpinned else set()))
        self._last_served = next((version for version in wanted if version > self._last_served), wanted[0])
        return self._last_served

    def _collect(self, done: _Pass) -> TokenFrame:
        """Read the results of a pass: append the tokens to their sequences and end those that are finished."""
        began_ns = now_ns()
        if done.done is not None:
            done.done.synchronize()
        tokens, logprobs = done.drawn.tokens.tolist(), done.drawn.logprobs.numpy()
        finite = np.isfinite(logprobs).tolist()
        rows: list[int] = []
        for row, (sequence, _) in enumerate(done.schedule.draws):
            sequence.num_pending -= 1
            if sequence.finished:  # by the token before, while this pass was under way
                continue
            rows.append(row)
            sequence.tokens.append(tokens[row])
            if not finite[row]:
                self._finish(sequence, "error")
            elif self._stop.is_met(sequence):
                self._finish(sequence, "stop")
            elif len(sequence.tokens) >= sequence.max_tokens:
                self._finish(sequence, "length")
        for chunk in done.schedule.chunks:
            if not chunk.sequence.finished:
                self.cache.remember(chunk.sequence)
        self.num_tokens += len(rows)
        note("collect", began_ns)
        return self._frame(done, rows)

    def _frame(self, done: _Pass | None = None, rows: Seq[int] = ()) -> TokenFrame:
        """The frame of a pass, of which these rows count; without a pass, one that only brings news."""
        swap = done.swap if done else None
        if done is None:
            swap, self._untold_swap = self._untold_swap, None
        header = FrameHeader(
            engine_id=self.engine_id,
            sequence=self._num_frames,
            version=done.version if done else self.version,
            time_ns=now_ns(),
            step=self.step_count,
            num_tokens=len(rows),
            groups=self._new_groups,
            starts=[s.request_id for s in done.schedule.starts] if done else [],
            taken_over=done.schedule.taken_over if done else [],
            finishes=self._finishes,
            swap=swap,
            next_group_id=self._next_group_id,
        )
        self._new_groups, self._finishes = [], []
        self._num_frames += 1
        if done is None:
            return TokenFrame(header, np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.float32))
        sequences = [sequence for sequence, _ in done.schedule.draws]
        request_ids = np.array([s.request_id for s in sequences], np.uint64)
        tokens, logprobs = done.drawn.tokens.numpy(), done.drawn.logprobs.numpy()
        if len(rows) < len(sequences):
            request_ids, tokens, logprobs = (column[list(rows)] for column in (request_ids, tokens, logprobs))
        extras = extra_columns(done.drawn, rows)
        if self._routed_experts is not None and done.routed_experts is not None:
            extras |= routed_experts_columns(done.schedule.chunks, done.routed_experts, self._routed_experts.dtype)
        return TokenFrame(header, request_ids, tokens.astype(np.int32), logprobs, extras)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        return Limits(
            max_context=self.max_context,
            vocab_size=self.vocab_size,
            can_read_text=self._stop.can_read_text,
            adapters=self.adapters.names if self.adapters is not None else (),
            versions=self.slot_table.versions,
            has_live_version=self.slot_table.live is not None,
        )

    def _accept(self, prompt: Prompt, forked_from: tuple[Sequence, int] | None = None) -> int:
        params = prompt.params
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        group_id, first = self._next_group_id, self._next_request_id
        self._next_group_id += 1
        self._next_request_id += params.n
        max_tokens = min(params.max_tokens, self.max_context - len(prompt.token_ids))
        pin = self.slot_table.version if prompt.version == LIVE_VERSION else prompt.version
        self._groups[group_id] = set(range(first, first + params.n))
        leader, *followers = (
            Sequence(
                first + sample,
                group_id,
                sample,
                sample_seed(seed, sample),
                prompt.token_ids,
                params,
                max_tokens,
                prompt.adapter,
                pin,
            )
            for sample in range(params.n)
        )
        leader.followers = followers
        self._sequences |= {s.request_id: s for s in (leader, *followers)}
        if pin is not None:
            self.slot_table.pin(pin, params.n)
        if forked_from is None or self._routed_experts is not None:
            self.scheduler.add(leader)
        else:
            self.scheduler.fork(forked_from[0], leader)
        origin = (forked_from[0].request_id, forked_from[1]) if forked_from else None
        seeded = msgspec.structs.replace(params, seed=seed)
        self._new_groups.append(GroupStart(group_id, first, prompt.token_ids, seeded, prompt.metadata, origin))
        return group_id

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.remove(sequence)
        if sequence.pin is not None:
            self.slot_table.unpin(sequence.pin)
        del self._sequences[sequence.request_id]
        members = self._groups[sequence.group_id]
        members.remove(sequence.request_id)
        if not members:
            del self._groups[sequence.group_id]
        self._finishes.append(Finish(sequence.request_id, reason, len(sequence.tokens)))

    def _name_policies(self) -> None:
        """Keys and values that an adapter computes from now on are not those that it computed before."""
        if self.adapters is not None:
            self.scheduler.policies = {name: next(self._policies) for name in self.adapters.names}
