"""The generation loop around vLLM: commit → hand over → step → collect → emit.

Between two steps of vLLM a prepared version goes live (commit), and vLLM gets the sequences for which it has room (hand
over). After a step its tokens are appended to their sequences, and finished sequences end (collect). A frame contains
the results (emit). A step is scheduled, computed and read before the next one, so that all its tokens have one version.
"""

import logging
import math
import time
from typing import Any, NamedTuple, NoReturn

import numpy as np

from inflight.core.errors import BackendError, DeviceMemoryError
from inflight.core.frames import TokenFrame
from inflight.core.messages import Digests
from inflight.core.options import EngineOptions
from inflight.core.spans import span
from inflight.engine.backend import Backend, Execution, Load
from inflight.engine.loop.clocks import with_device_time
from inflight.engine.loop.headers import FrameHeaders
from inflight.engine.loop.outputs import token_columns
from inflight.engine.loop.requests import Requests
from inflight.engine.loop.sequence import Sequence
from inflight.engine.loop.stopping import StopCondition
from inflight.engine.model.loading import banned_ids
from inflight.engine.process.verbs import verb
from inflight.integrations.vllm_backend.build import Started, start
from inflight.integrations.vllm_backend.columns import Columns, asked
from inflight.integrations.vllm_backend.sampling import request_arguments
from inflight.integrations.vllm_backend.staged_slots import StagedSlots
from inflight.integrations.vllm_backend.updates import Updates
from inflight.integrations.vllm_backend.vllm_scheduler import VllmScheduler
from inflight.weights.comparison import ChecksumRequest
from inflight.weights.tensors import slot_views

logger = logging.getLogger("inflight.engine")

_POLL_S = 0.001
"""Interval at which an engine that has nothing to generate checks if a version is prepared."""


