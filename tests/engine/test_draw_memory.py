"""Memory of a draw on a GPU, counted with tensors that have a device and no data."""

from typing import Any

import numpy as np
import pytest
import torch
from inflight_kernels import _filters_triton, _sampling_triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inflight.core.sampling import SamplingParams
from inflight.engine.loop import sampler as sampler_module
from inflight.engine.loop.sampler import Sampler
from inflight.engine.loop.sequence import Cohort, Draws, Sequence

ROWS, VOCABULARY = 64, 151_936
FILTERS = {"top-p": {"top_p": 0.95}, "top-k": {"top_k": 40}, "min-p": {"min_p": 0.05}}


class Allocated(TorchDispatchMode):
    """Adds up the bytes of all storages that operations make. None of them counts as freed."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(values: Any) -> dict[int, int]:
            tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
            return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

        result = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        self.nbytes += sum(n for storage, n in storages(result).items() if storage not in given)
        return result


class NoKernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: None


def bytes_of_a_draw(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, **options: Any) -> tuple[int, int]:
    """Return the bytes that a draw with these sampling parameters makes, and the bytes of its logits."""
    params = SamplingParams(**options)
    sequences: Any = [Sequence.__new__(Sequence) for _ in range(ROWS)]
    for sequence in sequences:
        sequence.params = params
    counts, zeros = np.arange(ROWS), np.zeros(ROWS, np.int64)
    temperatures, special = np.ones(ROWS, np.float32), list(range(ROWS)) if options else []
    names: dict[str, Any] = {"epoch": 0, "sequences": sequences, "appends": [], "rows": counts, "limits": zeros}
    names |= {"request_ids": zeros, "entered": zeros, "stop_ids": zeros[None], "watched": zeros, "seeds": zeros}
    cohort = Cohort(**names, temperatures=temperatures, special=special)

    def without_data(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = values.shape if isinstance(values, torch.Tensor) else (len(values),)
        return torch.empty(shape, dtype=dtype or values.dtype, device=device)

    monkeypatch.setattr(sampler_module, "to_device", without_data)
    monkeypatch.setattr(_filters_triton, "cut_kernel", NoKernel())
    monkeypatch.setattr(_sampling_triton, "block_kernel", NoKernel())
    monkeypatch.setattr(_sampling_triton, "draw_kernel", NoKernel())
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(ROWS, VOCABULARY, dtype=dtype, device="cuda")
        sampler = Sampler(VOCABULARY, frozenset({0}), torch.empty(ROWS, dtype=torch.int64, device="cuda"))
        with Allocated() as allocated:
            sampler.sample(logits, Draws(cohort, counts, counts))
    return allocated.nbytes, logits.nbytes


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_filtered_draw_makes_at_most_three_times_its_logits(monkeypatch, dtype, name):
    used, logits = bytes_of_a_draw(monkeypatch, dtype, **FILTERS[name])
    assert used <= 3 * logits
    assert used >= 2 * logits or dtype is torch.float32  # the copy in fp32 is counted


def test_a_draw_without_filters_makes_hardly_anything(monkeypatch):
    used, logits = bytes_of_a_draw(monkeypatch, torch.bfloat16)
    assert used < 0.05 * logits


def test_sorting_would_be_counted(monkeypatch):
    monkeypatch.setattr(_filters_triton, "cut_logits", lambda logits, *filters: logits.sort(stable=True))
    used, logits = bytes_of_a_draw(monkeypatch, torch.bfloat16, top_p=0.95)
    assert used > 3 * logits
