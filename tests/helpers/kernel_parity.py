"""Kernels against their references, on the device named by the first argument.

`TRITON_INTERPRET=1 python kernel_parity.py cpu` runs the kernels in Triton's interpreter; on a GPU, without it, they
run compiled. The interpreter cuts bf16 off where a GPU rounds it, but rounds fp16, which therefore shows that every
intermediate result is rounded where the reference rounds it.
"""

import sys

import torch
from inflight_kernels import (
    _copy_triton,
    _filters_triton,
    _linear_logprob_cpu,
    _linear_logprob_triton,
    _lora_triton,
    _rotary_triton,
    _sampling_triton,
    _selective_logprob_triton,
    _tokenwise_triton,
    add_lora,
    copy_all,
    linear_logprob,
    linear_logprobs,
    linear_logprobs_reference,
    selective_logprobs_reference,
)
from inflight_kernels.filters import Filters, Penalties, cut_logits_reference, penalize_reference
from inflight_kernels.lora import SMALL_TOKENS, add_lora_reference
from inflight_kernels.rotary import rope_and_cache_reference
from inflight_kernels.sampling import BLOCK, draw_reference, uniforms
from inflight_kernels.tokenwise import Norm, add_rms_norm_reference, gated_activation_reference


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of sums in fp32 and the last bits of bf16. In fp16 the same bits, save a few ties and the
    small results of gelu, where 1 + tanh cancels."""
    assert result.dtype == expected.dtype
    if expected.dtype == torch.float16:
        assert ((result != expected) & (expected.abs() > 1e-2)).sum() <= 1 + 0.01 * expected.numel()
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def check_selective_logprobs(
    device: str, dtype: torch.dtype, rows: int, vocabulary: int, *, whole_blocks_cut: bool = False
) -> None:
    """`whole_blocks_cut`: the first 12 rows have logits in every choice of the three blocks of columns, −∞ in the
    others, and their token in each block that is left."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (torch.randn(rows, vocabulary + 5, generator=generator) * 3)[:, 2:-3]  # rows that do not lie end to end
    logits[0, 0] = -torch.inf
    tokens = torch.randint(1, vocabulary, (rows,), generator=generator)
    if whole_blocks_cut:
        block_V = torch.arange(vocabulary) // _selective_logprob_triton.BLOCK_V
        choices = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
        cases = [(left, block) for left in choices for block in left]
        for row, (left, block) in enumerate(cases):
            logits[row, ~torch.isin(block_V, torch.tensor(left))] = -torch.inf
            tokens[row] = torch.nonzero(block_V == block)[-1 - row]
    tokens = tokens.to(device)
    temperatures = torch.empty(rows).uniform_(0.3, 2, generator=generator).to(device)
    grads = torch.randn(rows, generator=generator).to(device)
    results = []
    for function in (_selective_logprob_triton.SelectiveLogprobs.apply, selective_logprobs_reference):
        leaf = logits.to(device, dtype).requires_grad_()
        out = function(leaf, tokens, temperatures)
        out.backward(grads)
        results.append((out.detach(), leaf.grad))
    assert results[0][0].isfinite().all()
    assert not results[0][1][logits.to(device) == -torch.inf].any()
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])