class VllmEngine(Backend):
    """Generates tokens with vLLM, in this process and the workers that it starts.

    The constructor raises BackendError, ModelLoadError, UnsupportedModelError, SharedMemoryError or DeviceMemoryError.
    `submit` raises InvalidRequestError, and `step` raises BackendError if vLLM has failed.
    """

    def __init__(self, options: EngineOptions, started: Started | None = None):
        """started: a vLLM engine; None starts one."""
        started = started or start(options)
        self.options = started.options
        self._started = started
        self.device = started.device
        self.vocab_size = started.vocab_size
        self.aliases = started.aliases
        self.slot_table: StagedSlots = started.slot_table
        self.adapter_slots: StagedSlots | None = started.adapter_slots
        self.execution = Execution(
            attention="vllm",
            fused=True,
            num_graphs=0,
            kv_cache_bytes=started.kv_cache_bytes,
            kv_cache_tokens=started.kv_blocks * int(started.config.cache_config.block_size),
        )
        self.scheduler: VllmScheduler = VllmScheduler(
            self.options.max_sequences, records_columns=started.records_columns
        )
        banned = banned_ids(None, started.media_ids, started.eos_ids, self.vocab_size)
        self._banned = [token for bounds in banned for token in range(*bounds)]
        self.requests = Requests(
            self.scheduler,
            self.slot_table,
            self.options,
            vocab_size=self.vocab_size,
            can_read_text=started.tokenizer is not None,
            banned=banned,
            media_ids=started.media_ids,
        )
        self.headers = FrameHeaders(self.requests)
        self.stop = StopCondition(started.eos_ids, started.tokenizer)
        self._updates = Updates(started, self.headers.stall_clock)
        self._num_reused_tokens = 0
        self._num_preemptions = 0
        self._preempted: dict[str, int] = {}
        """Maps vLLM's names of unfinished requests to the preemptions that are counted."""
        reason = started.reload_reason
        how = f"reloads weights by itself ({reason})" if reason else "new weights are prepared next to it and swapped"
        self.description = (
            f"{started.name} on {self.device}, {how}, up to {self.options.max_sequences} sequences of "
            f"{self.options.max_context:,} tokens, KV cache for {self.execution.kv_cache_tokens:,} tokens"
        )

    def close(self) -> None:
        """End vLLM's workers, and remove the slots' names. Safe to call twice."""
        self._started.core.shutdown()
        super().close()

    # ---- states -------------------------------------------------------------------------------------------------

    @verb()
    def sleep(self) -> None:
        """Free the memory of the KV cache. Raises BackendError with CUDA graphs, because they contain its addresses."""
        if self.device.type == "cuda" and self.options.cuda_graphs:
            raise BackendError(
                'sleep() cannot be had with backend="vllm" and CUDA graphs, which know where the KV cache lies: launch '
                "with cuda_graphs=False, or pause()"
            )
        if not self.asleep:
            self.scheduler.send_back(list(self.scheduler.running))
            self._started.call("abort_requests", self.scheduler.take_given_up())
            if not self._started.call("reset_prefix_cache"):
                raise BackendError("vLLM holds blocks of its KV cache that no request needs")
            self.asleep = True
            self._started.rpc("inflight_free")

    @verb()
    def wake(self) -> None:
        if self.asleep:
            missing = [why for why in self._started.rpc("inflight_allocate") if why]
            if missing:
                self._started.rpc("inflight_free")
                raise DeviceMemoryError(f"there is no memory for the KV cache: {missing[0]}; the engine sleeps on")
            self.asleep = False

    @verb()
    def digests(self, least: int) -> NoReturn:
        """Raise BackendError."""
        raise BackendError(
            'digests() cannot be had with backend="vllm", which computes with tensors that are fused, split and packed'
        )

    @verb()
    def checksums(self, asked: ChecksumRequest) -> list[Digests]:
        """Return checksums of the slot from which vLLM loaded the live version. Raises BackendError if it holds another
        version by now, or vLLM's weights are in no slot."""
        table = self.slot_table
        if table.whole is None or self._started.reload_reason:
            raise BackendError(
                f'version {table.version} of the weights cannot be compared with backend="vllm": vLLM holds it fused '
                "and packed alone; make the publisher before other weights are published, or take the inflight backend"
            )
        views = slot_views(table.slots[table.whole].buffer, table.layout)
        return [Digests(table.version, asked.of(views))]

    @property
    def idle(self) -> bool:
        return self._updates.preparing is None and super().idle

    def load(self) -> Load:
        started, theirs = self._started, self._started.scheduler
        free = theirs.kv_cache_manager.block_pool.get_num_free_blocks()
        return Load(
            num_waiting=self.scheduler.num_waiting,
            num_running=len(self.scheduler.running),
            num_preemptions=self._num_preemptions,
            kv_blocks=started.kv_blocks,
            kv_blocks_used=started.kv_blocks - free - 1,  # one block holds no tokens
            num_reused_tokens=self._num_reused_tokens,
        )

    # ---- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> TokenFrame | None:
        """Run one step of vLLM over the sequences that it has. Return a frame, or None if there is nothing to
        report."""
        started, running = self._started, self.scheduler.running
        if (swap := self._updates.advance(has_work=self.scheduler.has_work)) is not None:
            self.scheduler.send_back([name for name in started.unbegun() if name in running])
            num_in_flight = sum(bool(s.tokens) for s in running.values())
            self.headers.swapped(*swap, num_in_flight, has_work=self.scheduler.has_work)
        started.core.abort_requests(self.scheduler.take_given_up())
        if not self.blocked:
            for name, sequence, salt in self.scheduler.advance(self.slot_table.version, self.version):
                self._hand_over(name, sequence, salt)
        outputs: list[Any] = []
        columns: Columns = [], {}
        stepped = bool(running) and not self.blocked
        if stepped:
            with span("vllm", version=self.version, sequences=len(running)):
                outputs = started.call("get_output").outputs
                if any(asked(sequence.params) for sequence in running.values()):
                    columns = next((own for own in started.rpc("inflight_columns") if own is not None), columns)
            self.step_count += 1
            self._count_preemptions()
        elif self._updates.preparing is not None:
            time.sleep(_POLL_S)
        rows = [row for output in outputs for row in self._collect(output)]
        if not stepped:
            return self.headers.frame_without_tokens(self.version, self.step_count)
        starts = [row.sequence for row in rows if row.starts]
        taken_over = [sequence.prefix_taken_over() for sequence in starts if sequence.taken_over]
        swap = self.headers.take_swap()
        if swap is not None and self.device.type == "cuda":
            swap = with_device_time(swap, max(started.rpc("inflight_commit_ns")))
        header = self.headers.header(self.version, self.step_count, len(rows), swap, starts, taken_over)
        return TokenFrame(header, *_columns_of(rows, columns))

    def _count_preemptions(self) -> None:
        """Add the preemptions of the last step to the total. vLLM counts only unfinished requests."""
        requests = self._started.scheduler.requests
        preempted = {name: request.num_preemptions for name, request in requests.items() if request.num_preemptions}
        self._num_preemptions += sum(count - self._preempted.get(name, 0) for name, count in preempted.items())
        self._preempted = preempted

    def _hand_over(self, name: str, sequence: Sequence, salt: int) -> None:
        """Have vLLM start a sequence. If vLLM refuses it, the sequence ends with "error"; the others continue."""
        started = self._started
        try:
            sampling = request_arguments(sequence, started.eos_ids, self._banned)
            started.core.add_request(started.request(name, sequence, salt, sampling))
        except Exception as error:  # vLLM can raise any error
            reason = f"{type(error).__name__}: {error}"
            logger.error("vLLM has refused request %d, which ends: %s", sequence.request_id, reason)
            self.scheduler.running.pop(name)  # vLLM does not have it, so that it must not be aborted
            self.requests.finish(sequence, "error")

    def _collect(self, output: Any) -> list["_Row"]:
        """Append the tokens that a step drew for one request to its sequence, and end it if it is finished."""
        ended, running = output.finish_reason is not None, self.scheduler.running
        # vLLM has ended such a request itself, so that it must not be aborted.
        sequence = running.pop(output.request_id, None) if ended else running.get(output.request_id)
        if sequence is None:
            return []
        rows = []
        logprobs = output.new_logprobs
        if output.prefill_stats is not None and not sequence.started:
            sequence.taken_over = output.prefill_stats.num_cached_tokens
            sequence.taken_over_version = self.scheduler.salts[sequence.request_id]
            self._num_reused_tokens += min(sequence.taken_over, len(sequence.prompt))
        for index, token in enumerate(output.new_token_ids):
            logprob = float(logprobs.logprobs[index, 0])
            rows.append(_Row(sequence, output.request_id, token, logprob, logprobs, index, starts=not sequence.started))
            sequence.started = True
            sequence.tokens.append(token)
            if (reason := self.stop.reason(sequence, is_finite=math.isfinite(logprob))) is not None:
                self.requests.finish(sequence, reason)
                break
        if ended and not sequence.finished:  # vLLM has its own reason
            logger.warning("vLLM ended request %d: %s", sequence.request_id, output.finish_reason)
            self.requests.finish(sequence, "error")
        self.num_tokens += len(rows)
        return rows


