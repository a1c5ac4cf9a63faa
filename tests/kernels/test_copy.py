"""Copies into a slot on a CPU: every source cast to its destination's dtype."""

import pytest
import torch
from inflight_kernels import BlockCopies, ScaledCopies, _copy_triton, copy_all
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_every_source_is_cast_into_its_destination():
    torch.manual_seed(0)
    pairs = [(source, destination) for source in (*DTYPES, torch.int64) for destination in DTYPES]
    sources = [(torch.randn(5, 7) * 1e3).to(source) for source, _ in pairs]
    destinations = [torch.empty(5, 9, dtype=destination)[:, 1:8] for _, destination in pairs]
    sources[0].requires_grad_()
    copy_all(destinations, sources)
    for source, destination in zip(sources, destinations, strict=True):
        assert torch.equal(destination, source.detach().to(destination.dtype))
        assert not destination.requires_grad
    copy_all([], [])


def test_a_source_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"each of 2 destinations a source of its shape, got 1$"):
        copy_all([torch.zeros(2), torch.zeros(2)], [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"of 2 destinations .* got 2; \[3\] does not fit \[3, 1\]"):
        copy_all([torch.zeros(2), torch.zeros(3, 1)], [torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90, 100])
def test_the_copy_moves_16_bytes_at_a_time_and_rounds_to_nearest(capability):
    sizes = {"BLOCK": _copy_triton.BLOCK, "TAIL": _copy_triton.TAIL}
    signature = {"table": "*i64", "owners": "*i32"} | dict.fromkeys(sizes, "constexpr")
    source = ASTSource(fn=_copy_triton.copy_kernel, signature=signature, constexprs=sizes)
    ptx = compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "cvt.rn.bf16x2.f32" in ptx


class NeverLaunched:
    """In place of the kernel, where blocks are written that others are copied from."""

    def copy(self, copies):
        assert not any(pairs.keys() & set(pairs.values()) for pairs in copies), copies


@pytest.mark.parametrize("kernel", [None, NeverLaunched()])
def test_blocks_are_copied_as_they_were_before(kernel):
    """A block that was given back before its copy was made may be copied to in the same pass."""
    groups = [[torch.arange(6).repeat(3, 1).T.contiguous(), torch.arange(6.0)[:, None]], [torch.arange(4)[:, None]]]
    copies = BlockCopies(groups)
    copies._kernel = kernel
    copies.run([{1: 2, 2: 3, 0: 5}, {3: 0, 0: 3}])
    assert [tensor[:, 0].tolist() for tensors in groups for tensor in tensors] == [
        [5, 2, 3, 3, 4, 5],
        [5, 2, 3, 3, 4, 5],
        [3, 1, 2, 0],
    ]
    with pytest.raises(ValueError, match="each of 2 groups, got 1"):
        copies.run([{}])


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [6, 8])  # the last two are not contiguous, and special
def test_copies_times_a_factor_round_once(to, source, length):
    sources = [torch.randn(n).to(source) for n in (1, 7, 16, 33, 1000, 0)]
    sources.append(torch.randn(9, 5).to(source)[:, 1:4])
    sources.append(torch.tensor([0.0, -0.0, torch.inf, torch.nan]).to(source))
    destinations = [torch.full(s.shape, 7.0, dtype=to) for s in sources]
    factors = [1.0, 0.3, -2.0, 1e-3, 1 / 3, 5.0, 0.1, 1.0]
    copies = ScaledCopies(destinations[:length], sources[:length])
    for _ in range(3):
        copies.run(factors[:length])
        for destination, s, factor in list(zip(destinations, sources, factors, strict=True))[:length]:
            torch.testing.assert_close(destination, (s.float() * factor).to(to), rtol=0, atol=0, equal_nan=True)
        sources[1].add_(1)  # another value
        sources[2].data = sources[2] * 2  # in another place


def test_factors_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="a source of its shape"):
        ScaledCopies([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(ValueError, match="a factor for each of 1 tensors, got 0"):
        ScaledCopies([torch.zeros(2)], [torch.zeros(2)]).run([])
