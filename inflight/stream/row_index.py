"""Which requests are under way, and where each has its tokens: arrays, so that a whole frame is looked up at once."""

import numpy as np

Found = tuple[np.ndarray, np.ndarray]


class RowIndex:
    """Maps ids of requests, u64, to their rows in a store, i64. The ids of a group follow one another."""

    def __init__(self) -> None:
        self._ids = np.empty(0, np.uint64)
        """In rising order."""
        self._rows = np.empty(0, np.int64)

    def add(self, first_id: int, rows: list[int]) -> None:
        """Requests first_id, first_id + 1, … have these rows. None of them is known yet."""
        ids = np.uint64(first_id) + np.arange(len(rows), dtype=np.uint64)
        at = self._place(first_id)
        self._ids = np.concatenate([self._ids[:at], ids, self._ids[at:]])
        self._rows = np.concatenate([self._rows[:at], np.array(rows, np.int64), self._rows[at:]])

    def remove(self, request_id: int) -> None:
        """This request, which is known, is not under way any more."""
        at = self._place(request_id)
        self._ids = np.concatenate([self._ids[:at], self._ids[at + 1 :]])
        self._rows = np.concatenate([self._rows[:at], self._rows[at + 1 :]])

    def find(self, request_ids: np.ndarray) -> Found:
        """u64[n] to bool[n], which of them are known, and i64[k], the rows of these. An id that is named again counts
        the first time alone."""
        if not len(self._ids):
            return np.zeros(len(request_ids), bool), np.empty(0, np.int64)
        places = np.searchsorted(self._ids, request_ids)
        places[places == len(self._ids)] = 0
        known = self._ids[places] == request_ids
        rows = self._rows[places[known]]
        if len(rows) > 1 and np.bincount(rows).max() > 1:
            _, first = np.unique(rows, return_index=True)
            known[np.delete(np.flatnonzero(known), first)] = False
            rows = rows[np.sort(first)]
        return known, rows

    def _place(self, request_id: int) -> int:
        return int(np.searchsorted(self._ids, np.uint64(request_id)))
