"""The Triton kernels of `sampling`: one program per row and block of the vocabulary, then one per row."""

import torch
import triton
import triton.language as tl

from inflight_kernels._launch import guarded


@triton.jit
def mix64(x):
    """Apply SplitMix64's output function over u64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def inverse_of(temperature):
    """Return 1 / temperature, and 1 for 0. Finite, so that its product with 0 is 0."""
    return tl.where(temperature == 0, 1.0, tl.minimum(1.0 / temperature, 1.0e38))


@triton.jit
def first_index(hits, weights, index):
    """Return the first index that hits; if rounding left none, the last of positive weight; in a row of NaN, 0."""
    none = 2**31 - 1
    first = tl.min(tl.where(hits, index, none), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.where(first == none, last, first)


@triton.jit
def block_kernel(
    logits, temperatures, peaks, totals, moments, stride_m, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Reduce a block to its largest logit, Σ w and, if requested, Σ w·z; z = (logit − largest) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inverse = inverse_of(tl.load(temperatures + row))
    x = tl.load(logits + row * stride_m + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    z = (x - tl.where(peak == float("-inf"), 0.0, peak)) * (inverse * 1.4426950408889634)  # z / ln 2, so w = 2^z
    w = tl.exp2(z)
    at = row * BLOCKS + block
    tl.store(peaks + at, peak)
    tl.store(totals + at, tl.sum(w, 0))
    if moments is not None:
        tl.store(moments + at, tl.sum(tl.where(w > 0, w * z, 0.0), 0) * 0.6931471805599453)


@triton.jit
def draw_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    peaks,
    totals,
    moments,
    tokens,
    logprobs,
    entropies,
    stride_m,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    inverse = inverse_of(temperature)

    blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))  # pyright: ignore[reportArgumentType]
    at = row * BLOCKS + blocks
    peak_B = tl.load(peaks + at, mask=blocks < BLOCKS, other=float("-inf"))
    peak = tl.max(peak_B, 0)
    z_B = (peak_B - peak) * inverse
    scale_B = tl.exp(z_B)
    weight_B = scale_B * tl.load(totals + at, mask=blocks < BLOCKS, other=0.0)
    cdf_B = tl.cumsum(weight_B, 0)
    total = tl.sum(weight_B, 0)

    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    uniform = (mix64(seed ^ mix64(position)) >> 40).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴
    target = uniform * total
    block = first_index(tl.where(greedy, peak_B == peak, (cdf_B > target) & (weight_B > 0)), weight_B, blocks)
    rest = target - tl.sum(tl.where(blocks == block - 1, cdf_B, 0.0), 0)

    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride_m + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    z = (x - peak) * inverse
    w = tl.exp(z)
    token = first_index(tl.where(greedy, x == peak, (tl.cumsum(w, 0) > rest) & (w > 0)), w, columns)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(columns == token, z, 0.0), 0) - tl.log(total))
    if moments is not None:
        moment_B = scale_B * tl.load(moments + at, mask=blocks < BLOCKS, other=0.0) + weight_B * z_B
        moment = tl.sum(tl.where(scale_B > 0, moment_B / total, 0.0), 0)
        tl.store(entropies + row, tl.log(total) - moment)


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    entropy: bool,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    blocks = triton.cdiv(vocabulary, block_size)
    # Peaks, totals and moments begin at multiples of 16 bytes, whatever the number of rows: Triton compiles again for
    # other pointers.
    size = triton.cdiv(rows * blocks, 4) * 4
    memory = torch.empty(3 if entropy else 2, size, dtype=torch.float32, device=logits.device)
    statistics = (*memory,) if entropy else (*memory, None)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    entropies = torch.empty_like(logprobs) if entropy else None
    sizes = {"V": vocabulary, "BLOCKS": blocks, "BLOCK": block_size}
    if rows:
        launch = guarded(block_kernel[(rows, blocks)])
        # Sums and maxima of one warp need no barrier, and each thread has several loads in flight.
        launch(logits, temperatures, *statistics, logits.stride(0), **sizes, num_warps=1)
        launch = guarded(draw_kernel[(rows,)])
        launch(
            logits,
            temperatures,
            seeds.contiguous(),
            positions.contiguous(),
            *statistics,
            tokens,
            logprobs,
            entropies,
            logits.stride(0),
            **sizes,
        )
    return tokens, logprobs, entropies
