"""The kernels of `kernel_bench.py`: the inputs of each, its exact result, and the peers that compute it, too."""

import math
from collections.abc import Callable
from functools import partial

import torch
from attention_case import attention_case
from inflight_kernels import (
    BlockCopies,
    Norm,
    add_lora,
    add_rms_norm,
    copy_all,
    draw,
    gated_activation,
    rms_norm,
    rope_and_cache,
    selective_logprobs,
    selective_logprobs_reference,
    uniforms,
)
from inflight_kernels.lora import add_lora_reference
from inflight_kernels.rotary import rope_and_cache_reference
from inflight_kernels.sampling import draw_reference
from inflight_kernels.tokenwise import add_rms_norm_reference, gated_activation_reference, rms_norm_reference
from kernel_case import BF16, FP32, Call, Case, Machine, compiled, flashinfer_module, liger_op, relative_error

EPS = 1e-6
CHUNK = 256
"""Rows of logits that exist in fp64 at a time."""


def norm_case(machine: Machine) -> Case:
    tokens, hidden = machine.sizes.tokens, machine.sizes.hidden
    x, weight = machine.random(tokens, hidden), machine.random(hidden)
    norm = Norm(weight, EPS)
    return Case(
        name="rms_norm",
        shape=f"{tokens}×{hidden}",
        num_bytes=2 * x.nbytes,
        ours=lambda: rms_norm(x, norm),
        error=lambda: relative_error(rms_norm(x, norm), _exact_norm(x, weight)),
        peers={
            "eager": lambda: lambda: rms_norm_reference(x, norm),
            "liger": lambda: partial(
                liger_op("rms_norm", "LigerRMSNormFunction").apply, x, weight, EPS, 0.0, "llama", False
            ),
            "flashinfer": lambda: partial(flashinfer_module("norm", "gen_norm_module").rmsnorm, x, weight, EPS),
        },
    )


