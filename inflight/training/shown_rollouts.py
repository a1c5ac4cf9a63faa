"""Chooses a few rollouts of a step and makes the event that shows them.

An episode is shown with all of its token sequences. They can be in several micro-batches, or in the parts of several
policies. Bounds keep the event small.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch

from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout, Turn, samples_of
from inflight.observability.events import Sample, Samples, SampleTurn, rounded
from inflight.training.data.batch import PackedBatch
from inflight.training.data.texts import Texts

_EVERY_S = 5.0
_SAMPLES = 3
_PROMPT = 1000
_TOKENS = 160
"""Most tokens of a rollout without turns, and of a turn."""
_EPISODE_TOKENS = 1024
_EPISODE_TURNS = 64
_EPISODE_SEQUENCES = 16


@dataclass(slots=True)
class _Chosen:
    """A chosen rollout, or the token sequences of a chosen episode."""

    sequences: dict[int, tuple[Rollout, np.ndarray]] = field(default_factory=dict)
    """By request: a sequence, and log ρ f32[T] of its tokens, NaN outside the loss."""
    left_out: set[int] = field(default_factory=set)
    """Requests of the sequences above the bound."""

    def add(self, rollout: Rollout, log_ratios: np.ndarray) -> None:
        """Add a sequence, unless it is known."""
        if rollout.request_id in self.sequences:
            return
        if len(self.sequences) < _EPISODE_SEQUENCES:
            self.sequences[rollout.request_id] = rollout, log_ratios
        else:
            self.left_out.add(rollout.request_id)


class ShownRollouts:
    """A choice of rollouts, made every five seconds. It grows by the token sequences of its episodes until it is taken.
    Any thread can take it."""

    def __init__(self, texts: Texts):
        self._texts = texts
        self._chosen_s = 0.0
        self._lock = threading.Lock()
        self._chosen: dict[tuple[int, int], _Chosen] = {}
        self._time, self._trainer_version = 0.0, None

    def observe(self, batch: PackedBatch, rows: torch.Tensor, log_ratios: np.ndarray) -> Samples | None:
        """Note the rollouts of a (micro-)batch. rows: i64[n], its tokens in the loss. log_ratios: f32[n]. Returns
        the event of a previous choice that was not taken, if a new one begins."""
        is_due = now_ns() / 1e9 - self._chosen_s > _EVERY_S
        before = self.take() if is_due else None
        with self._lock:
            if is_due:
                self._chosen_s = now_ns() / 1e9
                self._time, self._trainer_version = round(time.time(), 3), batch.trainer_version
                samples = samples_of(batch.rollouts)
                spread = np.linspace(0, len(samples) - 1, min(_SAMPLES, len(samples))).astype(int).tolist()
                self._chosen = {_key(samples[index][0]): _Chosen() for index in spread}
            found = [index for index, rollout in enumerate(batch.rollouts) if _key(rollout) in self._chosen]
            if found:
                of_rows = np.full(len(batch.input_ids), np.nan, np.float32)
                of_rows[rows.cpu().numpy()] = log_ratios
                ends = batch.cu_seqlens.tolist()[1:]
                for index in found:
                    rollout, end = batch.rollouts[index], ends[index]
                    self._chosen[_key(rollout)].add(rollout, of_rows[end - len(rollout.token_ids) : end])
        return before

    def take(self) -> Samples | None:
        """Return the event of the choice, which ends; None without a choice."""
        with self._lock:
            chosen, self._chosen = self._chosen, {}
            of_choice = {"time": self._time, "trainer_version": self._trainer_version}
        shown = [sample for one in chosen.values() for sample in self._shown(one)]
        return Samples(**of_choice, rollouts=shown) if shown else None

    def _shown(self, chosen: _Chosen) -> list[Sample]:
        sequences = list(chosen.sequences.values())
        turns = [rollout.turns[: _EPISODE_TURNS // len(sequences)] for rollout, _ in sequences]
        most = min(_TOKENS, _EPISODE_TOKENS // max(1, sum(map(len, turns))))
        times = [turn.began_ns for rollout, _ in sequences for turn in rollout.turns if turn.began_ns]
        return [
            Sample(
                prompt="" if _parent(rollout) in chosen.sequences else rollout.prompt[-_PROMPT:],
                tokens=self._texts.of_tokens(rollout.token_ids[places].tolist()),
                versions=np.array(rollout.drawn_versions, object)[places].tolist(),
                log_ratios=[rounded(value) if isfinite(value) else None for value in log_ratios[places].tolist()],
                reward=None if rollout.reward is None else float(rollout.reward),
                finish_reason=rollout.finish_reason,
                num_tokens=len(rollout.token_ids),
                request_id=rollout.request_id,
                group_id=rollout.group_id,
                sample=rollout.sample,
                adapter=rollout.adapter or "",
                turns=[_turn(turn, most, min(times, default=0)) for turn in shown],
                num_turns=len(rollout.turns),
                num_sequences=len(sequences) + len(chosen.left_out) if rollout.turns else 0,
                forked_from=rollout.forked_from,
            )
            for (rollout, log_ratios), shown in zip(sequences, turns, strict=True)
            for places in [_places(rollout, shown, most)]
        ]


def _key(rollout: Rollout) -> tuple[int, int]:
    """Return the same key for all token sequences of an episode, and an own key for any other rollout."""
    return (rollout.group_id, rollout.sample) if rollout.turns else (-1, id(rollout))


def _parent(rollout: Rollout) -> int | None:
    return rollout.forked_from[0] if rollout.turns and rollout.forked_from is not None else None


def _places(rollout: Rollout, turns: Sequence[Turn], most: int) -> np.ndarray:
    """Return i64[…], the indices of the shown tokens: the first ones of the rollout, or of each of these turns."""
    ranges = [(turn.begin, turn.end) for turn in turns] or [(0, len(rollout.token_ids))]
    return np.concatenate([np.arange(begin, min(end, begin + most)) for begin, end in ranges])


def _turn(turn: Turn, most: int, first_ns: int) -> SampleTurn:
    """first_ns: time of the request of the episode's first turn."""
    num_tokens = turn.end - turn.begin
    began_s, ended_s = (round((ns - first_ns) / 1e9, 3) if ns else None for ns in (turn.began_ns, turn.ended_ns))
    return SampleTurn(
        drawn=turn.drawn,
        num_tokens=num_tokens,
        num_left_out=max(0, num_tokens - most),
        reward=turn.reward,
        finish_reason=turn.finish_reason,
        began_s=began_s,
        ended_s=ended_s,
    )
