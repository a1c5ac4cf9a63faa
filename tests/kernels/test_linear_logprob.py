"""Log-probabilities straight from hidden states: values, gradients, memory and errors."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inflight_kernels import _linear_logprob_cpu
from inflight_kernels import linear_logprobs as fused
from inflight_kernels import linear_logprobs_reference as reference
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inflight.tools.bench import loss as bench
from inflight.tools.bench.options import LossOptions

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Several pieces of rows, of the vocabulary and of the masks, the last of each shorter."""
    for name, size in (("ROWS", 5), ("COLUMNS", 64), ("ENTRIES", 7)):
        monkeypatch.setattr(_linear_logprob_cpu, name, size)


def make_problem(N, H, V, dtype=torch.float64, bias=False, seed=0):
    """hidden, weight, bias or None, tokens, temperatures."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tokens = torch.randint(0, V, (N,), generator=generator)
    temperatures = torch.empty(N).uniform_(0.5, 1.5, generator=generator)
    return random(N, H), random(V, H), random(V) if bias else None, tokens, temperatures


def ragged(sets):
    return torch.tensor([0] + [len(ids) for ids in sets]).cumsum(0), torch.tensor(
        [i for ids in sets for i in ids], dtype=torch.int64
    )


def random_sets(tokens, V, *, every, seed=0):
    """A set for every row, or for two out of three."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for row, token in enumerate(tokens.tolist()):
        size = int(torch.randint(1, 20, (), generator=generator))
        others = [i for i in torch.randperm(V, generator=generator)[:size].tolist() if i != token]
        sets.append([*others, token] if every or row % 3 else [])
    return ragged(sets)


def run(function, problem, dtype, **options):
    """(values, gradients) with leaves of this dtype; every value takes part in the loss with a weight of its own."""
    *leaves, tokens, temperatures = problem
    leaves = [leaf if leaf is None else leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    logprobs, entropies = function(leaves[0], leaves[1], tokens, temperatures, bias=leaves[2], **options)
    values = [logprobs] if entropies is None else [logprobs, entropies]
    generator = torch.Generator().manual_seed(1)
    loss = sum((value * torch.randn(len(value), generator=generator)).sum() for value in values) / len(tokens)
    used = [leaf for leaf in leaves if leaf is not None]
    return [value.detach() for value in values], torch.autograd.grad(loss, used)


def assert_close(results, expected, tolerance):
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "some", "all"])
def test_values_and_gradients_are_those_of_float64(dtype, mask):
    for bias, softcap, entropy in itertools.product((False, True), (None, 3.0), (False, True)):
        problem = make_problem(13, 24, 150, dtype, bias)
        sets = None if mask == "none" else random_sets(problem[3], 150, every=mask == "all")
        options = {"softcap": softcap, "sampling_mask": sets, "entropy": entropy}
        values, grads = run(fused, problem, dtype, **options)
        expected, expected_grads = run(reference, problem, torch.float64, **options)
        assert all(value.dtype == torch.float32 for value in values)
        assert all(grad.dtype == dtype for grad in grads)
        # Values are not rounded, whatever the dtype of hidden and weight; gradients are, once.
        assert_close(values, expected, 1e-5)
        assert_close(grads, expected_grads, {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype])


@pytest.mark.medium
@pytest.mark.parametrize("every", [False, True])
def test_gradients_are_those_of_finite_differences(every):
    hidden, weight, bias, tokens, temperatures = make_problem(6, 4, 70, bias=True)
    mask = random_sets(tokens, 70, every=every)

    def function(hidden, weight, bias):
        return fused(hidden, weight, tokens, temperatures, bias=bias, softcap=4.0, sampling_mask=mask, entropy=True)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias), atol=1e-6)
    assert function(hidden, weight, bias)[0].dtype == torch.float64


@given(st.data())
@settings(max_examples=40)
def test_ragged_sampling_masks(data):
    V = data.draw(st.integers(1, 40))
    sets = data.draw(st.lists(st.lists(st.integers(0, V - 1), unique=True, max_size=V), max_size=9))
    problem = [*make_problem(len(sets), 3, V, bias=True)]
    problem[3] = torch.tensor([data.draw(st.sampled_from(ids or [0])) for ids in sets], dtype=torch.int64)
    results, expected = (
        run(function, problem, torch.float64, sampling_mask=ragged(sets), entropy=True)
        for function in (fused, reference)
    )
    for result, other in zip(results, expected, strict=True):
        assert_close(result, other, 1e-9)


