"""Measures what the C kernels and the sampler's filters take beside what PyTorch has for the same, on one core.

    python benchmarks/cpu_kernels.py [FILE [PROCESSOR]]

PROCESSOR: an older one that this one can act as, as compilers name it (haswell, which has AVX2; skylake-avx512, which
has no products of bfloat16). oneDNN and PyTorch are kept to what it has, too; products alone are measured then.

Products go over all weights of `small`, which no cache holds; attention is that of one of its layers, one query per
sequence; filters take the logits of 32 sequences over the vocabulary of Qwen3. What is compared takes turns. Figures
are medians, of milliseconds of processor time (others on the machine count less) and of the ratios of neighbours.
"""

import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from harness import finish
from inflight_kernels import _cpu
from inflight_kernels.attention import empty_cache_for_cpu, paged_attention

from inflight.core.sampling import SamplingParams
from inflight.engine.loop.sampler import _MANY, _candidates, _ranks
from inflight.engine.model.shapes import SHAPES

Functions = Mapping[str, Callable[[], object]]
Figures = dict[str, dict[str, float]]

SMALL, VOCABULARY = SHAPES["small"], SHAPES["qwen3-0.6b"].vocabulary
ROWS = (1, 4, 8, 16, 32, 48, 64, 128, 512)
CONTEXTS = ((32, 96), (64, 160))
"""The (sequences, tokens of each) that attention is measured with."""
TOP_P = SamplingParams(top_p=0.95)
FILTERS: dict[str, tuple[SamplingParams, float, Callable[[torch.Tensor], object]]] = {
    "top-k of 50": (SamplingParams(top_k=50), 8, lambda scores_FV: scores_FV.topk(50)),
    "top-p that keeps few tokens": (TOP_P, 8, lambda scores_FV: scores_FV.topk(_MANY)),
    "top-p that keeps many tokens": (TOP_P, 1, lambda scores_FV: scores_FV.sort(descending=True)),
}
"""Maps a filter to (parameters, standard deviation of the logits, what it is made of)."""


