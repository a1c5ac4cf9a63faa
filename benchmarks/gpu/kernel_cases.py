"""The kernels of `kernel_bench.py`: what each is given, what it must compute, and who else computes it."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
import torch
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

from inflight.core.options import EngineOptions
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import AttentionBackend, ForwardBatch, GraphBackend
from inflight.engine.model.attention.flashinfer import FlashInferAttention, why_not_flashinfer
from inflight.engine.model.attention.flashinfer_kernels import VARIABLE, kernels_for
from inflight.engine.model.attention.paged import PagedAttention

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6
REPEATS = 25
COMPILE_UNTIL_S = 33.0
"""Seconds after the start from which on no other peer is compiled, so that all ends within about 45."""
CHUNK = 256
"""Rows of logits that exist in fp64 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    tokens: int = 16_384
    decode: int = 256
    hidden: int = 4096
    intermediate: int = 12_288
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    contexts: tuple[int, int] = (100, 1124)
    """Tokens of the sequences that decode, drawn uniformly."""
    chunks: tuple[int, int] = (4, 512)
    """Chunks of prompts in a pass, and tokens of each."""
    vocab: int = 151_936
    logprob_rows: int = 4096
    copied: tuple[int, ...] = (151_936 * 4096, *[4096 * 4096] * 16, *[4096] * 16)
    rank: int = 16
    adapters: int = 8
    copy_bytes: int = 4 << 30
    matmul: int = 8192
    flush_bytes: int = 1 << 30


SMALL = Sizes(
    tokens=24,
    decode=4,
    hidden=64,
    intermediate=96,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    contexts=(3, 40),
    chunks=(2, 5),
    vocab=1500,
    logprob_rows=6,
    copied=(3000, 64),
    rank=4,
    adapters=2,
    copy_bytes=1 << 16,
    matmul=32,
    flush_bytes=1 << 10,
)

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    shape: str
    dtype: str = "bfloat16"
    num_bytes: int
    """Bytes that one call reads and writes, counted by hand."""
    is_long: bool = True
    """True if moving the bytes takes longer than launches and one way to memory and back; if not, the share of the
    ceiling says nothing."""
    num_flops: float = 0.0
    """Of a kernel that is bound by them."""
    ours: Call
    error: Callable[[], float]
    tolerance: float = 1e-2
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    """Maps a peer to a function that makes its call ready, and raises where it cannot."""


@dataclass(frozen=True, slots=True)
class Machine:
    device: torch.device
    sizes: Sizes
    began_s: float

    @property
    def capability(self) -> int:
        """The major compute capability; 0 for a CPU."""
        return torch.cuda.get_device_capability(self.device)[0] if self.device.type == "cuda" else 0

    def random(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device, dtype=FP32) * scale).to(dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, below, shape, device=self.device)

    def ms(self, call: Call) -> float:
        """Return the median over calls, after two that are not counted."""
        for _ in range(2):
            call()
        if self.device.type == "cpu":
            return 1e3 * median(_wall_s(call) for _ in range(3))
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        other = _flush_buffer(self)
        for began, ended in spans:
            other.sum()  # reads, so that nothing is left in the cache that has yet to be written
            began.record()
            call()
            ended.record()
        torch.cuda.synchronize()
        return median(began.elapsed_time(ended) for began, ended in spans)


