"""Lists the cache blocks that sequences still see, as one array for one copy to the device."""

import numpy as np
import torch

from inflight_kernels import _cpu


def list_pages(
    table_SB: np.ndarray, contexts_S: np.ndarray, firsts_S: np.ndarray | None, block_size: int
) -> np.ndarray:
    """Return the lists of S sequences as a CSR matrix, and the fill level of the last block of each: i32[2 · S + 1 +
    blocks]. It contains indptr[S + 1], last_page_len[S] (1 … block size) and the numbers of the blocks.

    table_SB: i32[S, B], the blocks of each. contexts_S: i32[S], its tokens, at least one. firsts_S: i32[S], its first
    listed block; None for the first of all. The last block of a sequence is always listed. NumPy makes the lists
    without C kernels, and for a table whose rows are not adjacent in memory.
    """
    library = _cpu.library()
    if library is not None and table_SB.flags.c_contiguous:
        size, width = table_SB.shape
        contexts_S = np.ascontiguousarray(contexts_S, np.int32)
        firsts_S = None if firsts_S is None else np.ascontiguousarray(firsts_S, np.int32)
        flat = np.empty(2 * size + 1 + size * width, np.int32)
        table, contexts, firsts, out = (
            None if array is None else torch.from_numpy(array).data_ptr()
            for array in (table_SB, contexts_S, firsts_S, flat)
        )
        if library.list_pages(table, width, contexts, firsts, size, block_size, out) == 0:
            return flat[: 2 * size + 1 + flat[size]]
    last_S = contexts_S - 1
    num_listed_S = last_S // block_size + 1
    # Entry i of the lists, of sequence s, is table[s, first[s] + i - indptr[s]].
    before_S = np.arange(0, table_SB.size, table_SB.shape[1])
    if firsts_S is not None:
        num_listed_S -= firsts_S
        before_S += firsts_S
    ends_S = np.add.accumulate(num_listed_S, dtype=np.int64)
    before_S[1:] -= ends_S[:-1]
    entries = before_S.repeat(num_listed_S)
    entries += np.arange(len(entries))
    return np.concatenate(([0], ends_S, last_S % block_size + 1, table_SB.ravel().take(entries)), dtype=np.int32)
