"""The generation loop: swap → schedule → forward → sample → collect → emit.

Between two forward passes the newest weights go live (swap). The scheduler selects the tokens of the next pass
(schedule). The model computes logits (forward), and tokens are drawn from them (sample). When the tokens have arrived
on the host, they are appended to their sequences, and finished sequences end (collect). A frame contains the results
(emit).
"""

from dataclasses import dataclass

import numpy as np
import torch

from inflight.core.clock import now_ns
from inflight.core.errors import BackendError
from inflight.core.frames import Swap, TokenFrame
from inflight.core.messages import Digests
from inflight.core.options import EngineOptions
from inflight.core.spans import span
from inflight.engine.backend import Backend, Execution, Load
from inflight.engine.build import Parts
from inflight.engine.loop.clocks import elapsed_ns, record_time, with_device_time
from inflight.engine.loop.headers import FrameHeaders
from inflight.engine.loop.outputs import routed_experts_columns, token_columns
from inflight.engine.loop.prompt_scores import Scores, score_prompts
from inflight.engine.loop.sampler import Samples
from inflight.engine.loop.sequence import Schedule
from inflight.engine.process.verbs import verb
from inflight.weights.comparison import ChecksumRequest
from inflight.weights.engine.digests import Digester
from inflight.weights.engine.slot_table import SlotTable


@dataclass(slots=True)
class _Launched:
    """A forward pass that is running on the device or finished."""

    schedule: Schedule
    slots: dict[SlotTable, int | None]
    """The slots that it reads."""
    swap: Swap | None
    swap_events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    """Events before and after the swap on the stream of the pass, on a GPU."""
    samples: Samples
    """Samples on the CPU, valid once `done` has happened."""
    routed_experts: torch.Tensor | None
    scores: Scores | None
    done: torch.cuda.Event | torch.Event | None


