"""The generation loop: swap → schedule → forward → sample → collect → emit.

Between two forward passes the newest weights go live (swap). The scheduler selects the tokens of the next pass
(schedule). The model computes logits (forward), and tokens are drawn from them (sample). When the tokens have arrived
on the host, they are appended to their sequences, and finished sequences end (collect). A frame contains the results
(emit).
"""

from dataclasses import dataclass
from typing import NamedTuple

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
    slot: int
    adapter_slot: int | None
    swap: Swap | None
    samples: Samples
    """Samples on the CPU, valid once `done` has happened."""
    routed_experts: torch.Tensor | None
    scores: Scores | None
    done: torch.cuda.Event | torch.Event | None


class _Drawn(NamedTuple):
    """The M tokens that a pass drew, on the host."""

    rows: np.ndarray
    """i64[…]: the draws of sequences that had not ended before."""
    tokens: np.ndarray
    """i64[M]"""
    logprobs: np.ndarray
    """f32[M]"""


class Engine(Parts, Backend):
    """Generates tokens in this process. `step()` returns the frame of one forward pass.

    Prompts join and leave between any two steps. New weights become visible between two steps, whole or not at all.
    They arrive in `slot_table`. The constructor raises ModelLoadError, UnsupportedModelError, SharedMemoryError or
    DeviceMemoryError; `submit` raises InvalidRequestError.
    """

    def __init__(self, options: EngineOptions, *, overlap: bool | None = None):
        """overlap: launch a pass before reading the results of the previous one, so that host and device work at the
        same time. True on a GPU by default."""
        Parts.__init__(self, options)
        Backend.__init__(self, self.options)
        self._digester = Digester(self.slot_table)
        self._overlap = self.device.type == "cuda" if overlap is None else overlap
        self._under_way: _Launched | None = None
        self.scheduler.renew_kv_namespaces(self.options.adapters)
        self.execution = Execution(
            attention=self.attention,
            fused=self.runner.unfused_reason is None,
            num_graphs=self.runner.num_graphs,
            kv_cache_bytes=self.memory.nbytes,
            kv_cache_tokens=self.memory.capacity_tokens,
        )

    def describe(self) -> str:
        runner, memory = self.runner, self.memory
        how = "fused" if runner.unfused_reason is None else f"unfused ({runner.unfused_reason})"
        graphs = f", {runner.num_graphs} CUDA graphs" if runner.num_graphs else ""
        return (
            f"{self.device}, {how}{graphs}, attention {self.attention}, up to {self.max_sequences} sequences of "
            f"{self.max_context:,} tokens, KV cache of {memory.nbytes / 2**20:,.0f} MiB for "
            f"{memory.capacity_tokens:,} tokens"
        )

    # ---- requests and states ------------------------------------------------------------------------------------

    @verb()
    def sleep(self) -> None:
        """Slots stay, as publishers may be writing to them."""
        if not self.asleep:
            self.asleep = True
            self.scheduler.preempt_all()
            self.cache.forget()
            self.runner.free_memory()
            self.memory.free()  # last, because it returns all unused memory to the device

    @verb()
    def wake(self) -> None:
        if self.asleep:
            self.memory.allocate()
            self.runner.capture()
            self.asleep = False

    @verb()
    def digests(self, least: int) -> list[Digests]:
        if self.version < least:
            return []
        # The newest version can be a version of adapters.
        return self._digester.ask(min(least, self.slot_table.version))

    @verb()
    def checksums(self, asked: ChecksumRequest) -> list[Digests]:
        if self.slot_table.live is None:  # no attached publisher could fill the slot
            raise BackendError(
                "the engine cannot compare weights: its only slot was given to a publisher that has ended. "
                "Publish all weights first"
            )
        return self._digester.ask(self.slot_table.version, asked)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._under_way is not None or self.requests.has_news

    @property
    def blocked(self) -> bool:
        return self.paused or self.asleep or self.slot_table.live is None

    @property
    def idle(self) -> bool:
        blocked = self.blocked or self.scheduler.held_back
        return not self.has_work or (blocked and self._under_way is None and not self.requests.has_news)

    @property
    def adapter_slots(self) -> SlotTable | None:
        return None if self.adapters is None else self.adapters.slot_table

    def load(self) -> Load:
        scheduler, cache = self.scheduler, self.cache
        return Load(
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            kv_blocks=cache.num_blocks,
            kv_blocks_used=cache.num_used_blocks,
            num_reused_tokens=cache.num_reused_tokens,
        )

    def slot_in_use(self, slot_table: SlotTable) -> int | None:
        if self._under_way is None:
            return None
        return self._under_way.slot if slot_table is self.slot_table else self._under_way.adapter_slot

    # ---- the loop -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> TokenFrame | None:
        """Run one step. With overlap, launch a pass and return the frame of the previous pass."""
        self._swap()
        launched, schedule = None, self._schedule()
        if schedule is not None:
            kind = "prefill" if schedule.prompts else "decode"
            with span(kind, version=schedule.version, sequences=len(schedule.rows)):
                logits = self.runner.forward(schedule, self.slot_table.readable.slot_of(schedule.version))
                launched = self._sample(schedule, logits)
        if self._overlap:
            launched, self._under_way = self._under_way, launched
        return self._tell_news() if launched is None else self._emit(launched, self._collect(launched))

    def _swap(self) -> None:
        """Make the newest complete version of the weights, and of the adapters, live."""
        self._digester.settle()
        recomputes = self.options.kv_on_swap == "recompute"
        if recomputes and not self.blocked and self.scheduler.must_finish_prefill:
            return
        for slot_table in self.slot_tables:
            began_ns = now_ns()
            ready = slot_table.take()
            if ready is None:
                if slot_table is self.slot_table:
                    lacks_weights = slot_table.live is None and self.scheduler.has_work
                    self.stall_clock.wait(began_ns if lacks_weights else None)
                continue
            num_in_flight = sum(bool(s.tokens or s.num_pending) for s in self.scheduler.running.values())
            self.scheduler.renew_kv_namespaces(self.options.adapters)
            if recomputes:
                self.scheduler.recompute_unpinned(adapted=slot_table is not self.slot_table)
            self._note_swap(slot_table, ready, began_ns, num_in_flight)

    def _schedule(self) -> Schedule | None:
        """Choose the tokens that the next pass computes. Return None if there are none, or no pass can run."""
        if self.blocked or not self.scheduler.has_work:
            return None
        live = self.slot_table.version
        version = self.scheduler.next_version(live)
        stamp = self.version if version == live else version
        self.memory.copy_blocks(self.cache.take_copies())
        schedule = self.scheduler.schedule(version, live=version == live, stamp=stamp)
        self.memory.copy_blocks(self.cache.take_restored())
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
        swap = None
        if schedule.version == self.slot_table.version:
            swap, self._untold_swap = self._untold_swap, None
        self.step_count += 1
        slot = self.slot_table.readable.slot_of(schedule.version)
        adapter_slot = self.adapters.slot_table.live if self.adapters is not None else None
        return _Launched(schedule, slot, adapter_slot, swap, samples, routed_experts, scores, done)

    def _collect(self, launched: _Launched) -> _Drawn:
        """Wait for the results of a pass, append the tokens to their sequences and end finished sequences."""
        with span("collect"):
            if launched.done is not None:
                launched.done.synchronize()
            draws, samples = launched.schedule.draws, launched.samples
            tokens, logprobs = samples.tokens.numpy(), samples.logprobs.numpy()
            finite = np.isfinite(logprobs)
            counts, may_end = self.rows.read(draws, tokens)
            if np.count_nonzero(finite) < len(finite):
                may_end = may_end | (counts & ~finite)
            for index in may_end.nonzero()[0].tolist():
                sequence = draws.cohort.sequences[index]
                if (reason := self.stop.reason(sequence, is_finite=finite[index])) is not None:
                    self.requests.finish(sequence, reason)
            self.scheduler.remember(launched.schedule)
            rows = counts.nonzero()[0]
            self.num_tokens += len(rows)
        return _Drawn(rows, tokens, logprobs)

    def _emit(self, launched: _Launched, drawn: _Drawn) -> TokenFrame:
        """Return the frame of a pass."""
        schedule, rows = launched.schedule, drawn.rows
        header = self._header(schedule.stamp, len(rows), launched.swap, schedule.starts, schedule.taken_over)
        request_ids, tokens, logprobs = schedule.draws.cohort.request_ids, drawn.tokens.astype(np.int32), drawn.logprobs
        if len(rows) < len(request_ids):
            request_ids, tokens, logprobs = (column[rows] for column in (request_ids, tokens, logprobs))
        extras = token_columns(launched.samples.columns, rows)
        if self.routed_experts is not None and launched.routed_experts is not None:
            extras |= routed_experts_columns(schedule, launched.routed_experts, self.routed_experts.dtype)
        if launched.scores is not None:
            extras |= launched.scores.columns()
        return TokenFrame(header, request_ids, tokens, logprobs, extras)

    def _tell_news(self) -> TokenFrame | None:
        """Return a frame without tokens that reports started groups and ended requests, or None if there are none."""
        if not self.requests.has_news and self._untold_swap is None:
            return None
        swap, self._untold_swap = self._untold_swap, None
        header = self._header(self.version, 0, swap)
        return TokenFrame(header, np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.float32))
