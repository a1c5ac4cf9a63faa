"""Maps unfinished requests to the places of their tokens, in arrays, so that a whole frame is looked up at once."""

from collections import Counter

import numpy as np

Found = tuple[np.ndarray, np.ndarray]

_BITS = 10
_PAGE = 1 << _BITS
"""Number of ids in a page."""
_MOST_JOINED = 8
"""Maximum number of neighbouring pages that are joined for one lookup."""
_UNKNOWN = -1


class RowIndex:
    """Maps ids of requests, u64, to their rows in a store, i64. The ids of a group are consecutive, and the ids of all
    unfinished requests are close together, so that a few pages of a table contain them."""

    def __init__(self) -> None:
        self._pages: dict[int, np.ndarray] = {}
        """Maps the number of a page to the rows i64[_PAGE] of its ids, or _UNKNOWN."""
        self._num_known: Counter[int] = Counter()
        """Maps the number of a page to the number of its known ids."""
        self._last: dict[str, tuple[bytes, Found]] = {}
        """Maps each engine to the ids of its last frame and the result of their lookup."""

    def add(self, first_id: int, rows: list[int]) -> None:
        """Map requests first_id, first_id + 1, … to these rows. All of them must be unknown."""
        self._last.clear()
        while rows:
            page, begin = first_id >> _BITS, first_id % _PAGE
            fitting, rows = rows[: _PAGE - begin], rows[_PAGE - begin :]
            if page not in self._pages:
                self._pages[page] = np.full(_PAGE, _UNKNOWN, np.int64)
            self._pages[page][begin : begin + len(fitting)] = fitting
            self._num_known[page] += len(fitting)
            first_id += len(fitting)

    def remove(self, request_id: int) -> None:
        """Remove a known request that has ended."""
        self._last.clear()
        page = request_id >> _BITS
        self._pages[page][request_id % _PAGE] = _UNKNOWN
        self._num_known[page] -= 1
        if not self._num_known[page]:
            del self._pages[page], self._num_known[page]

    def find(self, request_ids: np.ndarray) -> Found:
        """Map ids u64[n] to bool[n], True for known ids, and i64[k], the rows of the known ids. Only the first
        occurrence of an id counts."""
        rows = self._rows(request_ids)
        known = rows != _UNKNOWN
        rows = rows[known]
        if len(rows) > 1 and np.bincount(rows).max() > 1:
            _, first = np.unique(rows, return_index=True)
            known[np.delete(np.flatnonzero(known), first)] = False
            rows = rows[np.sort(first)]
        return known, rows

    def find_again(self, engine_id: str, request_ids: np.ndarray) -> Found:
        """Do the same for a frame of an engine, faster if its last frame had the same ids."""
        key, last = request_ids.tobytes(), self._last.get(engine_id)
        if last is None or last[0] != key:
            self._last[engine_id] = last = key, self.find(request_ids)
        return last[1]

    def _rows(self, request_ids: np.ndarray) -> np.ndarray:
        """Return the rows i64[n], _UNKNOWN for unknown ids."""
        if not len(request_ids):
            return np.empty(0, np.int64)
        first, last = int(request_ids.min()) >> _BITS, int(request_ids.max()) >> _BITS
        if last - first < _MOST_JOINED:
            table = np.concatenate([self._pages.get(page, _NOTHING) for page in range(first, last + 1)])
            return table[request_ids - np.uint64(first << _BITS)]
        rows = np.full(len(request_ids), _UNKNOWN, np.int64)
        for page in np.unique(request_ids >> np.uint64(_BITS)).tolist():
            if page in self._pages:
                here = request_ids >> np.uint64(_BITS) == page
                rows[here] = self._pages[page][request_ids[here] % np.uint64(_PAGE)]
        return rows


_NOTHING = np.full(_PAGE, _UNKNOWN, np.int64)
