"""`inflight bench loss`: log-probabilities from hidden states, compared with log-probabilities from logits, forward and
backward.

Our function is `linear_logprobs`. The naive way multiplies, divides by the temperature, computes log_softmax over all
logits, and picks the tokens; with sampling masks it masks the other logits. The loss is −mean of the log-probabilities.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from inflight_kernels import linear_logprobs, linear_logprobs_reference

from inflight.engine.model.device import resolve_device
from inflight.tools.bench.options import LossOptions
from inflight.tools.progress import Progress, untold

REFERENCE_ROWS = 256
"""Number of rows with logits in float64 at a time."""
MATMULS = 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Problem:
    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    tokens_N: torch.Tensor
    temperatures_N: torch.Tensor
    sampling_mask: tuple[torch.Tensor, torch.Tensor] | None

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.hidden_NH, self.weight_VH


_Variant = Callable[[_Problem], torch.Tensor]


def measure(settings: LossOptions, progress: Progress = untold) -> dict[str, Any]:
    """Measure time, memory and error of our function, and time and memory of the naive way.

    max_abs_err, grad_max_abs_err: errors of log-probabilities, and of the gradients of hidden and weight, against
    float64. time_ratio: naive / ours, median over `pairs` of alternated runs. peak_mb, naive_peak_mb: MiB above the
    inputs and two gradients. memory_by names the source: on a CPU the peak of the resident memory of a fresh process
    ("resident"), including allocations of libraries; on a GPU PyTorch's allocator ("allocator").

    On a GPU and without sampling masks: matmul_tflops is the rate of the product of hidden and weight alone in the same
    dtype, tflops is our rate for 6 · tokens · hidden · vocab operations, and matmul_share is their ratio. The
    additional product in our backward is not counted.
    """
    if settings.sampling_mask > settings.vocab:
        raise ValueError(f"--sampling-mask {settings.sampling_mask} is more than the vocabulary of {settings.vocab}")
    device = resolve_device(settings.device)
    dtype = {"cpu": "float32"}.get(device.type, "bfloat16") if settings.dtype == "auto" else settings.dtype
    problem = _make_problem(settings, device, getattr(torch, dtype))

    progress("memory", 0.0)
    peaks = {name: _peak_mib(settings, dtype, problem, name) for name in VARIANTS}
    progress("errors against float64", 0.1)
    error, grad_error = _errors(problem)
    matmul_tflops = None
    if device.type == "cuda" and not settings.sampling_mask:
        matmul_tflops = _matmul_tflops(problem)
    times_ms: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for variant in VARIANTS.values():
        _timed_ms(partial(_step, variant), problem)  # not counted
    for pair in range(settings.pairs):
        progress(f"pair {pair + 1} of {settings.pairs}", 0.2 + 0.8 * pair / settings.pairs)
        for name, variant in VARIANTS.items():
            times_ms[name].append(_timed_ms(partial(_step, variant), problem))

    ours_ms = median(times_ms["ours"])
    tflops = None
    if matmul_tflops is not None:
        tflops = 6 * settings.tokens * settings.hidden * settings.vocab / ours_ms / 1e9
    return {
        "device": device.type,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "max_abs_err": error,
        "grad_max_abs_err": grad_error,
        "peak_mb": peaks["ours"],
        "naive_peak_mb": peaks["naive"],
        "memory_ratio": peaks["ours"] / peaks["naive"],
        "memory_by": "resident" if device.type == "cpu" else "allocator",
        "time_ratio": median(n / o for n, o in zip(times_ms["naive"], times_ms["ours"], strict=True)),
        "ours_ms": ours_ms,
        "naive_ms": median(times_ms["naive"]),
        "matmul_tflops": matmul_tflops,
        "tflops": tflops,
        "matmul_share": tflops / matmul_tflops if tflops and matmul_tflops else None,
    }


def _make_problem(settings: LossOptions, device: torch.device, dtype: torch.dtype) -> _Problem:
    """Return logits of about unit variance, and a temperature for each row. They are drawn on the device: on a CPU half
    a billion weights take longer than the whole measurement."""
    generator = torch.Generator(device).manual_seed(settings.seed)
    on: dict[str, Any] = {"generator": generator, "device": device}
    rows, width, vocabulary = settings.tokens, settings.hidden, settings.vocab
    hidden_NH = torch.randn(rows, width, **on)
    weight_VH = torch.randn(vocabulary, width, **on).div_(width**0.5)
    tokens_N = torch.randint(0, vocabulary, (rows,), **on)
    temperatures_N = torch.empty(rows, device=device).uniform_(0.5, 1.5, generator=generator)
    mask = None
    if settings.sampling_mask:
        steps = 1 + torch.randperm(vocabulary - 1, **on)[: settings.sampling_mask - 1]
        ids = (tokens_N[:, None] + torch.cat((steps.new_zeros(1), steps))) % vocabulary
        mask = torch.arange(rows + 1) * settings.sampling_mask, ids.flatten()
    hidden_NH, weight_VH = hidden_NH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_()
    return _Problem(hidden_NH, weight_VH, tokens_N, temperatures_N, mask)


def _ours(problem: _Problem) -> torch.Tensor:
    return linear_logprobs(
        *problem.leaves(), problem.tokens_N, problem.temperatures_N, sampling_mask=problem.sampling_mask
    )[0]


def _naive(problem: _Problem) -> torch.Tensor:
    scaled_NV = (problem.hidden_NH @ problem.weight_VH.T).float() / problem.temperatures_N[:, None]
    if problem.sampling_mask is not None:
        dropped_NV = torch.ones_like(scaled_NV, dtype=torch.bool)
        dropped_NV.scatter_(1, problem.sampling_mask[1].view(len(scaled_NV), -1), False)
        scaled_NV = scaled_NV.masked_fill(dropped_NV, -torch.inf)
    return torch.log_softmax(scaled_NV, -1).gather(1, problem.tokens_N[:, None])[:, 0]


VARIANTS: dict[str, _Variant] = {"naive": _naive, "ours": _ours}


def _step(variant: _Variant, problem: _Problem) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(-variant(problem).mean(), problem.leaves())


def _timed_ms(work: Callable[[_Problem], Any], problem: _Problem) -> float:
    device = problem.hidden_NH.device
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    done = work(problem)
    synchronize()
    del done
    return 1e3 * (time.perf_counter() - began)


def _matmul_tflops(problem: _Problem) -> float:
    hidden_NH, weight_VH = (leaf.detach() for leaf in problem.leaves())
    out = hidden_NH @ weight_VH.T
    times_ms = [_timed_ms(lambda _: torch.mm(hidden_NH, weight_VH.T, out=out), problem) for _ in range(MATMULS)]
    return 2 * hidden_NH.numel() * len(weight_VH) / median(times_ms) / 1e9


def _errors(problem: _Problem) -> tuple[float, float]:
    """Return the largest differences from float64, in log-probabilities and in gradients."""
    logprobs_N = _ours(problem)
    grads = torch.autograd.grad(-logprobs_N.mean(), problem.leaves())
    logprobs_N = logprobs_N.detach()
    rows = len(logprobs_N)
    weight_VH = problem.weight_VH.detach().double().requires_grad_()
    error = grad_error = 0.0
    for first in range(0, rows, REFERENCE_ROWS):
        piece = slice(first, first + REFERENCE_ROWS)
        hidden_NH = problem.hidden_NH[piece].detach().double().requires_grad_()
        mask = None
        if problem.sampling_mask is not None:
            offsets, ids = problem.sampling_mask[0][first : first + REFERENCE_ROWS + 1], problem.sampling_mask[1]
            mask = offsets - offsets[0], ids[int(offsets[0]) : int(offsets[-1])]
        expected_N, _ = linear_logprobs_reference(
            hidden_NH, weight_VH, problem.tokens_N[piece], problem.temperatures_N[piece], sampling_mask=mask
        )
        (-expected_N.sum() / rows).backward()
        assert hidden_NH.grad is not None
        error = max(error, float((logprobs_N[piece] - expected_N.detach()).abs().max()))
        grad_error = max(grad_error, float((grads[0][piece] - hidden_NH.grad).abs().max()))
    assert weight_VH.grad is not None
    return error, max(grad_error, float((grads[1] - weight_VH.grad).abs().max()))


def _peak_mib(settings: LossOptions, dtype: str, problem: _Problem, name: str) -> float:
    device = problem.hidden_NH.device
    if device.type == "cpu":
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_resident_peak_mib, settings, dtype, name, torch.get_num_threads()).result()
    _step(VARIANTS[name], problem)  # compiled kernels and the workspaces of libraries stay
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    grads = _step(VARIANTS[name], problem)
    return (torch.cuda.max_memory_allocated(device) - before - sum(grad.nbytes for grad in grads)) / MIB


def _resident_peak_mib(settings: LossOptions, dtype: str, name: str, num_threads: int) -> float:
    """Measure in a fresh process. A small problem first loads the libraries."""
    torch.set_num_threads(num_threads)
    small = replace(settings, tokens=32, hidden=32, vocab=64, sampling_mask=min(settings.sampling_mask, 8))
    _step(VARIANTS[name], _make_problem(small, torch.device("cpu"), getattr(torch, dtype)))
    problem = _make_problem(settings, torch.device("cpu"), getattr(torch, dtype))
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak, after making the problem
    grads = _step(VARIANTS[name], problem)
    return (_status_bytes("VmHWM") - before - sum(grad.nbytes for grad in grads)) / MIB


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