def compare(rounds: Iterable[Functions], repeats: int, calls: int = 1) -> Figures:
    """Return the milliseconds of each function, once its cache is warm, and how many times as long the later ones take
    as the earlier ones. Each round has the same functions over memory of its own."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for functions in rounds:
        for name, function in [*functions.items()] * repeats:
            function()
            began = time.thread_time()
            for _ in range(calls):
                function()
            times[name].append(1e3 * (time.thread_time() - began) / calls)
    ratios = {f"{b} / {a}": np.divide(times[b], times[a]) for a, b in itertools.combinations(times, 2)}
    return {
        "ms": {name: float(np.median(values)) for name, values in times.items()},
        "ratio": {name: float(np.median(values)) for name, values in ratios.items()},
    }


def raise_limit_of_rows(directory: str) -> None:
    """Let the C product take more rows than it does, to see where it stops paying."""
    source, limit = _cpu.SOURCE.read_text(), " || tokens > (bf ? MOST_BF16 : MOST_FLOATS)"
    assert limit in source
    _cpu.SOURCE = Path(directory, "_cpu.c")
    _cpu.SOURCE.write_text(source.replace(limit, ""))


ISAS = {"haswell": ("AVX2", "avx2"), "skylake-avx512": ("AVX512_CORE", "avx512")}
"""Maps a processor to what oneDNN, and MKL and PyTorch, call what it has."""


def act_as(processor: str) -> None:
    """Before anything is computed."""
    isa, capability = ISAS[processor]
    os.environ |= {
        "ONEDNN_MAX_CPU_ISA": isa,
        "MKL_ENABLE_INSTRUCTIONS": capability.upper(),
        "ATEN_CPU_CAPABILITY": capability,
    }
    _cpu._FLAGS = tuple(f"-march={processor}" if flag.startswith("-march=") else flag for flag in _cpu._FLAGS)


def weights_of_small(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return every matrix that a forward pass of `small` multiplies by, one after another in one buffer as in a
    slot."""
    hidden, middle, heads, dim = SMALL.hidden, SMALL.intermediate, SMALL.heads, SMALL.head_dim
    qkv, out = ((heads + 2 * SMALL.kv_heads) * dim, hidden), (hidden, heads * dim)
    shapes = [qkv, out, (2 * middle, hidden), (hidden, middle)] * SMALL.layers + [(SMALL.vocabulary, hidden)]
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.randn(sum(sizes)).mul_(hidden**-0.5).to(dtype).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def products(weights: list[torch.Tensor], rows: int) -> Functions:
    of_size = {size: torch.randn(rows, size).to(weights[0].dtype) for size in {weight.shape[1] for weight in weights}}
    inputs = [of_size[weight.shape[1]] for weight in weights]

    def in_c(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out, is_bf16 = x.new_empty(len(x), len(weight)), x.dtype == torch.bfloat16
        assert _cpu.call("linear", x, x.stride(0), weight, None, out, is_bf16, len(x), len(weight), x.shape[1])
        return out

    def by_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    ways = {"C": in_c, "oneDNN": by_onednn, "F.linear": F.linear}
    if weights[0].dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        del ways["oneDNN"]
    for way in ways.values():
        torch.testing.assert_close(in_c(inputs[0], weights[0]), way(inputs[0], weights[0]), atol=0.05, rtol=0.05)
    return {name: lambda way=way: deque(map(way, inputs, weights), 0) for name, way in ways.items()}


def attention(dtype: torch.dtype, sequences: int, tokens: int) -> Functions:
    """Compare with dense rows, which need no gathering, have no padding, and have the query heads of a KV head as its
    queries."""
    blocks, kv_heads, dim, scale = tokens // _cpu.LANES, SMALL.kv_heads, SMALL.head_dim, SMALL.head_dim**-0.5
    caches = empty_cache_for_cpu(sequences * blocks, kv_heads, dim, dim, dtype)
    query = torch.randn(sequences, SMALL.heads, dim).to(dtype)
    tables = torch.randperm(sequences * blocks).int().view(sequences, blocks)
    where = (tables, torch.arange(sequences + 1).int(), torch.full((sequences,), tokens).int())
    keys, values = (cache.normal_().contiguous() for cache in caches)
    q_SHGD = query.view(sequences, kv_heads, -1, dim)
    k_SHLD, v_SHLD = (cache[tables.long()].flatten(1, 2).transpose(1, 2).contiguous() for cache in (keys, values))
    k_SHDL = k_SHLD.mT.contiguous()
    functions = {
        "C": lambda: paged_attention(query, *caches, *where, scale=scale),
        "reference": lambda: paged_attention(query, keys, values, *where, scale=scale),
        "dense products": lambda: torch.softmax(q_SHGD * scale @ k_SHDL, -1, dtype=torch.float32).to(dtype) @ v_SHLD,
        "dense SDPA": lambda: F.scaled_dot_product_attention(q_SHGD, k_SHLD, v_SHLD, scale=scale),
    }
    for function in functions.values():
        torch.testing.assert_close(function().view(query.shape), functions["C"](), atol=0.01, rtol=0.01)
    return functions


def filtering(params: SamplingParams, spread: float, select: Callable[[torch.Tensor], object]) -> Functions:
    """Return what a filter is made of, over floats and over ranks without ties, and the whole filter."""
    scores_FV = torch.randn(32, VOCABULARY) * spread
    scores_FV -= scores_FV.amax(-1, keepdim=True)
    return {
        "floats": lambda: select(scores_FV),
        "ranks": lambda: select(_ranks(scores_FV)),
        "filter": lambda: _candidates(scores_FV, [params] * len(scores_FV)),
    }


@torch.inference_mode()
def main() -> None:
    if older := sys.argv[2:]:
        act_as(*older)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, list[dict]] = {"products": [], "attention": [], "filters": []}

    def add(kind: str, figures: Figures, **what: object) -> None:
        results[kind].append(what | figures)
        print(kind, json.dumps(what | figures), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        raise_limit_of_rows(directory)
        for dtype in (torch.float32, torch.bfloat16):
            name, weights = str(dtype).removeprefix("torch."), weights_of_small(dtype)
            for rows in ROWS:
                add("products", compare([products(weights, rows)], 15), dtype=name, rows=rows)
            for sequences, tokens in CONTEXTS if not older else ():
                figures = compare((attention(dtype, sequences, tokens) for _ in range(10)), 3, calls=4)
                add("attention", figures, dtype=name, sequences=sequences, tokens=tokens)
    for name, what in FILTERS.items() if not older else ():
        add("filters", compare((filtering(*what) for _ in range(3)), 3), filter=name)
    finish("cpu-kernels", {kind: figures for kind, figures in results.items() if figures})


if __name__ == "__main__":
    main()