class _Row(NamedTuple):
    """A token that a step drew, and the place of its log-probabilities."""

    sequence: Sequence
    name: str
    """vLLM's name of the request."""
    token: int
    logprob: float
    logprobs: Any
    """vLLM's lists of log-probabilities: the drawn token first, then the most likely ones."""
    index: int
    starts: bool
    """The token is the first one of its sequence on this engine."""


def _columns_of(rows: list[_Row], columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return the arrays of a frame: request ids, tokens, log-probabilities and optional columns."""
    names, recorded = columns
    place = {name: index for index, name in enumerate(names)}
    optional: dict[str, np.ndarray] = {}
    if most := max((row.sequence.params.top_logprobs for row in rows), default=0):
        ids, logprobs = np.full((len(rows), most), -1, np.int32), np.full((len(rows), most), -np.inf, np.float32)
        for at, row in enumerate(rows):
            count = row.sequence.params.top_logprobs
            ids[at, :count] = row.logprobs.logprob_token_ids[row.index, 1 : count + 1]
            logprobs[at, :count] = row.logprobs.logprobs[row.index, 1 : count + 1]
        optional = {"top_token_ids": ids, "top_logprobs": logprobs}
    return (
        np.array([row.sequence.request_id for row in rows], np.uint64),
        np.array([row.token for row in rows], np.int32),
        np.array([row.logprob for row in rows], np.float32),
        optional | token_columns(recorded, (place[row.name] for row in rows)),
    )
