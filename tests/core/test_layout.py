"""Where tensors lie in a slot, and how two models are told apart."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONFIGS, make_model

from inflight.core.layout import ALIGNMENT_BYTES, DTYPE_BYTES, WeightLayout
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "m.up_proj.bias", "m.gate_proj.bias"])
        | st.text("xyz.", min_size=1, max_size=6),
        SHAPES,
        st.sampled_from(list(DTYPE_BYTES)),
    ),
    max_size=12,
    unique_by=lambda tensor: tensor[0],
)


@given(TENSORS)
def test_tensors_are_all_placed_and_never_overlap(tensors):
    layout = WeightLayout.build(tensors)
    assert sorted(spec.name for spec in layout.tensors) == sorted(name for name, _, _ in tensors)
    end = 0
    for spec in layout.tensors:
        assert spec.offset >= end
        assert spec.offset % DTYPE_BYTES[spec.dtype] == 0
        end = spec.offset + spec.nbytes
    assert 0 <= layout.total_bytes - end < ALIGNMENT_BYTES
    assert layout.total_bytes % ALIGNMENT_BYTES == 0


def test_projections_that_read_the_same_input_are_adjacent():
    for name in ("qwen3", "llama", "mistral-sliding"):
        specs = {spec.name: spec for spec in layout_of(make_model(name)).tensors}
        for first, second in (("q", "k"), ("k", "v")):
            before = specs[f"model.layers.1.self_attn.{first}_proj.weight"]
            after = specs[f"model.layers.1.self_attn.{second}_proj.weight"]
            assert before.offset + before.nbytes == after.offset
        gate, up = (specs[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        assert gate.offset + gate.nbytes == up.offset
        assert gate.offset % ALIGNMENT_BYTES == 0


def test_tied_tensors_are_stored_once_and_names_are_the_models_own():
    tied, untied = layout_of(make_model("qwen3")), layout_of(make_model("llama"))
    assert "lm_head.weight" not in {spec.name for spec in tied.tensors}
    assert {spec.name for spec in untied.tensors} == set(make_model("llama").state_dict())


def test_a_filled_slot_gives_back_every_tensor():
    for name in CONFIGS:
        model = make_model(name)
        layout = layout_of(model)
        buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        views = slot_views(buffer, layout)
        fill(views, published_tensors(model))
        assert all(torch.equal(views[key], value) for key, value in published_tensors(model).items())


def test_fingerprints_differ_when_anything_differs():
    base = [("a", (2, 3), "float32"), ("b", (4,), "bfloat16")]
    variants = [
        base,
        [("a", (3, 2), "float32"), base[1]],
        [("a", (2, 3), "float16"), base[1]],
        [("c", (2, 3), "float32"), base[1]],
        base[::-1],
        base[:1],
    ]
    assert len({WeightLayout.build(tensors).fingerprint for tensors in variants}) == len(variants)
    assert WeightLayout.build(base).fingerprint == WeightLayout.build(base).fingerprint


def test_a_difference_names_the_tensors_but_allows_other_dtypes():
    ours = WeightLayout.build([("a", (2,), "bfloat16"), ("b", (3,), "bfloat16")])
    same = WeightLayout.build([("a", (2,), "float32"), ("b", (3,), "float32")])
    other = WeightLayout.build([("a", (5,), "float32"), ("c", (3,), "float32")])
    assert ours.difference(same, ours="engine", theirs="trainer") is None
    text = ours.difference(other, ours="engine", theirs="trainer")
    assert text == "b: only in engine; c: only in trainer; a: shape [2] in engine, [5] in trainer"