def check_linear_logprobs(
    device: str,
    dtype: torch.dtype,
    rows: int,
    width: int,
    vocabulary: int,
    *,
    masked: str,
    bias: bool = False,
    banned: bool = False,
    softcap: float | None = None,
    entropy: bool = False,
) -> None:
    """Values and gradients against those of float64. `masked`: "none", "some" or "all" rows have a sampling mask.
    `banned`: some of the bias is −∞."""
    generator = torch.Generator().manual_seed(rows + width + vocabulary)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = [random(rows, width + 3)[:, :width], 2 * random(vocabulary, width + 5)[:, :width] / width**0.5]
    inputs += [random(vocabulary)] if bias else []
    tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
    temperatures = torch.empty(rows).uniform_(0.5, 1.5, generator=generator).to(device)
    sets: list[list[int]] = []
    for row, token in enumerate(tokens.tolist()):
        size = int(torch.randint(0, 40, (1,), generator=generator))
        ids = torch.randperm(vocabulary, generator=generator)[:size].tolist()
        sets.append([] if masked == "some" and row % 2 else [*(i for i in ids if i != token), token])
    if banned:  # tokens out of the distribution, among them all of a tile
        allowed = {*tokens.tolist(), *(i for ids in sets for i in ids)}
        inputs[2][[i for i in range(vocabulary // 4, vocabulary) if i not in allowed]] = -torch.inf
    offsets = torch.tensor([0] + [len(ids) for ids in sets]).cumsum(0)
    token_ids = torch.tensor([i for ids in sets for i in ids]).to(device)
    weights = torch.randn(2, rows, generator=generator).to(device)
    results = []
    for function, leaf_dtype in ((linear_logprobs, dtype), (linear_logprobs_reference, torch.float64)):
        leaves = [tensor.detach().to(leaf_dtype).requires_grad_() for tensor in inputs]
        logprobs, entropies = function(
            *leaves[:2],
            tokens.to(device),
            temperatures,
            bias=leaves[2] if bias else None,
            softcap=softcap,
            sampling_mask=None if masked == "none" else (offsets, token_ids),
            entropy=entropy,
        )
        values = [logprobs] if entropies is None else [logprobs, entropies]
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=False)).backward()
        results.append(([value.detach() for value in values], [leaf.grad for leaf in leaves]))
    for result, expected in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
    for result, expected in zip(results[0][1], results[1][1], strict=True):
        assert result.dtype == dtype
        # Logits of plain PyTorch in fp32 give gradients of up to 20 that are off by 6e-5.
        atol, rtol = (max(1e-5, 2e-6 * float(expected.abs().max())), 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
        torch.testing.assert_close(result.double(), expected, atol=atol, rtol=rtol)


def check_linear_logprobs_of_all_kinds(device: str, dtype: torch.dtype) -> None:
    check_linear_logprobs(device, dtype, 6, 200, 100, masked="all", bias=True, softcap=5.0, entropy=True)
    # The interpreter multiplies the bits of bf16 as if they were integers; a GPU multiplies all of them.
    if device == "cpu" and dtype == torch.bfloat16:
        return
    check_linear_logprobs(device, dtype, 131, 64, 300, masked="none")
    check_linear_logprobs(device, dtype, 33, 40, 150, masked="some", bias=True, entropy=True)
    check_linear_logprobs(device, dtype, 9, 40, 150, masked="none", softcap=5.0, entropy=True)
    check_linear_logprobs(device, dtype, 20, 40, 700, masked="some", bias=True, banned=True, entropy=True)
    if device == "cuda":
        check_linear_logprobs(device, dtype, 3000, 512, 20_001, masked="none")
        check_linear_logprobs(device, dtype, 1500, 264, 9000, masked="some", softcap=30.0, entropy=True)


def check_masks_without_the_token_are_nan(device: str) -> None:
    hidden, weight = torch.randn(4, 8, device=device), torch.randn(30, 8, device=device)
    masks = linear_logprob.Masks(
        rows=slice(None),
        offsets=torch.tensor([0, 2, 3, 5, 6], device=device),
        token_ids=torch.tensor([1, 2, 3, 4, 30, 5], device=device),
        row_E=torch.tensor([0, 0, 1, 2, 2, 3], device=device),
    )
    logprobs, _ = linear_logprob.LinearLogprobs.apply(
        hidden,
        weight,
        None,
        torch.tensor([2, 9, 4, 5], device=device),
        torch.ones(4, device=device),
        None,
        False,
        (None, masks),
    )
    assert logprobs.isnan().tolist() == [False, True, True, False]
    assert logprobs[3] == 0


def check_rms_norm(device: str, dtype: torch.dtype, rows: int, width: int, offset: float, cast_first: bool) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width + 3, generator=generator).to(device, dtype)[:, 1:-2]
    residual = torch.randn(rows, 2 * width, generator=generator).to(device, dtype)[:, width:]
    weight = torch.randn(width, generator=generator).to(device, dtype)
    norm = Norm(weight, 1e-5, offset, cast_first)
    for added in (None, residual):
        results = _tokenwise_triton.add_rms_norm(x, added, norm)
        for result, expected in zip(results, add_rms_norm_reference(x, added, norm), strict=True):
            assert_close(result, expected)


def check_gated_activation(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    gate_up = (torch.randn(rows, 2 * width + 3, generator=generator) * 4).to(device, dtype)[:, 1:-2]
    gate_up[0, 0], gate_up[-1, width - 1] = -200.0, 200.0
    for activation in ("silu", "gelu_tanh"):
        expected = gated_activation_reference(gate_up, activation)
        assert_close(_tokenwise_triton.gated_activation(gate_up, activation), expected)


def check_rope_and_cache(
    device: str,
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    *,
    norm: bool = False,
    offset: float = 0.0,
    cast_first: bool = True,
    cache_dtype: torch.dtype | None = None,
) -> None:
    generator = torch.Generator().manual_seed(q_heads + head_dim)
    tokens, blocks, block_size = 5, 3, 4
    width = (q_heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, width + 7, generator=generator).to(device, dtype)[:, 3:-4]
    angles = torch.rand(9, rotated // 2, generator=generator).repeat(1, 2) * 6
    positions = torch.randint(0, 9, (tokens,), generator=generator).to(device)
    slots = torch.tensor([11, -1, 4, 0, -12], device=device)
    weights = torch.randn(2, head_dim, generator=generator).to(device, dtype)
    norms = tuple(Norm(weight, 1e-6, offset, cast_first) for weight in weights) if norm else None
    results = []
    for function in (_rotary_triton.rope_and_cache, rope_and_cache_reference):
        # [Hk, blocks, D, block size], and the same with a gap behind each block
        k_cache = torch.zeros(kv_heads, blocks, head_dim, block_size, dtype=cache_dtype or dtype, device=device)
        v_cache = torch.zeros(blocks, block_size + 1, kv_heads, head_dim, dtype=cache_dtype or dtype, device=device)
        q = function(
            qkv,
            angles.cos().to(device),
            angles.sin().to(device),
            positions,
            slots,
            k_cache.permute(1, 3, 0, 2),
            v_cache[:, :block_size],
            norms,
        )
        results.append((q, k_cache, v_cache))
    for result, expected in zip(*results, strict=True):
        assert_close(result, expected)
    assert results[0][1].any(0).any(1).sum() == 3  # one row of the cache for each slot that is not negative


def check_filters(device: str, rows: int, vocabulary: int, *, ties: bool) -> None:
    """The kernel leaves the tokens that sorting leaves. Shares may differ by 10⁻⁶, because exponentials differ in the
    last bits."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = torch.randn(rows + 4, vocabulary, generator=generator) * 2
    logits = (logits * 2).round() / 2 if ties else logits
    logits[0, 0], logits[1, -1], logits[2], logits[3, ::2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    chosen = torch.cat((torch.arange(4), 4 + torch.randperm(rows, generator=generator)[: rows - 2]))
    count = len(chosen)
    temperatures = torch.empty(count).uniform_(0.3, 2, generator=generator)
    temperatures[7::10] = 1e-6
    top_ks = torch.randint(1, vocabulary + 3, (count,), generator=generator)
    top_ks[::2] = vocabulary
    top_ps = torch.empty(count, dtype=torch.float64).uniform_(0.01, 1, generator=generator)
    top_ps[::3], top_ps[4::9] = 1.0, 1e-9
    min_ps = torch.empty(count).uniform_(0, 0.2, generator=generator)
    min_ps[::4] = 0.0
    logits, chosen, temperatures, top_ks, top_ps, min_ps = (
        tensor.to(device) for tensor in (logits, chosen, temperatures, top_ks, top_ps, min_ps)
    )
    result, fewer, more = (logits.clone() for _ in range(3))
    _filters_triton.cut_logits(result, chosen, temperatures, top_ks, top_ps, min_ps)
    for cut, p, m in (
        (fewer, (top_ps * (1 - 1e-6)), min_ps * (1 + 1e-6)),
        (more, torch.where(top_ps < 1, (top_ps * (1 + 1e-6)).clamp(max=1 - 1e-12), 1.0), min_ps * (1 - 1e-6)),
    ):
        cut_logits_reference(cut, Filters(chosen, temperatures, top_ks, torch.where(top_ps < 1, p, 1.0), m))
    left, least, most = (cut > -torch.inf for cut in (result, fewer, more))
    assert (left >= least).all()
    assert (left <= most).all()
    assert (result[left] == logits[left]).all()
    assert (left == least).float().mean() > 0.999
    assert not left[:3].any()
    others = torch.ones(rows + 4, dtype=torch.bool, device=device)
    others[chosen] = False
    assert torch.equal(result[others], logits[others])


def check_penalize(device: str, rows: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = torch.randn(rows, vocabulary + 3, generator=generator)[:, 1:-2] * 3
    logits[0, 0], logits[-1, -1], logits[0, vocabulary // 2] = torch.nan, torch.inf, -torch.inf
    seen = torch.rand(rows + 2, vocabulary, generator=generator) < 0.3
    seen[:, [0, -1]] = True
    chosen = torch.randperm(rows, generator=generator)[: max(1, rows - 1)]
    seen_rows = torch.randperm(rows + 2, generator=generator)[: len(chosen)]
    factors = torch.empty(len(chosen)).uniform_(0.5, 2, generator=generator)
    logits, seen, chosen, seen_rows, factors = (x.to(device) for x in (logits, seen, chosen, seen_rows, factors))
    result, expected = logits.clone(), logits.clone()
    _filters_triton.penalize(result, seen, chosen, seen_rows, factors)
    penalize_reference(expected, seen, Penalties(chosen, seen_rows, factors))
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert vocabulary == 1 or not torch.equal(result.nan_to_num(), logits.nan_to_num())


def check_draw(device: str, dtype: torch.dtype, rows: int, vocabulary: int, entropy: bool) -> None:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (torch.randn(rows, vocabulary + 5, generator=generator) * 3).to(device, dtype)[:, 2:-3]
    temperatures = torch.empty(rows).uniform_(0.3, 2, generator=generator)
    temperatures[0::5] = 0.0
    temperatures[3::10] = 1e-6
    logits[0, :: max(vocabulary // 4, 1)] = 20.0  # the first of equals, in any block
    logits[1::4, ::3] = -torch.inf
    logits[1, :-1], logits[1, -1] = -torch.inf, 0.0
    logits[4, vocabulary // 2] = torch.nan
    logits[5] = -torch.inf
    logits[6] = -torch.inf
    logits[7, -1] = torch.inf
    temperatures[6] = 1.0
    temperatures = temperatures.to(device)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device)
    positions = torch.arange(rows, device=device)
    tokens, logprobs, entropies = _sampling_triton.draw(logits, temperatures, seeds, positions, entropy, BLOCK)
    expected = draw_reference(logits, temperatures, seeds, positions, entropy=entropy)
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert logprobs[4:8].isnan().all()
    assert not logprobs[:4].isnan().any()
    assert not logprobs[8:].isnan().any()
    valid = ~logprobs.isnan()
    greedy = temperatures == 0
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    probs = torch.softmax(shifted / temperatures.masked_fill(greedy, 1.0)[:, None], -1)
    uniform = uniforms(seeds, positions)
    assert (logits.gather(1, tokens[:, None])[valid] > -torch.inf).all()
    assert_near(tokens[valid], expected[0][valid], probs[valid], greedy[valid], uniform[valid])
    same = valid & (tokens == expected[0])
    assert_close(logprobs[same], expected[1][same])
    assert (entropies is None) == (not entropy)
    if entropy:
        assert_close(entropies, expected[2])


def assert_near(
    tokens: torch.Tensor, expected: torch.Tensor, probs: torch.Tensor, greedy: torch.Tensor, uniform: torch.Tensor
) -> None:
    """The same tokens, save where the uniform number lies within 1e-5 of every bound between the two."""
    cdf = probs.cumsum(-1)
    for row in torch.nonzero(tokens != expected).flatten():
        low, high = sorted((int(tokens[row]), int(expected[row])))
        assert not greedy[row]
        assert (cdf[row, low:high] - uniform[row]).abs().max() < 1e-5


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_copy_all(device: str) -> None:
    """The same bits, those of NaN included where nothing is cast. On a GPU sources have any bits; the interpreter's
    rounding to bf16 is not that of a GPU, so that there they have no more bits than bf16."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 4095, _copy_triton.BLOCK, _copy_triton.BLOCK + 1, 20_000)
    sources, destinations, expected = [], [], []
    for source_dtype in DTYPES:
        for dtype in DTYPES:
            for size in sizes:
                bits = torch.randint(-(2**31), 2**31, (size,), generator=generator).to(torch.int32)
                source = bits.view(source_dtype)[:size]
                if device == "cpu" and source_dtype != dtype:
                    source = torch.randn(size, generator=generator).bfloat16().to(source_dtype)
                sources.append(source.to(device))
                destinations.append(torch.zeros(size + 8, dtype=dtype, device=device)[:size])
                expected.append(sources[-1].to(dtype))
    assert _copy_triton.copy_all(destinations, sources) == ([], [])
    for destination, source, cast in zip(destinations, sources, expected, strict=True):
        torch.testing.assert_close(destination, cast, atol=0, rtol=0, equal_nan=True)
        if source.dtype == destination.dtype:
            assert torch.equal(destination.view(torch.uint8), source.view(torch.uint8))
        behind = destination.as_strided((8,), (1,), len(destination))
        assert not behind.any()

    for source in sources:
        source.zero_()
    hits = _copy_triton._table.cache_info().hits
    _copy_triton.copy_all(destinations, sources)
    assert _copy_triton._table.cache_info().hits == hits + 1
    assert not any(destination.any() for destination in destinations)

    pairs = [
        (torch.zeros(6, device=device), torch.ones(6, dtype=torch.int64, device=device)),
        (torch.zeros(6, device=device), torch.ones(12, device=device)[::2]),
        (torch.zeros(7, device=device)[1:], torch.ones(6, device=device)),
        (torch.zeros(6, device=device), torch.ones(6, device=device)),
    ]
    left = _copy_triton.copy_all([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    assert [len(tensors) for tensors in left] == [3, 3]
    assert pairs[3][0].all()
    assert not any(destination.any() for destination in left[0])
    pairs.append((torch.zeros(6, device=device), torch.ones(6)))
    copy_all([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    assert all(destination.all() for destination, _ in pairs)


def check_block_copies(device: str) -> None:
    """The same bits, in tensors whose blocks differ in size and whose groups in what is copied."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    groups = [
        [tensor(9, 16, heads, 64, dtype=dtype) for heads in (1, 8) for dtype in DTYPES],
        [tensor(5, 16, 3, 128, dtype=torch.bfloat16)],
        [tensor(4, 16, 1, 64, dtype=torch.bfloat16)],
    ]
    copies = [{1: 2, 3: 2, 8: 0}, {}, {0: 3}]
    expected = [[tensor.clone() for tensor in tensors] for tensors in groups]
    for tensors, pairs in zip(expected, copies, strict=True):
        for changed in tensors:
            for to, source in pairs.items():
                changed[to] = changed[source].clone()
    table = _copy_triton.BlockTable.of(groups)
    assert table is not None
    table.copy([{}, {}, {}])
    table.copy(copies)
    for tensors, changed in zip(groups, expected, strict=True):
        assert all(map(torch.equal, tensors, changed))
    whole = tensor(2, 16, 1, 64, dtype=torch.bfloat16)
    unfit = whole[..., :32], tensor(4096, dtype=torch.bfloat16)[2:2050].view(2, 1024), whole[..., :60].contiguous()
    assert not any(_copy_triton.BlockTable.of([[whole], [other]]) for other in unfit)


def check_add_lora(
    device: str, dtype: torch.dtype, tokens: int, inputs: int, widths: tuple[int, ...], rank: int, adapters: int
) -> None:
    generator = torch.Generator().manual_seed(tokens + inputs + rank)
    outputs, ranks = sum(widths), len(widths) * rank

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    y, x = random(tokens, outputs + 3)[:, :outputs], random(tokens, inputs + 3)[:, :inputs]
    a, b = random(adapters, ranks + 1, inputs)[:, :ranks], random(adapters, outputs + 2, rank)[:, :outputs]
    x /= inputs**0.5
    slots = torch.randint(-1, adapters, (tokens,), generator=generator, dtype=torch.int32).to(device)
    if adapters > 1:
        a[-1, 0, 0] = torch.nan  # of the rows with this adapter only
    before, expected = y.clone(), y.clone()
    add_lora_reference(expected, x, a, b, widths, slots)
    _lora_triton.add_lora(y, x, a, b, widths, slots, SMALL_TOKENS)
    assert_close(y, expected)
    assert torch.equal(y[slots < 0], before[slots < 0])


def check_add_lora_in_a_graph() -> None:
    """A captured launch follows the slots that lie in its buffer when it is replayed."""
    torch.manual_seed(0)
    x, y, slots = torch.randn(40, 64), torch.randn(40, 48), torch.randint(-1, 3, (2, 40), dtype=torch.int32)
    x, y, slots = x.cuda().bfloat16(), y.cuda().bfloat16(), slots.cuda()
    a, b = torch.randn(3, 16, 64).cuda().bfloat16() / 8, torch.randn(3, 48, 8).cuda().bfloat16()
    result, buffer = y.clone(), torch.full_like(slots[0], -1)
    add_lora(result, x, a, b, (32, 16), buffer)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(result, x, a, b, (32, 16), buffer)
    for slots_T in slots:
        result.copy_(y)
        buffer.copy_(slots_T)
        graph.replay()
        expected = y.clone()
        add_lora_reference(expected, x, a, b, (32, 16), slots_T)
        assert_close(result, expected)


def main(device: str) -> None:
    linear_logprob._backend = lambda _: _linear_logprob_triton
    if device == "cpu":  # where `mm` and `addmm` have no out_dtype
        _linear_logprob_triton.add_product = lambda total, a, b: _linear_logprob_cpu.add_product(total, a.float(), b)
    check_masks_without_the_token_are_nan(device)
    for dtype in DTYPES:
        check_linear_logprobs_of_all_kinds(device, dtype)
        for rows, vocabulary in ((1, 7), (3, 4096), (5, 9001)):
            check_selective_logprobs(device, dtype, rows, vocabulary)
        check_selective_logprobs(device, dtype, 13, 9001, whole_blocks_cut=True)
        for rows, width in ((1, 7), (3, 896), (5, 1100)):
            check_rms_norm(device, dtype, rows, width, 0.0, True)
            check_rms_norm(device, dtype, rows, width, 1.0, False)
        for rows, width in ((1, 7), (3, 1024), (5, 1300)):
            check_gated_activation(device, dtype, rows, width)
        check_rope_and_cache(device, dtype, 1, 1, 8, 8)
        check_rope_and_cache(device, dtype, 14, 2, 64, 64)
        check_rope_and_cache(device, dtype, 6, 3, 80, 32)
        check_rope_and_cache(device, dtype, 8, 4, 32, 32, norm=True)
        check_rope_and_cache(device, dtype, 3, 1, 48, 12, norm=True, offset=1.0, cast_first=False)
        for rows, vocabulary, entropy in ((8, 7, True), (40, 1024, True), (40, 5003, True), (64, 2049, False)):
            check_draw(device, dtype, rows, vocabulary, entropy)
        check_add_lora(device, dtype, 1, 8, (4,), 1, 1)
        check_add_lora(device, dtype, 13, 1100, (70, 45), 33, 2)
        check_add_lora(device, dtype, 270, 40, (7, 3, 16), 5, 2)
    for rows, vocabulary, ties in ((5, 1, False), (8, 7, True), (40, 300, True), (40, 300, False), (12, 5003, True)):
        check_filters(device, rows, vocabulary, ties=ties)
    for rows, vocabulary in ((1, 1), (3, 7), (5, 2048), (4, 5003)):
        check_penalize(device, rows, vocabulary)
    if device == "cuda":
        check_filters(device, 10_000, 1500, ties=True)
        check_filters(device, 64, 151_936, ties=False)
    check_copy_all(device)
    check_block_copies(device)
    if device == "cuda":
        check_add_lora_in_a_graph()
    check_rope_and_cache(device, torch.float32, 6, 3, 80, 32, cache_dtype=torch.float16)
    check_rope_and_cache(device, torch.float16, 6, 3, 80, 32, cache_dtype=torch.float32)
    print("kernels agree with their references")


if __name__ == "__main__":
    main(sys.argv[1])
