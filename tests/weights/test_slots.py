"""Copies in pieces: they cover everything once, and are of the size that was asked for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inflight
from inflight.weights.transports import slots as slots_module
from inflight.weights.transports.base import StagedVersion
from inflight.weights.transports.slots import ChunkedCopy, SlotSender, chunks

CUT = 8192
SHAPES = st.lists(st.sampled_from([(3,), (2, 5000), (4 * CUT + 1,), (7, CUT), (0, 4)]), min_size=1, max_size=6)


@given(SHAPES, st.sampled_from([0, 1, 6 * CUT, 6 * 3 * CUT + 7, 10**9]), st.booleans())
def test_pieces_cover_everything_once_and_are_not_too_large(shapes, piece_bytes, transposed):
    sources = [torch.randn(shape) for shape in shapes]
    if transposed:
        sources = [source.t() if source.dim() == 2 else source for source in sources]
    destinations = [torch.full(source.shape, torch.nan, dtype=torch.bfloat16) for source in sources]
    written = 0
    for to, source in chunks(destinations, sources, piece_bytes):
        if piece_bytes and not transposed:  # what is not contiguous stays whole
            assert sum(t.nbytes for t in (*to, *source)) <= max(piece_bytes, 6 * CUT) + 6 * CUT
        for one, other in zip(to, source, strict=True):
            assert one.data_ptr() % 16 == other.data_ptr() % 16 == 0
            assert bool(one.isnan().all()), "it was copied before"
            one.copy_(other)
            written += one.numel()
    assert written == sum(source.numel() for source in sources)
    for to, source in zip(destinations, sources, strict=True):
        assert torch.equal(to, source.bfloat16())


def test_one_tensor_makes_pieces_of_the_size_that_was_asked_for():
    source = torch.zeros(10 * CUT)
    made = list(chunks([torch.zeros(10 * CUT)], [source], 3 * 8 * CUT))
    assert [sum(len(t) for t in to) for to, _ in made] == [3 * CUT, 3 * CUT, 3 * CUT, CUT]
    assert len(list(chunks([torch.zeros(10 * CUT)], [source], 0))) == 1


def test_the_first_copy_measures_and_the_next_are_in_pieces_of_that_many_milliseconds(monkeypatch):
    sizes = []

    def timed(to, source):  # 1 GB/s
        sizes.append(sum(t.nbytes for t in (*to, *source)))
        return sizes[-1] / 1e9

    monkeypatch.setattr(slots_module, "_timed", timed)
    copy = ChunkedCopy(chunk_ms=0.5)
    tensors = [torch.zeros(1 << 18)], [torch.zeros(1 << 18)]
    copy(*tensors)
    assert sizes == [1 << 21]
    assert copy.bytes_per_s == pytest.approx(1e9)
    copy(*tensors)
    assert sum(sizes[1:]) == 1 << 21
    assert max(sizes[1:]) <= 0.5e-3 * 1e9


def test_what_several_engines_get_is_copied_in_pieces_too():
    data = torch.randint(256, (3 * CUT + 5,), dtype=torch.uint8)
    sender, told = inflight.Slots(piece_ms=1e-6).sender(), []
    assert isinstance(sender, SlotSender)
    sender._buffers = [torch.zeros_like(data) for _ in range(2)]

    class Engine:
        def announce(self, slot, published, checksum):
            told.append((slot, published.version))

    engine = Engine()
    for slot in (0, 1):  # whole, then in pieces
        sender.deliver({engine: slot}, StagedVersion(1 + slot, 0, data), None)
    assert all(torch.equal(buffer, data) for buffer in sender._buffers)
    assert told == [(0, 1), (1, 2)]
    assert sender._copy.bytes_per_s > 0


def test_pieces_of_negative_length_are_refused():
    with pytest.raises(ValueError, match="piece_ms is a number of milliseconds"):
        inflight.Slots(piece_ms=-1)
