"""What is found is what a dictionary finds, whatever came and went."""

import random

import numpy as np

from inflight.stream.row_index import RowIndex


def found_by(known: dict[int, int], ids: list[int]) -> tuple[list[bool], list[int]]:
    left = dict(known)
    rows = [left.pop(i, None) for i in ids]
    return [row is not None for row in rows], [row for row in rows if row is not None]


def test_requests_are_found_as_a_dictionary_finds_them():
    rng = random.Random(0)
    index, known, next_row = RowIndex(), dict[int, int](), 0
    for _ in range(400):
        first, count = rng.choice([rng.randrange(2000), 2**62 + rng.randrange(50)]), rng.randint(1, 8)
        if known.keys().isdisjoint(range(first, first + count)):
            rows = list(range(next_row, next_row + count))
            index.add(first, rows)
            known |= dict(zip(range(first, first + count), rows, strict=True))
            next_row += count
        for gone in rng.sample(sorted(known), min(len(known), rng.randint(0, 6))):
            index.remove(gone)
            del known[gone]
        ids = rng.sample([*known, *range(3000)], 20) + rng.sample([2**63 - 1, 2**64 - 1, 0], 2)
        if rng.random() < 0.3:
            ids += rng.sample(ids, 5)
        rng.shuffle(ids)
        of_ids, rows_found = index.find(np.array(ids, np.uint64))
        assert (of_ids.tolist(), rows_found.tolist()) == found_by(known, ids)
        assert rows_found.dtype == np.int64


def test_nothing_is_found_where_nothing_is():
    known, rows = RowIndex().find(np.array([1, 2], np.uint64))
    assert (known.tolist(), rows.tolist()) == ([False, False], [])
    assert [len(part) for part in RowIndex().find(np.empty(0, np.uint64))] == [0, 0]
