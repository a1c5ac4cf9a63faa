"""Attention over latents equals plain attention over the same keys, in C and in PyTorch."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inflight_kernels import _cpu, latent, latent_attention
from inflight_kernels.latent import empty_latents_for_cpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("processor")


def plain(query: torch.Tensor, keys_LD: torch.Tensor, value_dim: int, scale: float, window: int | None) -> torch.Tensor:
    """Attention f64[C, H, Dv] of the last C tokens of one sequence, query by query."""
    rows, length = [], len(keys_LD)
    for index, query_HD in enumerate(query.double()):
        end = length - len(query) + index + 1
        seen_LD = keys_LD[0 if window is None else max(0, end - window) : end].double()
        rows.append(torch.softmax(query_HD @ seen_LD.T * scale, -1) @ seen_LD[:, :value_dim])
    return torch.stack(rows)


@pytest.mark.medium
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    chunks=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 90)), min_size=1, max_size=5),
    heads=st.sampled_from([1, 3, 8, 16]),
    dims=st.sampled_from([(24, 16), (32, 16), (144, 128), (576, 512), (21, 13)]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    scores=st.sampled_from([1, 2**26]),
    in_c=st.booleans(),
    seed=st.integers(0, 100),
)
def test_latent_attention_equals_plain_attention(dtype, chunks, heads, dims, window, scores, in_c, seed):
    torch.manual_seed(seed)
    counts, contexts = [count for count, _ in chunks], [count + before for count, before in chunks]
    used = [-(-context // 16) for context in contexts]
    blocks = sum(used) + 2
    cache = empty_latents_for_cpu(blocks, dims[0], dtype)
    cache.fill_(float("nan"))  # also after the ends of sequences
    order = (torch.randperm(blocks - 2) + 1).tolist()
    table = torch.full((len(chunks), max(used) + 1), blocks - 1, dtype=torch.int32)
    query = torch.randn(sum(counts), heads, dims[0]).to(dtype)
    expected = []
    for row, context in enumerate(contexts):
        table[row, : used[row]] = torch.tensor([order.pop() for _ in range(used[row])])
        keys = torch.randn(context, dims[0]).to(dtype)
        index = torch.arange(context)
        cache[table[row, index // 16].long(), index % 16] = keys
        if window is not None:  # blocks before the window are freed
            table[row, : max(0, contexts[row] - counts[row] + 1 - window) // 16] = blocks - 1
        own = query[sum(counts[:row]) : sum(counts[: row + 1])]
        expected.append(plain(own, keys, dims[1], 0.3, window))
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    options = {"value_dim": dims[1], "scale": 0.3, "window": window}
    with patch.object(latent, "_MOST_SCORES", scores), patch.object(_cpu, "takes", _cpu.takes if in_c else never):
        out = latent_attention(query, cache, table, starts, torch.tensor(contexts, dtype=torch.int32), **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def never(*_: torch.Tensor) -> bool:
    return False


def test_a_row_is_the_same_whatever_is_beside_it():
    torch.manual_seed(0)
    cache, query = torch.randn(9, 16, 48), torch.randn(6, 5, 48)
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)
    starts, contexts = torch.tensor([0, 1, 5, 6], dtype=torch.int32), torch.tensor([40, 9, 33], dtype=torch.int32)
    options = {"value_dim": 32, "scale": 0.2}
    together = latent_attention(query, cache, tables, starts, contexts, **options)
    last = latent_attention(query[5:], cache, tables[2:], torch.tensor([0, 1]).int(), contexts[2:], **options)
    assert torch.equal(together[5:], last)


def test_shapes_that_do_not_fit_are_refused():
    cache, ones = torch.zeros(2, 16, 24), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="D of at least 16"):
        latent_attention(torch.zeros(1, 4, 16), cache, ones[None], ones, ones[:1], value_dim=16, scale=1.0)
