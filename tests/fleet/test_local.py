"""What the engine's process gets of its launcher's environment."""

import logging

import pytest

from inflight.fleet.process.local import _environment


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("expandable_segments:True", None),
        ("Expandable_Segments : true", None),
        ("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:64"),
        (
            "roundup_power2_divisions:[256:1,512:2,>:4], expandable_segments:True ,garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8",
        ),
        ("expandable_segments:False", "expandable_segments:False"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_the_engine_starts_without_expandable_segments_and_keeps_the_allocators_other_options(
    caplog, name, ours, theirs
):
    with caplog.at_level(logging.INFO, "inflight.engine"):
        environment = _environment({"PATH": "/bin", name: ours})
    assert environment == {"PATH": "/bin"} | ({name: theirs} if theirs else {})
    assert ("starts without the allocator's expandable_segments" in caplog.text) == (ours != theirs)


def test_variables_of_the_engine_alone_take_the_place_of_the_trainers():
    ours = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "INFLIGHT_ENGINE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
        "INFLIGHT_ENGINE_PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "INFLIGHT_COMMIT": "abc",
    }
    assert _environment(ours) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "INFLIGHT_COMMIT": "abc"}