def test_a_set_of_the_whole_vocabulary_or_of_one_token():
    problem = make_problem(4, 8, 30)
    everything = ragged([list(range(30))] * 4)
    for results, expected in zip(
        run(fused, problem, torch.float64, sampling_mask=everything, entropy=True),
        run(fused, problem, torch.float64, entropy=True),
        strict=True,
    ):
        assert_close(results, expected, 1e-12)
    alone = ragged([[token] for token in problem[3].tolist()])
    values, grads = run(fused, problem, torch.float64, sampling_mask=alone, entropy=True)
    assert all(not tensor.any() for tensor in (*values, *grads))


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, _, tokens, temperatures = make_problem(6, 8, 90, torch.float32)
    mask = random_sets(tokens, 90, every=False)
    both = torch.autograd.grad(
        fused(hidden, weight, tokens, temperatures, sampling_mask=mask)[0].sum(), (hidden, weight)
    )
    for detached in (0, 1):
        leaves = [hidden, weight]
        leaves[detached] = leaves[detached].detach()
        logprobs, _ = fused(*leaves, tokens, temperatures, sampling_mask=mask)
        (grad,) = torch.autograd.grad(logprobs.sum(), leaves[1 - detached])
        assert torch.equal(grad, both[1 - detached])
    logprobs, entropies = fused(hidden, weight, tokens, temperatures, sampling_mask=mask, entropy=True)
    _, expected = reference(hidden, weight, tokens, temperatures, sampling_mask=mask, entropy=True)
    assert logprobs.requires_grad
    assert_close(
        torch.autograd.grad(entropies.sum(), (hidden, weight)),
        [grad.double() for grad in torch.autograd.grad(expected.sum(), (hidden, weight))],
        1e-5,
    )


def test_inputs_may_be_strided_and_indices_i32():
    problem = [tensor.detach() for tensor in make_problem(7, 12, 80, torch.float32, bias=True)]
    mask = random_sets(problem[3], 80, every=False)
    expected = run(fused, problem, torch.float32, sampling_mask=mask, entropy=True)

    def spread(tensor):
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    gaps = [torch.cat((tensor, tensor), -1)[:, :12] for tensor in problem[:2]]
    for hidden, weight in ([spread(problem[0]), spread(problem[1])], [gaps[0], problem[1].T.contiguous().T], gaps):
        strided = (hidden, weight, *(spread(tensor) for tensor in problem[2:]))
        assert not any(tensor.is_contiguous() for tensor in strided)
        results = run(fused, strided, torch.float32, sampling_mask=(mask[0].int(), mask[1].int()), entropy=True)
        for result, other in zip(results, expected, strict=True):
            assert_close(result, [tensor.double() for tensor in other], 1e-6)


def test_no_rows_have_no_logprobs_and_zero_gradients():
    hidden, weight, bias, tokens, temperatures = make_problem(0, 4, 70, torch.float32, bias=True)
    nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    for mask in (None, nothing):
        logprobs, entropies = fused(hidden, weight, tokens, temperatures, bias=bias, sampling_mask=mask, entropy=True)
        assert logprobs.shape == entropies.shape == (0,)
        grads = torch.autograd.grad(logprobs.sum() + entropies.sum(), (hidden, weight, bias))
        assert [list(grad.shape) for grad in grads] == [[0, 4], [70, 4], [70]]
        assert not any(grad.any() for grad in grads)


def test_a_bias_of_minus_infinity_takes_tokens_out():
    hidden, weight, _, tokens, temperatures = make_problem(6, 8, 200, torch.float32)
    bias = torch.zeros(200)
    bias[:130] = bias[150] = -torch.inf  # two whole pieces of the vocabulary
    tokens = tokens % 50 + 140
    tokens[tokens == 150] = 151
    left = [i for i in range(200) if bias[i] == 0]
    results = []
    for options in (
        {"bias": bias},
        {"sampling_mask": ragged([left] * 6)},
        {"bias": bias, "sampling_mask": ragged([list(range(200))] * 6)},
    ):
        logprobs, entropies = fused(hidden, weight, tokens, temperatures, entropy=True, **options)
        results.append((logprobs, entropies, *torch.autograd.grad(logprobs.sum() + entropies.sum(), (hidden, weight))))
    for result in results[1:]:
        assert_close(result, [tensor.double() for tensor in results[0]], 1e-5)


def test_a_token_outside_the_vocabulary_has_logprob_nan():
    hidden, weight, _, tokens, temperatures = make_problem(3, 4, 70, torch.float32)
    tokens[0], tokens[1] = 70, -1
    assert fused(hidden, weight, tokens, temperatures)[0].isnan().tolist() == [True, True, False]


def test_results_repeat():
    problem = make_problem(40, 16, 100, torch.float32)
    mask = random_sets(problem[3], 100, every=False)
    first, second = (run(fused, problem, torch.float32, sampling_mask=mask, entropy=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True))


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made, at most at a time."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return out


