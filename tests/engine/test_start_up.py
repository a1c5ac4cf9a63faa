"""Memory at the start of an engine."""

import weakref

import pytest

from inflight.engine import build


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4, "adapters": ("a",)}], ids=["plain", "adapters"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-moe"])
def test_loaded_weights_are_freed_before_a_second_slot_is_made(make_engine, monkeypatch, name, options):
    """Two copies of the weights are there at a time: without this, models of up to half a GPU would not start."""
    loaded, alive = [], []
    load_model, make_slot = build.load_model, build.make_slot

    def noted_model(*args, **kwargs):
        model = load_model(*args, **kwargs)
        loaded.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    def noted_slot(*args):
        alive.append(sum(reference() is not None for reference in loaded))
        return make_slot(*args)

    monkeypatch.setattr(build, "load_model", noted_model)
    monkeypatch.setattr(build, "make_slot", noted_slot)
    make_engine(name, slots=3, **options)
    assert alive == [len(loaded), 0, 0]
