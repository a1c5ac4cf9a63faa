"""FlashInfer's wrappers as far as the engine uses them, in PyTorch: the same signatures, the same buffers.

A wrapper for CUDA graphs reads its page lists where `run` finds them, not where `plan` was given them, as a replayed
graph does.
"""

import math

import torch


class _Wrapper:
    by_cuda_cores = False

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str):
        assert layout == "NHD"
        assert backend in ("fa2", "fa3")
        assert workspace.dtype == torch.uint8

    def _set(self, q_heads, kv_heads, head_dim, page_size, window_left, logits_soft_cap, sm_scale, dtypes) -> None:
        assert dtypes[0] == dtypes[1]
        if self.by_cuda_cores and q_heads // kv_heads not in (1, 2, 3, 4, 8):
            raise RuntimeError(f"Unsupported group_size: {q_heads // kv_heads}")
        self._shape = (q_heads, kv_heads, head_dim, page_size)
        self._window_left, self._softcap, self._scale, self._dtype = window_left, logits_soft_cap, sm_scale, dtypes[0]

    def _attend(self, query, pages, starts, indptr, indices, last_page_len, causal, out) -> None:
        """Every sequence on its own, in float64."""
        q_heads, kv_heads, head_dim, page_size = self._shape
        assert query.dtype == self._dtype
        assert query.shape == (starts[-1], q_heads, head_dim)
        for row in range(len(indptr) - 1):
            blocks = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(blocks) - 1) * page_size + int(last_page_len[row])
            keys, values = (part[blocks].reshape(-1, kv_heads, head_dim)[:length].double() for part in pages)
            keys, values = (part.repeat_interleave(q_heads // kv_heads, 1) for part in (keys, values))
            mine = query[starts[row] : starts[row + 1]].double()
            scores = torch.einsum("qhd,khd->hqk", mine, keys) * self._scale
            if self._softcap:
                scores = self._softcap * torch.tanh(scores / self._softcap)
            at = torch.arange(length - len(mine), length)[:, None]
            seen = torch.arange(length)[None] <= (at if causal else length)
            if self._window_left >= 0:
                seen &= torch.arange(length)[None] >= at - self._window_left
            weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
            out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self.by_cuda_cores = not use_tensor_cores
        self._graph = use_cuda_graph
        self._lists = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer) -> None:
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left,
        logits_soft_cap, sm_scale, q_data_type, kv_data_type, non_blocking,
    ) -> None:  # fmt: skip
        dtypes = q_data_type, kv_data_type
        self._set(num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap, sm_scale, dtypes)
        if self._graph:
            assert len(last_page_len) == len(self._lists[2]), "the number of sequences of a graph is fixed"
            for buffer, given in zip(self._lists, (indptr, indices, last_page_len), strict=True):
                buffer[: len(given)] = given
        else:
            self._lists = indptr, indices, last_page_len

    def run(self, query, pages, *, out) -> None:
        indptr, indices, last_page_len = self._lists
        starts = torch.arange(len(indptr))
        self._attend(query, pages, starts, indptr, indices, last_page_len, False, out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type,
        non_blocking,
    ) -> None:  # fmt: skip
        assert causal
        dtypes = q_data_type, kv_data_type
        self._set(num_qo_heads, num_kv_heads, head_dim_qk, page_size, window_left, logits_soft_cap, sm_scale, dtypes)
        self._lists = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len

    def run(self, query, pages, *, out) -> None:
        self._attend(query, pages, *self._lists, True, out)


def fast_decode_plan(
    wrapper, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left,
    logits_soft_cap, sm_scale, q_data_type, kv_data_type, non_blocking,
) -> None:  # fmt: skip
    """Plans and copies nothing: the page lists are where the graph reads them."""
    assert len(last_page_len) == len(wrapper._lists[2])