@pytest.mark.parametrize("num_ids", [0, 64])
def test_memory_is_a_quarter_of_that_of_logits_at_most(monkeypatch, num_ids):
    monkeypatch.undo()  # pieces of their real sizes
    N, H, V = 512, 64, 16_384
    hidden, weight, _, tokens, temperatures = make_problem(N, H, V, torch.float32)
    sets = None
    if num_ids:
        ids = (tokens[:, None] + torch.arange(num_ids)) % V
        sets = torch.arange(0, (N + 1) * num_ids, num_ids), ids.flatten()
    peaks = []
    for function in (fused, reference):
        with LiveBytes() as live:
            torch.autograd.grad(
                -function(hidden, weight, tokens, temperatures, sampling_mask=sets)[0].mean(), (hidden, weight)
            )
        peaks.append(live.peak)
    assert peaks[1] > 2 * N * V * 4
    assert peaks[0] <= 0.25 * peaks[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, r"expected hidden \[N, H\], .* got \[3, 5\], \[9, 4\], \[3\] and \[3\]"),
        ({"tokens": torch.zeros(2, dtype=torch.int64)}, r"got \[3, 4\], \[9, 4\], \[2\] and \[3\]"),
        ({"weight": torch.zeros(0, 4)}, r"weight \[V > 0, H\]"),
        ({"tokens": torch.zeros(3)}, "expected tokens i64 and temperatures float, got torch.float32 and torch.float32"),
        ({"bias": torch.zeros(4)}, r"expected a bias \[9\], one value per row of weight, got \[4\]"),
        ({"weight": torch.zeros(9, 4).half()}, "of one dtype out of float32, .* got torch.float16, torch.float32"),
        ({"softcap": 0.0}, "expected a softcap > 0, or None for logits as they are, got 0.0"),
        ({"sampling_mask": ([0, 1], [0])}, r"expected mask offsets i64\[4\] and token ids .* got torch.int64 \[2\]"),
        (
            {"sampling_mask": ([0, 2, 1, 2], [0, 0])},
            "number of token ids, 2, got 2 and then 1 at row 1",
        ),
        (
            {"sampling_mask": ([0, 1, 1, 1], [0, 0])},
            "number of token ids, 2, got 0 first and 1 last",
        ),
        ({"sampling_mask": ([0, 1, 1, 3], [0, 4, 5])}, "the sampling mask of row 2 does not contain its token 0"),
        (
            {"sampling_mask": ([0, 1, 1, 3], [0, 0, 9])},
            "id 9 in the sampling mask of row 2 is outside",
        ),
        ({"sampling_mask": ([0, 1, 1, 3], [0, 0, -1])}, "id -1 in the sampling mask of row 2 is outside"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    arguments = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(9, 4),
        "tokens": torch.zeros(3, dtype=torch.int64),
    } | wrong
    if "sampling_mask" in wrong:
        arguments["sampling_mask"] = tuple(torch.tensor(part) for part in wrong["sampling_mask"])
    leading = [arguments.pop(name) for name in ("hidden", "weight", "tokens")]
    with pytest.raises(ValueError, match=message):
        fused(*leading, torch.ones(3), **arguments)


# ---- the benchmark --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ids", [0, 5])
def test_the_benchmark_measures_errors_and_compares(monkeypatch, num_ids):
    monkeypatch.setattr(bench, "_peak_mib", lambda settings, dtype, problem, name: {"ours": 1.0, "naive": 8.0}[name])
    monkeypatch.setattr(bench, "REFERENCE_ROWS", 12)
    settings = LossOptions(
        device="cpu", dtype="auto", tokens=30, hidden=16, vocab=200, sampling_mask=num_ids, pairs=2, seed=0
    )
    result = bench.measure(settings)
    assert result["dtype"] == "float32"
    assert 0 < result["max_abs_err"] < 1e-5
    assert 0 < result["grad_max_abs_err"] < 1e-6
    assert result["memory_ratio"] == 0.125
    assert result["time_ratio"] > 0


@pytest.mark.long
def test_memory_of_the_naive_way_is_that_of_logits():
    settings = LossOptions(
        device="cpu", dtype="auto", tokens=64, hidden=8, vocab=20_000, sampling_mask=0, pairs=1, seed=0
    )
    problem = bench._make_problem(settings, torch.device("cpu"), torch.float32)
    peaks = {}
    for name, variant in bench.VARIANTS.items():
        with LiveBytes() as live:
            bench._step(variant, problem)
        peaks[name] = live.peak
    assert peaks["naive"] > 2 * 64 * 20_000 * 4 > 4 * peaks["ours"]
