"""Columns about the running sequences, indexed by batch row, from which passes are made.

A sequence has a row while it runs. Values that change with every token are stored here alone, and a sequence reads them
from here (`Sequence.length`). Other values are written when a sequence enters its row, or when the scheduler has worked
on it. So a decoding pass in which nothing joins or leaves is a few operations on arrays. The scheduler works only on
rows with something to do: a block to take or to remember, new weights, an end.

R batch rows; B largest number of blocks of a sequence.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from inflight.core.columns import asked_columns
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.kinds import NO_BLOCK
from inflight.engine.loop.sequence import Cohort, Draws, Sequence

NOBODY = np.uint64(2**64 - 1)
"""The request id of an empty row; no request has it."""
NOT_PINNED = -1
"""The pin of a row whose sequence draws under the live version."""
_NO_ADAPTER = -1
_STOP_IDS = 8
"""Stop ids of a row that are compared at once. If a row has more, each of its tokens is checked alone."""
_NO_TOKEN = -1
PREFILL = 0
"""The regime of a row whose sequence has not drawn in it."""


class Rows:
    """The batch rows of an engine and their sequences."""

    def __init__(
        self,
        count: int,
        *,
        num_tables: int,
        max_blocks: int,
        eos_ids: Collection[int] = (),
        adapters: Seq[str] = (),
    ):
        """count: R. num_tables: kinds of state with block tables of B = max_blocks. eos_ids: end every sample that does
        not ignore them. adapters: names; a column has their places in this list."""
        self._eos_ids = frozenset(eos_ids)
        self._adapters = {name: index for index, name in enumerate(adapters)}
        self._free = list(range(count - 1, -1, -1))
        self.epoch = 0
        """Number of sequences that entered or left so far."""
        self.sequences: Any = np.full(count, None, object)
        """The sequence in each row, or None."""
        self.request_ids = np.full(count, NOBODY, np.uint64)
        self.entered = np.zeros(count, np.int64)
        """The epoch in which each entered, 0 for an empty row. (Ids of requests that have ended can be used again.)"""
        self.lengths = np.zeros(count, np.int64)
        """Tokens so far, drawn and not yet read ones included."""
        self.known = np.zeros(count, np.int64)
        """The tokens among them whose ids this process knows."""
        self.limits = np.zeros(count, np.int64)
        """Maximum length of the whole sample, 0 for an empty row."""
        self.regimes = np.zeros(count, np.int64)
        """The scheduler's number for the version and the stamp of the last pass in which it drew, or PREFILL. After a
        draw its last token is in the device state of the row, and all tokens before it are computed."""
        self.pins = np.zeros(count, np.int64)
        """The version that draws all of its tokens, or NOT_PINNED."""
        self.reserved = np.zeros(count, np.int64)
        """The length up to which it needs no further blocks, if tokens are computed one by one."""
        self.fills = np.zeros(count, np.int64)
        """The number of computed and known tokens at which more full blocks enter the prefix cache."""
        self.num_blocks = np.zeros(count, np.int64)
        self.tables = [np.full((count, max_blocks), NO_BLOCK, np.int32) for _ in range(num_tables)]
        """Block numbers i32[R, B] for each kind. Numbers of blocks that left a sliding window stay unread."""
        self.adapters = np.zeros(count, np.int32)
        """The place of its adapter, −1 for none."""
        self.states = np.full(count, NO_BLOCK, np.int64)
        """Its state, in models with layers that keep one per sequence."""
        self.seeds = np.zeros(count, np.int64)
        self.temperatures = np.zeros(count, np.float32)
        self.plain = np.zeros(count, bool)
        """Its draws need only a temperature and a seed."""
        self.stop_ids = np.full((_STOP_IDS, count), _NO_TOKEN, np.int64)
        self.watched = np.zeros(count, bool)
        """Each of its tokens can end it: it has stop strings, or more stop ids than are compared."""
        self._traits: tuple[SamplingParams, bool, bool, np.ndarray] | None = None
        """The parameters of the sequence that entered last, with their values of `plain`, `watched` and `stop_ids`."""
        self._numbers, self._all = np.arange(count), np.ones(count, bool)
        self._cohort = self._make_cohort(self._numbers[:0])
        """The sequences that drew last."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a row. One must be free."""
        row, params = self._free.pop(), sequence.params
        sequence.rows, sequence.batch_row = self, row
        self.epoch += 1
        self.entered[row] = self.epoch
        self.sequences[row], self.request_ids[row] = sequence, sequence.request_id
        self.known[row] = sequence.num_known
        self.lengths[row] = sequence.num_known + sequence.num_unread
        self.limits[row] = len(sequence.prompt) + sequence.max_tokens
        self.regimes[row] = PREFILL
        self.pins[row] = NOT_PINNED if sequence.pin is None else sequence.pin
        self.reserved[row] = self.fills[row] = self.num_blocks[row] = 0
        self.adapters[row] = _NO_ADAPTER if sequence.adapter is None else self._adapters[sequence.adapter]
        self.seeds[row], self.temperatures[row] = sequence.seed, params.temperature
        self.plain[row], self.watched[row], self.stop_ids[:, row] = self._traits_of(params)
        self.update_blocks(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Free the row of a sequence."""
        row = sequence.batch_row
        sequence.num_unread = int(self.lengths[row] - self.known[row])
        sequence.rows, sequence.batch_row = None, -1
        self.epoch += 1
        self.entered[row] = self.limits[row] = 0
        self.sequences[row], self.request_ids[row] = None, NOBODY
        self._free.append(row)

    def update_blocks(self, sequence: Sequence) -> None:
        """Copy the blocks of a sequence that holds more than before, or that has just entered its row."""
        row, holding = sequence.batch_row, sequence.holding
        paged, fixed = holding.blocks[: len(self.tables)], holding.blocks[len(self.tables) :]
        known, count = self.num_blocks[row], len(paged[0]) if paged else 0
        if count > known:
            for table, blocks in zip(self.tables, paged, strict=True):
                table[row, known:count] = blocks[known:]
            self.num_blocks[row] = count
        for blocks in fixed:
            self.states[row] = blocks[0] if blocks else NO_BLOCK

    def add_blocks(self, rows: np.ndarray, blocks: list[list[int]], block_size: int) -> None:
        """Add one more block of each paged kind to the sequences in these rows i64[N]: N blocks each."""
        counts = self.num_blocks[rows]
        for table, more in zip(self.tables, blocks, strict=True):
            table[rows, counts] = more
        self.num_blocks[rows] = counts + 1
        self.reserved[rows] += block_size

    def draw(self, rows: np.ndarray, chunks: np.ndarray, regime: int) -> Draws:
        """Let each of these rows i64[M] draw a token in the next pass, after chunk i64[M] of it."""
        drew_last = self._cohort.rows
        if self._cohort.epoch != self.epoch or not (drew_last is rows or np.array_equal(drew_last, rows)):
            self._cohort = self._make_cohort(rows)
        positions = self.lengths[rows]
        self.lengths[rows] = positions + 1
        self.regimes[rows] = regime
        return Draws(self._cohort, chunks, positions)

    def read(self, draws: Draws, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append the tokens i64[M] that a pass drew to their sequences. Returns bool[M] for draws that count, because
        their sequences had not ended before, and bool[M] for draws after which a sequence might end."""
        cohort, rows = draws.cohort, draws.cohort.rows
        here = self._still_there(cohort, len(cohort))
        known = self.known[rows] + here
        self.known[rows] = known
        ends = cohort.watched | (known >= cohort.limits) | np.logical_or.reduce(cohort.stop_ids == tokens)
        if np.count_nonzero(here) == len(here):
            for append, token in zip(cohort.appends, tokens.tolist(), strict=True):
                append(token)
            return here, ends
        counts = here.copy()
        for index, (sequence, token) in enumerate(zip(cohort.sequences, tokens.tolist(), strict=True)):
            if not here[index]:  # it ended, or lost its row, while the pass ran
                sequence.num_unread -= 1
                counts[index] = not sequence.finished
            if counts[index]:
                sequence.tokens.append(token)
        return counts, counts & (ends | ~here)

    def are_full(self, cohort: Cohort, count: int) -> np.ndarray:
        """Return bool[count] for the first sequences of a cohort, after their draws were read: True if they still have
        their rows, and full blocks for the prefix cache."""
        rows = cohort.rows[:count]
        computed = np.minimum(self.lengths[rows] - 1, self.known[rows])
        return (computed >= self.fills[rows]) & self._still_there(cohort, count)

    def _still_there(self, cohort: Cohort, count: int) -> np.ndarray:
        """Return bool[count]: True for the first sequences of a cohort that still have their rows."""
        if cohort.epoch == self.epoch:
            return self._all[:count]
        return self.entered[cohort.rows[:count]] == cohort.entered[:count]

    def _traits_of(self, params: SamplingParams) -> tuple[bool, bool, np.ndarray]:
        """Return the values of `plain`, `watched` and `stop_ids` for a row with these parameters."""
        if self._traits is None or self._traits[0] is not params:  # the samples of a prompt have the same
            ids = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, *self._eos_ids}
            watched, stop_ids = bool(params.stop) or len(ids) > _STOP_IDS, np.full(_STOP_IDS, _NO_TOKEN)
            if not watched:
                stop_ids[: len(ids)] = list(ids)
            self._traits = params, is_plain(params), watched, stop_ids
        return self._traits[1:]

    def _make_cohort(self, rows: np.ndarray) -> Cohort:
        stop_ids, sequences = self.stop_ids[:, rows], self.sequences[rows].tolist()
        return Cohort(
            epoch=self.epoch,
            sequences=sequences,
            appends=[sequence.tokens.append for sequence in sequences],
            rows=rows,
            request_ids=self.request_ids[rows],
            entered=self.entered[rows],
            limits=self.limits[rows],
            stop_ids=stop_ids[(stop_ids != _NO_TOKEN).any(1)],
            watched=self.watched[rows],
            seeds=self.seeds[rows],
            temperatures=self.temperatures[rows],
            special=np.flatnonzero(~self.plain[rows]).tolist(),
        )


def is_plain(params: SamplingParams) -> bool:
    """Return True if a draw needs only a temperature and a seed, and records only its log-probability."""
    return not (params.adjusted or params.filtered or params.return_sampling_mask or asked_columns(params))