def add_norm_case(machine: Machine, tokens: int) -> Case:
    hidden = machine.sizes.hidden
    (x, residual), weight = machine.random(2, tokens, hidden).unbind(), machine.random(hidden)
    norm = Norm(weight, EPS)

    def error() -> float:
        y, s = add_rms_norm(x, residual, norm)
        return max(relative_error(s, x.double() + residual.double()), relative_error(y, _exact_norm(s, weight)))

    def flashinfer() -> Call:  # in place: x becomes y, and the residual the sum
        copies = x.clone(), residual.clone()
        return partial(flashinfer_module("norm", "gen_norm_module").fused_add_rmsnorm, *copies, weight, EPS)

    peers: dict[str, Callable[[], Call]] = {
        "eager": lambda: lambda: add_rms_norm_reference(x, residual, norm),
        "liger": lambda: partial(
            liger_op("fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply, x, residual, weight, EPS
        ),
        "flashinfer": flashinfer,
    }
    if tokens == machine.sizes.tokens:
        peers["compiled"] = lambda: partial(compiled(machine, add_rms_norm_reference), x, residual, norm)
    return Case(
        name="add_rms_norm",
        shape=f"{tokens}×{hidden}",
        num_bytes=4 * x.nbytes,
        is_long=tokens == machine.sizes.tokens,
        ours=lambda: add_rms_norm(x, residual, norm),
        error=error,
        peers=peers,
    )


def _exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def activation_case(machine: Machine) -> Case:
    tokens, width = machine.sizes.tokens // 2, machine.sizes.intermediate
    gate_up = machine.random(tokens, 2 * width)

    def error() -> float:
        gate, up = gate_up.double().chunk(2, 1)
        return relative_error(gated_activation(gate_up, "silu"), torch.nn.functional.silu(gate) * up)

    return Case(
        name="gated_activation",
        shape=f"{tokens}×2·{width}",
        num_bytes=3 * gate_up.nbytes // 2,
        ours=lambda: gated_activation(gate_up, "silu"),
        error=error,
        peers={
            "eager": lambda: lambda: gated_activation_reference(gate_up, "silu"),
            "liger": lambda: partial(liger_op("swiglu", "LigerFusedGateUpSiLUMulFunction").apply, gate_up),
            "flashinfer": lambda: partial(
                flashinfer_module("activation", "gen_act_and_mul_module", "silu").silu_and_mul, gate_up
            ),
            "compiled": lambda: partial(compiled(machine, gated_activation_reference), gate_up, "silu"),
        },
    )


def rope_case(machine: Machine, tokens: int) -> Case:
    sizes = machine.sizes
    heads, dim, block_size = sizes.q_heads + 2 * sizes.kv_heads, sizes.head_dim, 16
    blocks = sizes.tokens // block_size + 8
    qkv = machine.random(tokens, heads * dim)
    angles = torch.rand(4096, dim // 2, device=machine.device).repeat(1, 2) * 50
    cos, sin = angles.cos(), angles.sin()
    positions = machine.integers(4096, tokens)
    slots = torch.randperm(blocks * block_size, device=machine.device)[:tokens]
    k_cache, v_cache = machine.random(2, blocks, block_size, sizes.kv_heads, dim).unbind()
    weights = machine.random(2, dim)
    q_norm, k_norm = norms = Norm(weights[0], EPS), Norm(weights[1], EPS)
    where = cos, sin, positions, slots
    ours = partial(rope_and_cache, qkv, *where, k_cache, v_cache, norms)

    def error() -> float:
        wide = k_cache.float(), v_cache.float()
        narrow = k_cache.clone(), v_cache.clone()
        wide_norms = Norm(weights[0].float(), EPS), Norm(weights[1].float(), EPS)
        expected = rope_and_cache_reference(qkv.float(), *where, *wide, wide_norms)
        q = rope_and_cache(qkv, *where, *narrow, norms)
        pairs = zip((q, *narrow), (expected, *wide), strict=True)
        return max(relative_error(result, other) for result, other in pairs)

    def plain() -> torch.Tensor:
        """Compute the reference for slots that are not negative, which torch.compile can take in one piece."""
        rotation = [table[positions].to(qkv.dtype).float()[:, None] for table in (cos, sin)]
        q, k, v = qkv.unflatten(1, (heads, -1)).split((sizes.q_heads, sizes.kv_heads, sizes.kv_heads), 1)
        rotated = []
        for x, norm in ((q, q_norm), (k, k_norm)):
            normed = rms_norm_reference(x, norm).float()
            first, second = normed.chunk(2, -1)
            rotated.append((normed * rotation[0] + torch.cat((-second, first), -1) * rotation[1]).to(qkv.dtype))
        k_cache.flatten(0, 1)[slots] = rotated[1]
        v_cache.flatten(0, 1)[slots] = v
        return rotated[0]

    peers: dict[str, Callable[[], Call]] = {"eager": lambda: plain}
    if tokens == sizes.tokens:
        peers["compiled"] = lambda: compiled(machine, plain)
    return Case(
        name="rope_and_cache",
        shape=f"{tokens}×({sizes.q_heads}+2·{sizes.kv_heads})·{dim}, norms; reference in fp32",
        num_bytes=2 * qkv.nbytes,
        is_long=tokens == sizes.tokens,
        ours=ours,
        error=error,
        peers=peers,
    )


def draw_case(machine: Machine, dtype: torch.dtype) -> Case:
    rows, vocab = machine.sizes.decode, machine.sizes.vocab
    logits = machine.random(rows, vocab, dtype=dtype, scale=3.0)
    temperatures = torch.rand(rows, device=machine.device) + 0.5
    seeds, positions = machine.integers(1 << 40, rows), machine.integers(4096, rows)
    arguments = logits, temperatures, seeds, positions

    def error() -> float:
        """Return the error of log-probability and entropy; infinite if a token does not lie where its uniform number
        says."""
        tokens, logprobs, entropies = draw(*arguments, entropy=True)
        exact_MV = torch.log_softmax(logits.double() / temperatures.double()[:, None], -1)
        probs_MV = exact_MV.exp()
        chosen_M1 = tokens[:, None]
        above_M = probs_MV.cumsum(-1).gather(1, chosen_M1)[:, 0] - uniforms(seeds, positions)
        below_M = above_M - probs_MV.gather(1, chosen_M1)[:, 0]
        if not bool(((above_M > -1e-5) & (below_M < 1e-5)).all()) or entropies is None:
            return math.inf
        return max(
            relative_error(logprobs, exact_MV.gather(1, chosen_M1)[:, 0]),
            relative_error(entropies, torch.special.entr(probs_MV).sum(-1)),
        )

    def flashinfer() -> Call:  # at temperature 1, without a log-probability
        return partial(flashinfer_module("sampling", "gen_sampling_module").sampling_from_logits, logits.float())

    return Case(
        name="draw, with entropy",
        shape=f"{rows}×{vocab}",
        dtype=str(dtype).removeprefix("torch."),
        num_bytes=logits.nbytes,
        ours=lambda: draw(*arguments, entropy=True),
        error=error,
        tolerance=1e-4,
        peers={
            "eager": lambda: lambda: draw_reference(*arguments, entropy=True),
            "softmax, multinomial": lambda: (
                lambda: torch.multinomial(torch.softmax(logits.float() / temperatures[:, None], -1), 1)
            ),
            "flashinfer": flashinfer,
        },
    )


def logprob_case(machine: Machine) -> Case:
    rows, vocab = machine.sizes.logprob_rows, machine.sizes.vocab
    logits = machine.random(rows, vocab, scale=3.0).requires_grad_()
    tokens, temperatures = machine.integers(vocab, rows), torch.rand(rows, device=machine.device) + 0.5
    weights = machine.random(rows, dtype=FP32)

    def step(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = function(logits, tokens, temperatures)
        return logprobs.detach(), torch.autograd.grad(logprobs, logits, weights)[0]

    def error() -> float:
        logprobs, grad = step(selective_logprobs)
        squares = torch.zeros(4, dtype=torch.float64, device=machine.device)
        for first in range(0, rows, CHUNK):
            piece = slice(first, first + CHUNK)
            scaled = logits.detach()[piece].double() / temperatures[piece].double()[:, None]
            exact = torch.log_softmax(scaled, -1)
            chosen = tokens[piece, None]
            expected = exact.gather(1, chosen)[:, 0]
            scale = (weights[piece] / temperatures[piece]).double()[:, None]
            expected_grad = -exact.exp_() * scale
            expected_grad.scatter_add_(1, chosen, scale)
            for i, (result, other) in enumerate(((logprobs[piece], expected), (grad[piece], expected_grad))):
                squares[2 * i] += (result.double() - other).square().sum()
                squares[2 * i + 1] += other.square().sum()
        value = float((squares[::2] / squares[1::2]).sqrt().max())
        return value if math.isfinite(value) else math.inf

    return Case(
        name="selective_logprobs, forward and backward",
        shape=f"{rows}×{vocab}",
        num_bytes=3 * logits.nbytes,
        ours=lambda: step(selective_logprobs),
        error=error,
        peers={
            "eager": lambda: lambda: step(selective_logprobs_reference),
            "compiled": lambda: partial(step, compiled(machine, selective_logprobs_reference)),
        },
    )


def lora_case(machine: Machine, tokens: int) -> Case:
    sizes = machine.sizes
    widths = [heads * sizes.head_dim for heads in (sizes.q_heads, sizes.kv_heads, sizes.kv_heads)]
    a = machine.random(sizes.adapters, 3 * sizes.rank, sizes.hidden, scale=sizes.hidden**-0.5)
    b = machine.random(sizes.adapters, sum(widths), sizes.rank, scale=0.01)
    x, y = machine.random(tokens, sizes.hidden), machine.random(tokens, sum(widths))
    slots = (machine.integers(sizes.adapters + 1, tokens) - 1).int()
    if tokens == sizes.tokens:
        slots = slots.sort().values  # of prompts, whose tokens lie together

    def error() -> float:
        """Return the error of what is added to zeros, so that the rounding of y does not hide it."""
        result, expected = torch.zeros_like(y), torch.zeros_like(y, dtype=FP32)
        add_lora(result, x, a, b, widths, slots)
        add_lora_reference(expected, x.float(), a.float(), b.float(), widths, slots)
        return relative_error(result, expected)

    return Case(
        name="add_lora",
        shape=f"{tokens}×{sizes.hidden} to {sum(widths)}, rank {sizes.rank}, {sizes.adapters} adapters; "
        "reference in fp32",
        num_bytes=x.nbytes + 2 * y.nbytes + a.nbytes + b.nbytes,
        is_long=tokens == sizes.tokens,
        ours=lambda: add_lora(y, x, a, b, widths, slots),
        error=error,
        peers={"eager": lambda: lambda: add_lora_reference(y, x, a, b, widths, slots)},
    )


def copy_case(machine: Machine, dtype: torch.dtype) -> Case:
    sources = [machine.random(numel, dtype=dtype) for numel in machine.sizes.copied]
    destinations = [torch.full_like(source, math.nan, dtype=BF16) for source in sources]

    def error() -> float:
        copy_all(destinations, sources)
        pairs = zip(destinations, sources, strict=True)
        return 0.0 if all(torch.equal(to, source.to(BF16)) for to, source in pairs) else math.inf

    return Case(
        name="copy_all",
        shape=f"{len(sources)} tensors of {sum(machine.sizes.copied):,} values",
        dtype=f"{str(dtype).removeprefix('torch.')} to bfloat16",
        num_bytes=sum(tensor.nbytes for tensor in (*sources, *destinations)),
        ours=lambda: copy_all(destinations, sources),
        error=error,
        tolerance=0.0,
        peers={"eager": lambda: lambda: torch._foreach_copy_(destinations, sources)},
    )


def block_copies_case(machine: Machine) -> Case:
    """What the followers of 64 prompts take over: the last block of each, in the keys and values of 28 layers."""
    sizes, pairs = machine.sizes, 64
    shape = 2 * pairs, 16, sizes.kv_heads, sizes.head_dim
    tensors = [machine.random(math.prod(shape), dtype=BF16).view(shape) for _ in range(2 * 28)]
    mapping = {pairs + i: i for i in range(pairs)}
    copies = BlockCopies([tensors])
    to, source = torch.tensor([[*mapping], [*mapping.values()]], device=tensors[0].device)

    def eager() -> None:
        for tensor in tensors:
            tensor[to] = tensor[source]

    def error() -> float:
        copies.run([mapping])
        return 0.0 if all(torch.equal(tensor[to], tensor[source]) for tensor in tensors) else math.inf

    return Case(
        name="block copies",
        shape=f"{pairs} blocks of {len(tensors)} tensors [{', '.join(map(str, shape[1:]))}]",
        num_bytes=sum(tensor.nbytes for tensor in tensors),
        ours=lambda: copies.run([mapping]),
        error=error,
        tolerance=0.0,
        peers={"eager": lambda: eager},
    )


CASES: dict[str, Callable[[Machine], Case]] = {
    "attention, decode, group 2": lambda machine: attention_case(machine, 2),
    "attention, decode, group 4": lambda machine: attention_case(machine, 4),
    "attention, prefill, group 2": lambda machine: attention_case(machine, 2, prefill=True),
    "rms_norm": norm_case,
    "add_rms_norm": lambda machine: add_norm_case(machine, machine.sizes.tokens),
    "add_rms_norm, decode": lambda machine: add_norm_case(machine, machine.sizes.decode),
    "gated_activation": activation_case,
    "rope_and_cache": lambda machine: rope_case(machine, machine.sizes.tokens),
    "rope_and_cache, decode": lambda machine: rope_case(machine, machine.sizes.decode),
    "draw": lambda machine: draw_case(machine, BF16),
    "draw, fp32": lambda machine: draw_case(machine, FP32),
    "selective_logprobs": logprob_case,
    "add_lora": lambda machine: lora_case(machine, machine.sizes.tokens),
    "add_lora, decode": lambda machine: lora_case(machine, machine.sizes.decode),
    "copy_all, cast": lambda machine: copy_case(machine, FP32),
    "copy_all": lambda machine: copy_case(machine, BF16),
    "block copies": block_copies_case,
}
