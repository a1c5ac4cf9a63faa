"""The tokens of unfinished requests, as columns.

Tokens of all requests arrive together, at most one for each request in a frame, and leave request by request. Each page
stores tokens of one request. So a few array operations add any frame, and memory grows with the number of unfinished
tokens.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

PAGE = 128
"""Number of tokens in a page, a power of two."""
_FIRST_PAGES = 64
_NUM_SENT = 2
"""Columns that every frame has; the others of COLUMNS_OF_ALL have one value for all of its tokens."""
COLUMNS_OF_ALL = {"token_ids": np.int32, "logprobs": np.float32, "weight_versions": np.int64, "sampled_at_ns": np.int64}


@dataclass(slots=True)
class StoredTokens:
    """The tokens of one request."""

    row: int
    """Its place among the requests of the store."""
    pages: list[int] = field(default_factory=list)
    num_values: dict[str, int] = field(default_factory=dict)
    """Maps the names of the optional columns that it asked for to the number of tokens that have a value."""


class TokenStore:
    """Columns token_ids i32, logprobs f32, weight_versions i64, sampled_at_ns i64, and the optional columns that
    requests ask for."""

    def __init__(self) -> None:
        self._columns = {name: np.empty(_FIRST_PAGES * PAGE, dtype) for name, dtype in COLUMNS_OF_ALL.items()}
        self._free_pages = list(range(_FIRST_PAGES))
        self._ends = np.zeros(_FIRST_PAGES, np.int64)
        """Maps the row of a request to the place of its next token; a multiple of PAGE: it needs another page."""
        self._free_rows = list(range(_FIRST_PAGES))
        self._of_row: dict[int, StoredTokens] = {}
        self._num_asking: Counter[str] = Counter()
        """Counts the requests that asked for an optional column."""

    @property
    def nbytes(self) -> int:
        return self._ends.nbytes + sum(column.nbytes for column in self._columns.values())

    def open(self, columns: list[str]) -> StoredTokens:
        """Return a place for the tokens of a request that asks for these optional columns."""
        if not self._free_rows:
            num_rows = len(self._ends)
            self._ends = np.concatenate([self._ends, np.zeros_like(self._ends)])
            self._free_rows = list(range(num_rows, 2 * num_rows))
        tokens = StoredTokens(self._free_rows.pop(), num_values=dict.fromkeys(columns, 0))
        self._of_row[tokens.row] = tokens
        self._num_asking.update(tokens.num_values.keys())
        return tokens

    def close(self, tokens: StoredTokens) -> None:
        """Free the place."""
        self._free_pages += tokens.pages
        self._free_rows.append(tokens.row)
        self._ends[tokens.row] = 0
        del self._of_row[tokens.row]
        self._num_asking.subtract(tokens.num_values.keys())

    def append(self, rows: np.ndarray, version: int, time_ns: int, columns: Mapping[str, np.ndarray]) -> None:
        """Append a token to each of these requests, named by their rows i64[n] and each at most once. columns:
        token_ids, logprobs and optional ones [n, …]. Optional ones for which no request of the store asked are skipped.
        """
        if len(columns) > _NUM_SENT:
            columns = {n: values for n, values in columns.items() if n in COLUMNS_OF_ALL or self._num_asking[n]}
        ends = self._ends[rows]
        (full,) = (ends & (PAGE - 1) == 0).nonzero()
        if len(full):
            for index, row in zip(full.tolist(), rows[full].tolist(), strict=True):
                page = self._take_page()
                self._of_row[row].pages.append(page)
                ends[index] = page * PAGE
        for name, values in columns.items():
            if name not in COLUMNS_OF_ALL:
                self._make_room(name, values)
            column = self._columns[name]
            if column.ndim > 1 and column.shape[1:] != values.shape[1:]:
                column[ends, : values.shape[1]] = values
            else:
                column[ends] = values
        self._columns["weight_versions"][ends] = version
        self._columns["sampled_at_ns"][ends] = time_ns
        if len(columns) > _NUM_SENT:
            self._count(rows, columns)
        self._ends[rows] = ends + 1

    def fill(self, tokens: StoredTokens, columns: Mapping[str, np.ndarray]) -> None:
        """Store all tokens so far of a request that has none here. columns: [T, …], as `read` returned them."""
        num_tokens = len(columns["token_ids"])
        for name in columns.keys() - COLUMNS_OF_ALL.keys():
            self._make_room(name, columns[name])
        for begin in range(0, num_tokens, PAGE):
            page = self._take_page()
            tokens.pages.append(page)
            for name, values in columns.items():
                part = values[begin : begin + PAGE]
                place = (slice(page * PAGE, page * PAGE + len(part)), *map(slice, part.shape[1:]))
                self._columns[name][place] = part
            self._ends[tokens.row] = page * PAGE + min(PAGE, num_tokens - begin)
        tokens.num_values |= dict.fromkeys(tokens.num_values.keys() & columns.keys(), num_tokens)

    def length(self, tokens: StoredTokens) -> int:
        """Return the number of tokens of a request so far."""
        if not tokens.pages:
            return 0
        return (len(tokens.pages) - 1) * PAGE + int(self._ends[tokens.row]) - tokens.pages[-1] * PAGE

    def read(self, tokens: StoredTokens, begin: int = 0) -> dict[str, np.ndarray]:
        """Return the columns of a request [T − begin], from this token on; an optional one only if every token has a
        value."""
        num_tokens = self.length(tokens)
        names = [
            *COLUMNS_OF_ALL,
            *(name for name, count in tokens.num_values.items() if num_tokens and count == num_tokens),
        ]
        first = begin // PAGE
        pages = np.array(tokens.pages[first:], np.int64) * PAGE
        places = (pages[:, None] + np.arange(PAGE)).ravel()[begin - first * PAGE : num_tokens - first * PAGE]
        return {name: self._columns[name].take(places, axis=0) for name in names}

    def _take_page(self) -> int:
        if not self._free_pages:
            num_pages = len(self._columns["token_ids"]) // PAGE
            self._columns = {name: np.concatenate([c, np.empty_like(c)]) for name, c in self._columns.items()}
            self._free_pages = list(range(num_pages, 2 * num_pages))
        return self._free_pages.pop()

    def _make_room(self, name: str, new: np.ndarray) -> None:
        """Make the optional column hold values of this type and width."""
        old = self._columns.get(name)
        dtype = new.dtype if old is None else np.promote_types(old.dtype, new.dtype)
        width = new.shape[1:] if old is None else tuple(map(max, old.shape[1:], new.shape[1:]))
        if old is None or (old.dtype, old.shape[1:]) != (dtype, width):
            self._columns[name] = column = np.zeros((len(self._columns["token_ids"]), *width), dtype)
            if old is not None:
                column[(slice(None), *map(slice, old.shape[1:]))] = old

    def _count(self, rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        for row in rows.tolist():
            counts = self._of_row[row].num_values
            for name in counts:
                counts[name] += name in columns