def _wall_s(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@cache
def _flush_buffer(machine: Machine) -> torch.Tensor:
    return torch.zeros(machine.sizes.flush_bytes // 4, dtype=FP32, device=machine.device)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖result − expected‖ / ‖expected‖ in fp64; infinite if something is not finite."""
    difference = float(torch.linalg.vector_norm(result.double() - expected.double()))
    norm = float(torch.linalg.vector_norm(expected.double()))
    error = difference / norm if norm else difference
    return error if math.isfinite(error) else math.inf


# ---- kernels --------------------------------------------------------------------------------------------------------


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
                _liger("rms_norm", "LigerRMSNormFunction").apply, x, weight, EPS, 0.0, "llama", False
            ),
            "flashinfer": lambda: partial(_flashinfer("norm", "gen_norm_module").rmsnorm, x, weight, EPS),
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
        return partial(_flashinfer("norm", "gen_norm_module").fused_add_rmsnorm, *copies, weight, EPS)

    peers: dict[str, Callable[[], Call]] = {
        "eager": lambda: lambda: add_rms_norm_reference(x, residual, norm),
        "liger": lambda: partial(
            _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply, x, residual, weight, EPS
        ),
        "flashinfer": flashinfer,
    }
    if tokens == machine.sizes.tokens:
        peers["compiled"] = lambda: partial(_compiled(machine, add_rms_norm_reference), x, residual, norm)
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
            "liger": lambda: partial(_liger("swiglu", "LigerFusedGateUpSiLUMulFunction").apply, gate_up),
            "flashinfer": lambda: partial(
                _flashinfer("activation", "gen_act_and_mul_module", "silu").silu_and_mul, gate_up
            ),
            "compiled": lambda: partial(_compiled(machine, gated_activation_reference), gate_up, "silu"),
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
        peers["compiled"] = lambda: _compiled(machine, plain)
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
        return partial(_flashinfer("sampling", "gen_sampling_module").sampling_from_logits, logits.float())

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
            "compiled": lambda: partial(step, _compiled(machine, selective_logprobs_reference)),
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


def attention_case(machine: Machine, group: int, *, prefill: bool = False) -> Case:
    """Attention over a paged cache with `group` query heads per KV head: of single tokens, or of chunks of prompts."""
    sizes, random = machine.sizes, np.random.default_rng(0)
    dim, kv_heads = sizes.head_dim, sizes.kv_heads
    layer = LayerShape(group * kv_heads, kv_heads, dim, dim, None, BF16, dim**-0.5)
    if prefill:
        count, length = sizes.chunks
        counts = np.full(count, length, np.int32)
        contexts = counts + random.integers(*sizes.contexts, count).astype(np.int32)
    else:
        counts = np.ones(sizes.decode, np.int32)
        contexts = random.integers(*sizes.contexts, sizes.decode).astype(np.int32)
    queries = machine.random(int(counts.sum()), layer.q_heads, dim)
    why_not = why_not_flashinfer([layer], machine.device)

    def begun(backend: AttentionBackend) -> Call:
        """A call that attends over a cache of this backend, the same numbers in all of them."""
        pages = -(-contexts // backend.block_size)
        table = np.zeros((len(contexts), pages.max()), np.int32)
        table[np.arange(pages.max()) < pages[:, None]] = 1 + np.random.default_rng(1).permutation(pages.sum())
        most = int(contexts.max())
        options = EngineOptions(
            "", max_sequences=1, max_context=most, max_prefill_tokens=most, kv_cache_fraction=1.0,
            kv_cache_tokens=int(pages.sum()) * backend.block_size,
        )  # fmt: skip
        memory = KVMemory([layer], backend, options, machine.device)
        generator = torch.Generator(machine.device).manual_seed(0)
        for tensor in (memory.keys[0], memory.values[0]):
            tensor.normal_(generator=generator)
        nothing = torch.empty(0)
        batch = ForwardBatch(
            nothing,
            nothing,
            [],
            [table],
            starts=np.concatenate(([0], np.cumsum(counts)), dtype=np.int32),
            contexts=contexts,
            rows=nothing,
            num_single=0 if prefill else len(counts),
        )
        if isinstance(backend, GraphBackend) and not prefill:
            backend.prepare_graphs(memory, len(counts))
            backend.begin_graph(batch, memory)
        else:
            backend.begin(batch, memory)
        return partial(backend.attend, 0, queries, None)

    def by(asked: str) -> Call:
        """A peer: other kernels of FlashInfer, if they need no compiler and give the same."""
        with _asking(asked):
            chosen = kernels_for(layer, machine.capability)
            kind = chosen.prefill if prefill else chosen.decode
            backend = {"tensor_cores": "fa2"}.get(kind, kind)
            types = BF16, BF16, BF16, torch.int32
            common = *types, dim, dim, 0, False, False
            generator, arguments = (
                ("gen_batch_decode_module", common)
                if backend == "cuda_cores"
                else ("gen_batch_prefill_module", (backend, *common, False))
            )
            _require_compiled("attention.modules", generator, *arguments)
            call = begun(FlashInferAttention([layer], machine.device))
        if (error := relative_error(call(), ours())) > 2e-2:
            raise ValueError(f"its result is off by {error:.1%}")
        return call

    if why_not is None:
        ours, kernels = begun(FlashInferAttention([layer], machine.device)), kernels_for(layer, machine.capability)
        how = kernels.prefill if prefill else kernels.decode
        others = ["prefill=fa2", "prefill=fa3"]
        if not prefill:
            others = ["decode=cuda_cores", "decode=tensor_cores"]
        peers = {asked: partial(by, asked) for asked in others if not asked.endswith(f"={how}")}
    else:
        ours, how, peers = begun(PagedAttention([layer], machine.device)), f"PyTorch: {why_not}", {}

    eager: dict[str, Callable[[], Call]] = {"eager": lambda: begun(PagedAttention([layer], machine.device))}
    pairs = float((counts * (2.0 * contexts - counts + 1) / 2).sum())  # of a query and a key that it sees
    return Case(
        name=f"attention, {'prefill' if prefill else 'decode'}, group {group} ({how})",
        shape=f"{len(counts)} sequences of {contexts.mean():,.0f} tokens, {layer.q_heads}/{kv_heads}·{dim}",
        num_bytes=int(contexts.sum()) * 2 * kv_heads * dim * 2 + 2 * queries.nbytes,
        is_long=not prefill,
        num_flops=4.0 * pairs * layer.q_heads * dim if prefill else 0.0,
        ours=ours,
        error=lambda: relative_error(ours(), begun(PagedAttention([layer], machine.device))()),
        tolerance=2e-2,
        peers=peers | eager,
    )


@contextmanager
def _asking(kernels: str) -> Iterator[None]:
    """Have INFLIGHT_FLASHINFER name these kernels."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = kernels
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


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


# ---- peers ----------------------------------------------------------------------------------------------------------


def _compiled(machine: Machine, function: Callable[..., Any]) -> Callable[..., Any]:
    if machine.device.type == "cpu":
        return function  # a rehearsal: it would need a C++ compiler
    if time.perf_counter() - machine.began_s > COMPILE_UNTIL_S:
        raise TimeoutError(f"not compiled: {COMPILE_UNTIL_S:.0f} s were over")
    return torch.compile(function, dynamic=False)


def _liger(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


def _flashinfer(module: str, generator: str, *arguments: str) -> Any:
    """Import a module of FlashInfer whose kernels are compiled already."""
    _require_compiled(module, generator, *arguments)
    return import_module(f"flashinfer.{module}")


def _require_compiled(module: str, generator: str, *arguments: Any) -> None:
    specification = getattr(import_module(f"flashinfer.jit.{module}"), generator)(*arguments)
    if not specification.is_aot:
        raise RuntimeError("its kernels would be compiled first, which takes minutes")