class Engine(Parts, Backend):
    """Generates tokens in this process. Prompts join and leave between any two steps. New weights become visible
    between two steps, whole or not at all."""

    _swap_events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Events around the last swap, on a GPU."""

    def __init__(self, options: EngineOptions, *, overlap: bool | None = None):
        """overlap: launch a pass before reading the results of the previous one. True on a GPU by default. Raises the
        errors of `Parts`."""
        super().__init__(options)
        self.headers = FrameHeaders(self.requests)
        self._digester = Digester(self.slot_table)
        self._overlap = self.device.type == "cuda" if overlap is None else overlap
        self._under_way: _Launched | None = None
        runner, memory = self.runner, self.memory
        self.execution = Execution(
            attention=self.attention,
            fused=runner.unfused_reason is None,
            num_graphs=runner.num_graphs,
            kv_cache_bytes=memory.nbytes,
            kv_cache_tokens=memory.capacity_tokens,
        )
        how = "fused" if runner.unfused_reason is None else f"unfused ({runner.unfused_reason})"
        graphs = f", {runner.num_graphs} CUDA graphs" if runner.num_graphs else ""
        self.description = (
            f"{self.device}, {how}{graphs}, attention {self.attention}, up to {self.options.max_sequences} sequences "
            f"of {self.options.max_context:,} tokens, KV cache of {memory.nbytes / 2**20:,.0f} MiB for "
            f"{memory.capacity_tokens:,} tokens"
        )

    @verb()
    def sleep(self) -> None:
        """Also free the slots without a version, unless a publisher is attached."""
        if not self.asleep:
            self.asleep = True
            self.scheduler.preemption.preempt_all()
            self.cache.forget()
            self.runner.free_memory()
            self.slot_table.free_unused(in_use=self.slots_in_use.get(self.slot_table))
            self.memory.free()  # last, because it returns all unused memory to the device

    @verb()
    def wake(self) -> None:
        if self.asleep:
            self.slot_table.restore()
            self.memory.allocate()
            self.runner.capture()
            self.asleep = False

    @verb()
    def digests(self, least: int) -> list[Digests]:
        """Return SHA-256 of every tensor of a live version from `least` on. An empty list means: ask again."""
        if self.version < least:
            return []
        # The newest version can be a version of adapters.
        return self._digester.ask(min(least, self.slot_table.version))

    @verb()
    def checksums(self, asked: ChecksumRequest) -> list[Digests]:
        """Return checksums of the live weights. An empty list means: ask again. Raises BackendError without weights."""
        if self.slot_table.live is None:  # no attached publisher could fill the slot
            raise BackendError(
                "the engine cannot compare weights: its only slot was given to a publisher that has ended. "
                "Publish all weights first"
            )
        return self._digester.ask(self.slot_table.version, asked)

    def load(self) -> Load:
        scheduler, cache = self.scheduler, self.cache
        return Load(
            num_waiting=len(self.requests.unfinished) - len(scheduler.running),
            num_running=len(scheduler.running),
            num_preemptions=scheduler.preemption.count,
            kv_blocks=cache.num_blocks,
            kv_blocks_used=cache.num_used_blocks,
            num_reused_tokens=cache.num_reused_tokens,
        )

    @torch.inference_mode()
    def step(self) -> TokenFrame | None:
        """Run one step. With overlap, launch a pass and return the frame of the previous pass."""
        self._swap()
        if self.asleep:
            self.slot_table.free_unused(in_use=self.slots_in_use.get(self.slot_table))
        launched, schedule = None, self._schedule()
        if schedule is not None:
            kind = "prefill" if schedule.prompts else "decode"
            with span(kind, version=schedule.version, sequences=len(schedule.rows)):
                logits = self.runner.forward(schedule, self.slot_table.readable.slot_of(schedule.version))
                launched = self._sample(schedule, logits)
        if self._overlap:
            launched, self._under_way = self._under_way, launched
            self.slots_in_use = {} if self._under_way is None else self._under_way.slots
        if launched is None:
            return self.headers.frame_without_tokens(self.version, self.step_count)
        return self._emit(launched, self._collect(launched))

    def _swap(self) -> None:
        """Make the newest complete version of the weights, and of the adapters, live."""
        self._digester.settle()
        recomputes = self.options.kv_on_swap == "recompute"
        if recomputes and not self.blocked and self.scheduler.preemption.must_finish_prefill:
            return
        for slot_table in self.slot_tables:
            began_ns = now_ns()
            swaps_on_gpu = self.device.type == "cuda" and slot_table.newest_version > slot_table.version
            began = record_time(self.device) if swaps_on_gpu else None
            ready = slot_table.take()
            if ready is None:
                if slot_table is self.slot_table:
                    lacks_weights = slot_table.live is None and self.scheduler.has_work
                    self.headers.stall_clock.wait(began_ns if lacks_weights else None)
                continue
            num_in_flight = sum(bool(s.tokens or s.num_pending) for s in self.scheduler.running.values())
            namespaces = self.scheduler.namespaces
            changed = namespaces.changed_by(ready) if slot_table is self.adapter_slots else self.options.adapters
            namespaces.renew(changed, ready.version)
            if recomputes:
                adapters = changed if slot_table is self.adapter_slots else None
                self.scheduler.preemption.recompute_unpinned(adapters)
            has_work = self.scheduler.has_work
            self._swap_events = None if began is None else (began, record_time(self.device))
            self.headers.swapped(slot_table, ready, began_ns, num_in_flight, has_work=has_work)

    def _schedule(self) -> Schedule | None:
        """Choose the tokens that the next pass computes. Return None if there are none, or no pass can run."""
        if self.blocked or not self.scheduler.has_work:
            return None
        live = self.slot_table.version
        version = self.scheduler.backlog.next_version(live)
        stamp = self.version if version == live else version
        self.memory.copy_blocks(self.cache.copies.take())
        schedule = self.scheduler.schedule(version, live=version == live, stamp=stamp)
        self.memory.copy_blocks(self.cache.restored.take())
        return schedule if len(schedule.rows) else None

    def _sample(self, schedule: Schedule, logits: torch.Tensor) -> _Launched:
        """Sample tokens, score prompt tokens, and enqueue the copy of the results to the host."""
        with span("sample"):
            draws = schedule.draws
            num_drawn = len(draws.cohort)
            samples = self.sampler.sample(logits[:num_drawn], draws) if num_drawn else Samples.none(self.device)
            scores = score_prompts(logits[num_drawn:], schedule).to_host() if schedule.num_scored else None
            routed_experts = self.routed_experts.take() if self.routed_experts else None
            samples = samples.to_host()
            done = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        swap = self.headers.take_swap() if schedule.version == self.slot_table.version else None
        self.step_count += 1
        slots: dict[SlotTable, int | None] = {self.slot_table: self.slot_table.readable.slot_of(schedule.version)}
        if self.adapter_slots is not None:
            slots[self.adapter_slots] = self.adapter_slots.live
        return _Launched(schedule, slots, swap, self._swap_events, samples, routed_experts, scores, done)

    def _collect(self, launched: _Launched) -> np.ndarray:
        """Wait for the results of a pass, append the tokens to their sequences and end finished sequences. Return
        i64[…]: the draws of sequences that had not ended before."""
        with span("collect"):
            if launched.done is not None:
                launched.done.synchronize()
            draws, samples = launched.schedule.draws, launched.samples
            finite = np.isfinite(samples.logprobs.numpy())
            counts, may_end = self.rows.read(draws, samples.tokens.numpy())
            if np.count_nonzero(finite) < len(finite):
                may_end = may_end | (counts & ~finite)
            for index in may_end.nonzero()[0].tolist():
                sequence = draws.cohort.sequences[index]
                if (reason := self.stop.reason(sequence, is_finite=finite[index])) is not None:
                    self.requests.finish(sequence, reason)
            self.scheduler.sequences.remember_all(launched.schedule)
            rows = counts.nonzero()[0]
            self.num_tokens += len(rows)
        return rows

    def _emit(self, launched: _Launched, rows: np.ndarray) -> TokenFrame:
        """Return the frame of a pass, with these draws."""
        schedule, samples, swap = launched.schedule, launched.samples, launched.swap
        if swap is not None and launched.swap_events is not None:
            swap = with_device_time(swap, elapsed_ns(*launched.swap_events))
        header = self.headers.header(
            schedule.stamp, self.step_count, len(rows), swap, schedule.starts, schedule.taken_over
        )
        request_ids, logprobs = schedule.draws.cohort.request_ids, samples.logprobs.numpy()
        tokens = samples.tokens.numpy().astype(np.int32)
        if len(rows) < len(request_ids):
            request_ids, tokens, logprobs = (column[rows] for column in (request_ids, tokens, logprobs))
        extras = token_columns(samples.read_columns(), rows)
        if self.routed_experts is not None and launched.routed_experts is not None:
            extras |= routed_experts_columns(schedule, launched.routed_experts, self.routed_experts.dtype)
        if launched.scores is not None:
            extras |= launched.scores.columns()
        return TokenFrame(header, request_ids, tokens, logprobs, extras)
